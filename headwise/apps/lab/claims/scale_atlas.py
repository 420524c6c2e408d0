"""An atlas of the scale: d_k^-α over width, rate, start and length: scale-atlas, scale-width."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import Dot
from headwise import mask as masks
from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.grids import (
    Examples,
    GridModel,
    mean_loss,
    recall_examples,
    start_training,
    text_examples,
)
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import Move
from headwise.apps.train.data.pairs import read, split
from headwise.apps.train.stacked_training import StackedTraining
from headwise.apps.train.stacking import StackedAttention
from headwise.messages import Sentence
from headwise.nn import Block, MultiHeadAttention, ReLU, RMSNorm

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Exponents: scores are q·k / d_k^α."""
LAYERS = 2
BATCH = 32
LETTERS = 64
"""The most frequent letters of a text; others are one."""
TASKS = {"recall": both("recall", "联想回忆"), "language": both("language", "语言")}
WAYS: Mapping[str, Sentence] = {
    **{str(alpha): both("α = {alpha:g}", "α = {alpha:g}", alpha=alpha) for alpha in ALPHAS},
    "norm": both("QK-norm", "QK 归一化"),
    "swapped": both("no scale, smaller start and rate", "不缩放，初值与学习率更小"),
}
"""What is trained beside each other: each exponent; normed queries and keys; and α = ½ in other
words: no scale, W_q and W_k divided by d_k^¼ at the start, and their rates too."""
MATTERS = 0.1
"""Nats by which the loss has to be higher before a scale is called worse."""
MOSTLY = 0.9
"""The share of settings that counts as all of them, but for a few."""
HALF = "0.5"


@cache
def letters_of(form: str) -> Tensor:
    """The English sentences of the corpus as numbers of letters, one sentence to a line."""
    if form == "tiny":
        text = "the cat sat on the mat.\n" * 40
    else:
        text = "\n".join(english.lower() for english, _ in split(read("tatoeba-en-fr")).train)
    common = [letter for letter, _ in Counter(text).most_common(LETTERS - 1)]
    known = {letter: number for number, letter in enumerate(common)}
    return torch.tensor([known.get(letter, LETTERS - 1) for letter in text])


def drawn(lab: Lab, task: str, length: int, count: int, seed: int) -> Examples:
    """Sequences of a task, drawn by a seed."""
    generator = torch.Generator().manual_seed(seed)
    if task == "recall":
        half = torch.full((count,), length // 2)
        return recall_examples(half, torch.zeros_like(half), length // 2, length, generator)
    return text_examples(count, letters_of(lab.form), LETTERS, length, generator)


def model(examples: Examples, width: int, way: str, gain: float, seed: int) -> nn.Module:
    """Two layers with one head each, whose queries and keys are as wide as the model."""
    torch.manual_seed(seed)
    alpha = 0.5 if way == "norm" else 0.0 if way == "swapped" else float(way)
    layers = []
    for _ in range(LAYERS):
        attention = MultiHeadAttention(
            width,
            1,
            score=Dot(width**-alpha),
            qk_norm=RMSNorm() if way == "norm" else None,
            mask=masks.causal(),
        )
        factor = width**-0.25 if way == "swapped" else gain
        for projection in (attention.query, attention.key):
            assert isinstance(projection, nn.Linear)
            with torch.no_grad():
                projection.weight.mul_(factor)
        layers.append(Block(width, attention, ReLU(2 * width).build(width)))
    return GridModel(examples, width, layers)


def atlas_pieces(lab: Lab) -> list[Piece]:
    """The trainings of `atlas`, one piece for each width, length and task."""
    return [
        (
            f"atlas-{task}-{length}-{width}",
            stretch,
            {"task": task, "length": length, "width": width},
        )
        for width in lab.pick("widths", tiny=(8, 16), quick=(16, 64), full=(32, 128, 512))
        for length in lab.pick("lengths", tiny=(8,), quick=(16,), full=(16, 64))
        for task in TASKS
    ]


def stretch(lab: Lab, folder: Path | None, task: str, length: int, width: int) -> dict[str, Any]:
    """Train every way at every rate, start and seed, as two stacks; the loss and the logits."""
    steps = lab.pick("steps", tiny=4, quick=100, full=300)
    rates = lab.pick(
        "rates", tiny=(4e-3,), quick=(1e-3, 4e-3, 1.6e-2), full=(2.5e-4, 1e-3, 4e-3, 1.6e-2)
    )
    gains = lab.pick("gains", tiny=(1.0,), quick=(0.25, 1.0, 4.0))
    seeds = range(lab.pick("seeds", tiny=1, quick=1, full=2))
    data = [drawn(lab, task, length, steps * BATCH, seed) for seed in seeds]
    ways = [(str(alpha), gain) for alpha in ALPHAS for gain in gains] + [("swapped", 1.0)]
    rows: list[dict[str, Any]] = []
    for stack in (ways, [("norm", 1.0)]):
        runs = [(*way, rate, seed) for way in stack for rate in rates for seed in seeds]
        models = [model(data[0], width, way, gain, seed) for way, gain, _, seed in runs]
        every = [rate for _, _, rate, _ in runs]
        of = [seed for *_, seed in runs]
        training = start_training(lab, models, every, steps, data, of, BATCH)
        training.peaks = training.peaks * swapped_rates(training, runs, width)
        training.rates = training.peaks.clone()
        seen = [sizes(training, data[0])]
        for until in (max(1, steps // 10), steps):
            while training.step < until:
                training.update()
            seen.append(sizes(training, data[0]))
            lab.report(f"{task}, {length} tokens, width {width}, step", until, steps)
        last, whole = (
            mean_loss(training, steps - max(1, steps // 10), steps),
            mean_loss(training, 0, steps),
        )
        for number, (way, gain, rate, seed) in enumerate(runs):
            rows.append(
                {
                    **{"task": task, "length": length, "width": width},
                    **{"way": way, "gain": gain, "rate": rate, "seed": seed},
                    "loss": told(last[number]),
                    "mean": told(whole[number]),
                    **{
                        name: [told(at[name][number]) for at in seen]
                        for name in ("spread", "largest", "top")
                    },
                }
            )
    return {"steps": steps, "rows": rows}


def told(value: float) -> float | None:
    """A figure to four digits; None for one that is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def swapped_rates(
    training: StackedTraining, runs: Sequence[tuple[str, float, float, int]], width: int
) -> Tensor:
    """Factors on the rates of W_q and W_k where scale, start and rate are swapped, else ones."""
    compared = training.stack.columns(lambda name, shape: ".query." in name or ".key." in name)
    swapped = torch.tensor([float(way == "swapped") for way, *_ in runs], device=compared.device)
    factors: Tensor = 1 - swapped[:, None] * compared * (1 - width**-0.25)
    return factors


def sizes(training: StackedTraining, examples: Examples) -> dict[str, list[float]]:
    """The logits of each run on some sequences: their spread within a row, the largest, and the
    weight of the first key, each over the later half of the rows and a mean of the layers."""
    found: dict[str, list[Tensor]] = {"spread": [], "largest": [], "top": []}

    def look(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(layer, StackedAttention)
        (x,) = inputs
        keys = layer.remember(x).keys[:, 0]
        logits = layer.logits(layer.queries(x), keys, layer.mask)[:, 0]  # (R · B, N, N)
        late = logits[:, logits.shape[1] // 2 :].unflatten(0, (training.runs, -1)).flatten(1, 2)
        seen = late.isfinite()
        count = seen.sum(-1).clamp_min(1)
        plain = late.masked_fill(~seen, 0)
        middle = plain.sum(-1) / count
        square = plain.square().sum(-1) / count - middle.square()
        found["spread"].append(square.clamp_min(0).mean(-1).sqrt())
        found["largest"].append(plain.abs().amax((1, 2)))
        found["top"].append(late.softmax(-1).amax(-1).mean(-1))

    few = examples.tokens[:BATCH].to(training.device).long()
    with training.measuring() as whole:
        hooks = [
            each.register_forward_pre_hook(look)
            for each in whole.modules()
            if isinstance(each, StackedAttention)
        ]
        whole(few.repeat(training.runs, 1, 1))
        for hook in hooks:
            hook.remove()
        return {name: torch.stack(each).mean(0).tolist() for name, each in found.items()}


def atlas(lab: Lab) -> Figures:
    """Small models of every width, length and task, with every scale."""
    found = lab.keep_all(atlas_pieces(lab))
    return {"steps": found[0]["steps"], "rows": [row for each in found for row in each["rows"]]}


PLACE = ("task", "length", "width")


def losses(figures: Figures, *names: str) -> dict[tuple[Any, ...], dict[str, list[float]]]:
    """The final losses by these columns and then by way; one that is not finite is infinite."""
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in figures["rows"]:
        loss = math.inf if row["loss"] is None else row["loss"]
        ways = found.setdefault(tuple(row[name] for name in names), {})
        ways.setdefault(row["way"], []).append(loss)
    return found


def mean(values: Iterable[float]) -> float:
    """The mean of some values."""
    each = list(values)
    return sum(each) / len(each)


def share_right(cells: Iterable[Mapping[str, Sequence[float]]], way: str) -> tuple[int, int]:
    """In how many settings a way's loss is the least, or above it by no more than matters."""
    right, of = 0, 0
    for ways in cells:
        if way in ways:
            least = min(mean(each) for name, each in ways.items() if name != "swapped")
            right += mean(ways[way]) <= least + MATTERS
            of += 1
    return right, of


def tuned(figures: Figures) -> dict[tuple[Any, ...], dict[str, float]]:
    """The loss of each way at the rate and start that suit it best, for each place."""
    found: dict[tuple[Any, ...], dict[str, float]] = {}
    for (*place, _, _), ways in losses(figures, *PLACE, "rate", "gain").items():
        least = found.setdefault(tuple(place), {})
        for way, each in ways.items():
            least[way] = min(mean(each), least.get(way, math.inf))
    return found


def swap_gap(figures: Figures) -> float:
    """The most by which α = ½ in other words differs from it, at any rate."""
    cells = losses({"rows": [x for x in figures["rows"] if x["gain"] == 1.0]}, *PLACE, "rate")
    gaps = [abs(mean(ways["swapped"]) - mean(ways[HALF])) for ways in cells.values()]
    return max(gap for gap in gaps if math.isfinite(gap))


def judge_atlas(figures: Figures) -> Verdict:
    """In nine of ten settings no other exponent may be better; if only at the usual start, that
    is the condition."""
    every = losses(figures, *PLACE, "rate", "gain")
    usual = {place: ways for place, ways in every.items() if place[-1] == 1.0}
    right, of = share_right(every.values(), HALF)
    there, all_of_them = share_right(usual.values(), HALF)
    best = {
        str(alpha): share_right(every.values(), str(alpha))[0] / of
        for alpha in ALPHAS
        if str(alpha) != HALF
    }
    gaps = [ways[HALF] - min(ways.values()) for ways in tuned(figures).values()]
    normed, places = share_right(usual.values(), "norm")
    because = both(
        "of {of} settings (task, length, width, rate, start) α = ½ ends within {matters} nats of "
        "the best exponent in {right:.0%}, α = 0 in {none:.0%}, ¼ in {quarter:.0%}, ¾ in "
        "{three:.0%}, 1 in {whole:.0%}; of the {usual} with usual initial weights, in {there:.0%}, "
        "QK-norm in {normed:.0%}; each at the rate and start that suit it best, ½ is never worse "
        "than the best by more than {gap:.2f} nats; without any scale, with W_q and W_k and their "
        "rates divided by d_k^¼, the loss differs from that of ½ by {swap:.2f} or less",
        "在 {of} 个设置（任务、长度、宽度、学习率、初值）中，α = ½ 的最终损失与最好的相差不超过 "
        "{matters} nat 的占 {right:.0%}，α = 0 占 {none:.0%}，¼ 占 {quarter:.0%}，¾ 占 "
        "{three:.0%}，1 占 {whole:.0%}；在初值照常的 {usual} 个中，½ 占 {there:.0%}，QK 归一化占 "
        "{normed:.0%}；各取最合适的学习率与初值时，½ 比最好的至多差 {gap:.2f} nat；完全不缩放、"
        "而把 W_q、W_k 的初值与学习率都除以 d_k^¼ 时，损失与 ½ 相差不超过 {swap:.2f}",
        of=of,
        matters=MATTERS,
        right=right / of,
        none=best["0.0"],
        quarter=best["0.25"],
        three=best["0.75"],
        whole=best["1.0"],
        usual=all_of_them,
        there=there / all_of_them,
        normed=normed / places,
        gap=max(gaps),
        swap=swap_gap(figures),
    )
    if right >= MOSTLY * of:
        return holds(because)
    if there >= MOSTLY * all_of_them:
        condition = both(
            "the initial weights are the usual ones: a start that is four times larger or smaller "
            "wants another exponent",
            "初始权重照常：初值大四倍或小四倍时，需要另一个指数",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def growth(figures: Figures, way: str, falling: bool, at: int = -1) -> dict[tuple[Any, ...], float]:
    """The power of the width with which the spread of logits grows, for each task and length.

    At one of the rates, or at rates that fall as 1 / width; at the usual start.
    """
    rows = [x for x in figures["rows"] if (x["way"], x["gain"]) == (way, 1.0)]
    least = min(row["width"] for row in rows)
    lines: dict[tuple[Any, ...], dict[int, list[float]]] = {}
    for row in rows:
        rate = row["rate"] * row["width"] / least if falling else row["rate"]
        spread = row["spread"][at]
        if spread:
            line = lines.setdefault((row["task"], row["length"], f"{rate:.3g}"), {})
            line.setdefault(row["width"], []).append(spread)
    widths = {row["width"] for row in rows}
    return {
        place: slope(list(line), [mean(x) for x in line.values()])
        for place, line in lines.items()
        if set(line) == widths
    }


FLAT = 0.1
"""The largest power of the width that counts as no growth."""


def middle(values: Iterable[float]) -> float:
    """The median, or of two the larger."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def judge_width(figures: Figures) -> Verdict:
    """At the start and at the end of the training the spread must not grow with the width; rates
    that fall with the width may be the condition."""
    before = middle(growth(figures, HALF, False, at=0).values())
    powers = {
        (way, falling): growth(figures, way, falling)
        for way in (HALF, "1.0")
        for falling in (False, True)
    }
    medians = {key: middle(found.values()) if found else math.nan for key, found in powers.items()}
    because = both(
        "with q·k/√d_k the spread of the logits grows with the width to the power {before:+.2f} "
        "before training; after {steps} steps, in the median of tasks, lengths and rates, to the "
        "power {constant:+.2f} at a constant rate and {falling:+.2f} where the rate falls as 1 / "
        "width; with q·k/d_k, {whole:+.2f} and {whole_falling:+.2f}",
        "用 q·k/√d_k 时，logits 的离散程度随宽度的次方：训练前 {before:+.2f}；训练 {steps} 步后"
        "（各任务、长度与学习率的中位数），学习率不变时 {constant:+.2f}，学习率按 1/宽度 减小时 "
        "{falling:+.2f}；用 q·k/d_k 时分别是 {whole:+.2f} 和 {whole_falling:+.2f}",
        before=before,
        steps=figures["steps"],
        constant=medians[HALF, False],
        falling=medians[HALF, True],
        whole=medians["1.0", False],
        whole_falling=medians["1.0", True],
    )
    if abs(before) > FLAT:
        return does_not_hold(because)
    if abs(medians[HALF, False]) <= FLAT:
        return holds(because)
    start = both("nothing has been trained yet", "尚未训练")
    lower = both("the learning rate falls as 1 / width", "学习率按 1/宽度 减小")
    return holds_when(lower if abs(medians[HALF, True]) <= FLAT else start, because)


def show_atlas(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The loss against the exponent by width, by rate and by start; where ½ is right."""
    rows = figures["rows"]
    widths, rates, gains = (sorted({x[name] for x in rows}) for name in ("width", "rate", "gain"))
    length, wide = max(x["length"] for x in rows), max(widths)
    task = "language" if any(x["task"] == "language" for x in rows) else rows[0]["task"]
    exponent, loss = both("α", "α"), both("final loss, nats", "最终损失，nat")

    def line(label: Sentence, chosen: Sequence[Mapping[str, Any]]) -> Series:
        found = losses({"rows": chosen}, "task")[(task,)] if chosen else {}
        at = [x for x in ALPHAS if math.isfinite(mean(found.get(str(x), [math.inf])))]
        return Series(label, at, [mean(found[str(x)]) for x in at])

    here = [x for x in rows if (x["task"], x["length"]) == (task, length)]
    usual = [x for x in here if x["gain"] == 1.0]
    low = rates[-2] if len(rates) > 1 else rates[0]
    by_width = tuple(
        line(
            both("width {d}", "宽度 {d}", d=d),
            [x for x in usual if (x["width"], x["rate"]) == (d, low)],
        )
        for d in widths
    )
    by_rate = tuple(
        line(
            both("rate {rate:g}", "学习率 {rate:g}", rate=rate),
            [x for x in usual if (x["width"], x["rate"]) == (wide, rate)],
        )
        for rate in rates
    )
    by_start = tuple(
        line(
            both("W_q, W_k × {gain:g}", "W_q、W_k × {gain:g}", gain=gain),
            [x for x in here if (x["width"], x["rate"], x["gain"]) == (wide, low, gain)],
        )
        for gain in gains
    )
    about = both("{task}, {n} tokens", "{task}，{n} 个词元", task=TASKS[task], n=length)
    titles = (
        both("By width, {about}, rate {r:g}", "按宽度，{about}，学习率 {r:g}", about=about, r=low),
        both("By rate, {about}, width {d}", "按学习率，{about}，宽度 {d}", about=about, d=wide),
        both(
            "By start, {about}, width {d}, rate {r:g}",
            "按初值，{about}，宽度 {d}，学习率 {r:g}",
            about=about,
            d=wide,
            r=low,
        ),
    )
    charts = tuple(
        Chart(title, exponent, loss, tuple(x for x in lines if x.x))
        for title, lines in zip(titles, (by_width, by_rate, by_start), strict=True)
    )
    return (*charts, shares(figures), tuned_table(figures))


def shares(figures: Figures) -> Listing:
    """In which share of the settings each way is right, by one choice at a time."""
    names = {
        "task": both("task", "任务"),
        "length": both("tokens", "词元数"),
        "width": both("width", "宽度"),
        "rate": both("rate", "学习率"),
        "gain": both("factor on W_q, W_k", "W_q、W_k 的倍数"),
    }
    every = losses(figures, *names)
    ways = [way for way in WAYS if way != "swapped"]
    rows = []
    for at, label in enumerate(names.values()):
        for value in sorted({place[at] for place in every}):
            cells = [of for place, of in every.items() if place[at] == value]
            found = [share_right(cells, way) for way in ways]
            each = tuple(f"{100 * right / of:.0f}" if of else None for right, of in found)
            rows.append((both("{label} {x}", "{label} {x}", label=label, x=value), *each))
    title = both(
        "Settings in which a scale is within {x} nats of the best, %",
        "与最好的相差不超过 {x} nat 的设置，%",
        x=MATTERS,
    )
    return Listing(title, (both("where", "在哪里"), *(WAYS[way] for way in ways)), tuple(rows))


def tuned_table(figures: Figures) -> Listing:
    """The loss of each way at the rate and start that suit it best."""
    found = tuned(figures)
    ways = [way for way in WAYS if any(way in each for each in found.values())]
    rows = tuple(
        (TASKS[place[0]], *place[1:], *(each.get(way) for way in ways))
        for place, each in found.items()
    )
    headings = (both("task", "任务"), both("tokens", "词元数"), both("width", "宽度"))
    title = both("Loss at the best rate and start, nats", "最合适的学习率与初值下的损失，nat")
    return Listing(title, (*headings, *(WAYS[way] for way in ways)), rows)


def show_width(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The spread of logits against the width, before and after; and every power."""
    rates = sorted({row["rate"] for row in figures["rows"]})
    rate = rates[-2] if len(rates) > 1 else rates[0]
    lines = []
    for way, at, label in (
        (HALF, 0, both("q·k/√d_k, start", "q·k/√d_k，训练前")),
        (HALF, -1, both("q·k/√d_k, end", "q·k/√d_k，训练后")),
        ("1.0", 0, both("q·k/d_k, start", "q·k/d_k，训练前")),
        ("1.0", -1, both("q·k/d_k, end", "q·k/d_k，训练后")),
        ("norm", -1, both("QK-norm, end", "QK 归一化，训练后")),
    ):
        by_width: dict[int, list[float]] = {}
        for row in figures["rows"]:
            if (row["way"], row["gain"], row["rate"]) == (way, 1.0, rate) and row["spread"][at]:
                by_width.setdefault(row["width"], []).append(row["spread"][at])
        lines.append(Series(label, list(by_width), [mean(x) for x in by_width.values()]))
    title = both(
        "Spread of the logits, rate {rate:g}", "logits 的离散程度，学习率 {rate:g}", rate=rate
    )
    rows = tuple(
        (WAYS[way], NO_FALL if not falling else FALL, TASKS[task], length, rate, power)
        for way in (HALF, "1.0")
        for falling in (False, True)
        for (task, length, rate), power in growth(figures, way, falling).items()
    )
    headings = (
        both("scale", "缩放"),
        both("learning rate", "学习率"),
        both("task", "任务"),
        both("tokens", "词元数"),
        both("rate at the least width", "最小宽度时的学习率"),
        both("power of the width", "宽度的次方"),
    )
    powers = both("Growth of the spread over the training", "训练后离散程度的增长")
    return (
        Chart(
            title,
            both("width", "宽度"),
            both("standard deviation in a row", "行内标准差"),
            tuple(lines),
            log_x=True,
            log_y=True,
        ),
        Listing(powers, headings, rows),
    )


NO_FALL = both("the same at every width", "各宽度相同")
FALL = both("falls as 1 / width", "按 1/宽度 减小")

MOVES = (
    Move("task", both("task", "任务"), "task", how="only"),
    Move("length", both("tokens", "词元数"), "length", how="only"),
    Move("width", both("width", "宽度"), "width"),
    Move("rate", both("learning rate", "学习率"), "rate", how="only"),
    Move("gain", both("factor on W_q, W_k", "W_q、W_k 的倍数"), "gain", how="only"),
)

CLAIMS = (
    Claim(
        id="scale-atlas",
        sentence=both(
            "Dividing by √d_k is right at every width, rate and initialisation.",
            "无论宽度、学习率与初始化如何，除以 √d_k 都是对的。",
        ),
        notes="F",
        experiment=atlas,
        rule=judge_atlas,
        shows=show_atlas,
        moves=MOVES,
        gpu=True,
    ),
    Claim(
        id="scale-width",
        sentence=both(
            "Dividing by √d_k keeps the logits of wide heads as large as those of narrow ones, "
            "before training and after.",
            "除以 √d_k 使宽头的 logits 与窄头一样大，训练前后都是如此。",
        ),
        notes="F",
        experiment=atlas,
        rule=judge_width,
        shows=show_width,
        moves=tuple(
            replace(each, needs=2) for each in MOVES if each.name in ("task", "length", "width")
        ),
        gpu=True,
    ),
)
