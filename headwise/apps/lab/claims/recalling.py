"""Models trained to recall: qkv-content, qkv-length, rivals-long-range."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.apps.lab.ablations import gain
from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import (
    Claim,
    Figures,
    Verdict,
    both,
    does_not_hold,
    holds,
    holds_when,
    undecided,
)
from headwise.apps.lab.claims.translation_quality import MATTERS, runs
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.estimates import BLEU_POINTS, measured
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import SEEDS, Move
from headwise.apps.lab.recall import (
    Delay,
    Recall,
    RecallModel,
    Sequences,
    Task,
    accuracy,
    learn,
    recipe_of,
)
from headwise.models import GatedConvolution
from headwise.nn import ALiBi, FixedAttention, MultiHeadAttention, Rotary

PAIRS = 16
WIDTH = 32


def trained(layer: nn.Module, width: int, task: Task, steps: int, seed: int) -> RecallModel:
    """A reader around this layer, trained on a task."""
    torch.manual_seed(seed)
    model = RecallModel(layer, width, task)
    learn(model, task, recipe_of(steps, 5e-3), seed=seed)
    return model


def by_content(lab: Lab) -> list[Piece]:
    """The trainings of `fixed_and_qkv`."""
    return [(f"content-{kind}", asked, {"kind": kind}) for kind in ("qkv", "fixed")]


def asked(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """Train a layer on recall of 16 pairs and ask it at 16, 32 and 64, for every seed."""
    steps = lab.pick("steps", tiny=3, quick=400, full=800)
    rows = []
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=8)):
        torch.manual_seed(seed)
        layer: nn.Module = MultiHeadAttention(WIDTH, 1)
        if kind == "fixed":
            layer = FixedAttention(WIDTH, 1, length=PAIRS + 1)
        model = trained(layer, WIDTH, Recall(PAIRS), steps, seed)
        row: dict[str, object] = {"kind": kind, "seed": seed, "parameters": parameters(model)}
        for times in (1, 2, 4):
            row[f"x{times}"] = at_length(model, times * PAIRS)
        rows.append(row)
    return {"rows": rows}


def fixed_and_qkv(lab: Lab) -> Figures:
    """Train both layers on recall of 16 pairs, and translators with both."""
    found = lab.keep_all(by_content(lab))
    rows = [row for each in found for row in each["rows"]]
    chance = 1 / Recall(PAIRS).values
    translators = runs(lab, "base", "fixed")
    return {"pairs": PAIRS, "chance": chance, "rows": rows, "runs": translators}


def at_length(model: RecallModel, pairs: int) -> float | None:
    """The accuracy at this many pairs, None if the model can't take so many tokens."""
    try:
        return accuracy(model, Recall(pairs))
    except ValueError as error:
        if "positions" not in str(error):
            raise
        return None


def of(figures: Figures, kind: str, name: str) -> list[float | None]:
    """One figure of all runs of a kind."""
    return [row[name] for row in figures["rows"] if row["kind"] == kind]


def judge_content(figures: Figures) -> Verdict:
    """On recall QKV must succeed and fixed weights fail; on translation, they must be worse."""
    qkv, fixed = ([x or 0.0 for x in of(figures, kind, "x1")] for kind in ("qkv", "fixed"))
    more = gain(figures["runs"], "base", "fixed")
    because = both(
        "with {pairs} new keys in every sequence, the worst layer with Q, K and V recalls "
        "{qkv:.0%} of the values, the best one with fixed weights {fixed:.0%}; chance is "
        "{chance:.0%}; on translation, where attention to the source stays, Q, K and V gain "
        "{more} over fixed weights",
        "每个序列都换 {pairs} 个新的键：最差的 QKV 层答对 {qkv:.0%}，最好的固定权重层答对 "
        "{fixed:.0%}；乱猜是 {chance:.0%}；在翻译上（对原文的注意力保留），QKV 比固定权重高 {more}",
        qkv=min(qkv),
        fixed=max(fixed),
        pairs=figures["pairs"],
        chance=figures["chance"],
        more=more.said(BLEU_POINTS),
    )
    verdict = undecided(because)
    if max(fixed) > 0.9:
        verdict = does_not_hold(because)
    elif min(qkv) > 0.9 and max(fixed) < 0.5:
        condition = both(
            "what is needed stands at another place each time; where places alone tell much, as in "
            "translation with attention to the source, fixed weights lose a little and generalise",
            "所需内容每次出现在不同位置；若位置本身就能说明很多，如保留对原文注意力的翻译，"
            "固定权重只差一点，也能泛化",
        )
        verdict = holds_when(condition, because)
    return measured(verdict, more, BLEU_POINTS, MATTERS)


@dataclass(frozen=True)
class Echo:
    """Every token asks for the value `BACK` places before it; a batch has one of these lengths."""

    lengths: tuple[int, ...]
    values: int = 16
    keys: int = 1

    def draw(self, count: int, generator: torch.Generator) -> Sequences:
        """Draw sequences whose places alone say where to look."""
        chosen = int(torch.randint(len(self.lengths), (), generator=generator))
        length = self.lengths[chosen]
        values = torch.randint(self.values, (count, length), generator=generator)
        asking = torch.arange(BACK, length)
        return Sequences(
            torch.zeros_like(values),
            values,
            asking,
            values[:, :-BACK],
            torch.full((count, length - BACK), BACK),
        )


BACK = 2
TABLE = 64
"""The places that a table of fixed weights has."""
TRAINED = 16
SERVED = (8, 16, 32, 64)
ECHOES: dict[str, tuple[int, ...]] = {
    # how it is called: the lengths that it is trained at
    "fixed": (TRAINED,),
    "fixed, every length": SERVED,
    "qkv": (TRAINED,),
}


def by_place(lab: Lab) -> list[Piece]:
    """The trainings of `served_lengths`."""
    return [(f"echo-{kind.replace(', ', '-')}", echoed, {"kind": kind}) for kind in ECHOES]


def echoed(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """Train a layer on a task of places, at one length or at several; ask it at each length."""
    steps = lab.pick("steps", tiny=3, quick=400, full=800)
    rows = []
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=8)):
        torch.manual_seed(seed)
        layer: nn.Module = FixedAttention(WIDTH, 1, length=TABLE)
        if kind == "qkv":
            layer = MultiHeadAttention(WIDTH, 1, position=Rotary())
        task: Any = Echo(ECHOES[kind])
        model = RecallModel(layer, WIDTH, task)
        learn(model, task, recipe_of(steps, 1e-2), seed=seed)
        tasks: dict[int, Any] = {n: Echo((n,)) for n in SERVED}
        found = {f"at_{n}": accuracy(model, tasks[n]) for n in SERVED}
        rows.append({"kind": kind, "seed": seed, **found})
    return {"rows": rows}


def served_lengths(lab: Lab) -> Figures:
    """Train on a task that fixed weights can do; ask at lengths that were trained and others."""
    found = lab.keep_all(by_place(lab))
    return {
        "trained": TRAINED,
        "lengths": SERVED,
        "rows": [x for each in found for x in each["rows"]],
    }


def judge_length(figures: Figures) -> Verdict:
    """A table trained at one length must fail beyond it; what it does below, and one trained at
    every length, make the condition."""
    lengths, at = figures["lengths"], figures["trained"]

    def share(kind: str, n: int, worst: bool = True) -> float:
        found = [row[f"at_{n}"] for row in figures["rows"] if row["kind"] == kind]
        return float(min(found) if worst else max(found))

    longest, shortest = max(lengths), min(lengths)
    every = min(share("fixed, every length", n) for n in lengths)
    because = both(
        "a table of {longest} places, trained at {at} tokens to repeat what stood {back} places "
        "before, is right at {shortest} tokens in {below:.0%} of cases or more, at {at} in "
        "{same:.0%}, at {longest} in {beyond:.0%} or fewer; trained at every length, in "
        "{every:.0%} "
        "or more; rotary attention trained at {at} in {qkv:.0%} or more at {longest}",
        "{longest} 个位置的权重表，在 {at} 个词元上学习复述前 {back} 个位置的内容：{shortest} "
        "个词元时答对至少 "
        "{below:.0%}，{at} 个时 {same:.0%}，{longest} 个时至多 {beyond:.0%}；"
        "在各种长度上训练时至少 "
        "{every:.0%}；在 {at} 个词元上训练的旋转位置注意力，{longest} 个时至少 {qkv:.0%}",
        longest=longest,
        at=at,
        back=BACK,
        shortest=shortest,
        below=share("fixed", shortest),
        same=share("fixed", at),
        beyond=share("fixed", longest, worst=False),
        every=every,
        qkv=share("qkv", longest),
    )
    if share("fixed", at) < 0.9:
        return undecided(because)
    if share("fixed", longest, worst=False) > 0.9:
        return does_not_hold(because)
    if share("fixed", shortest) > 0.9 and every > 0.9:
        condition = both(
            "sequences are longer than those it was trained on; shorter ones are served, and a "
            "table that was trained at every length serves them all, up to its own size",
            "序列比训练时更长；更短的可以处理，"
            "在各种长度上训练过的权重表能处理不超过其大小的所有长度",
        )
        return holds_when(condition, because)
    return holds(because)


def show_lengths(figures: Figures) -> tuple[Listing, ...]:
    """The accuracy of every run at each length."""
    headings = (
        both("weights", "权重"),
        both("seed", "种子"),
        *(both("{n} tokens", "{n} 个词元", n=n) for n in figures["lengths"]),
    )
    rows = tuple(
        (row["kind"], row["seed"], *(row[f"at_{n}"] for n in figures["lengths"]))
        for row in figures["rows"]
    )
    return (Listing(both("Share of right answers", "答对的比例"), headings, rows),)


def show_fixed(figures: Figures) -> tuple[Listing, ...]:
    """The accuracy of every run at each length."""
    headings = (
        both("weights", "权重"),
        both("seed", "种子"),
        both("parameters", "参数量"),
        *(both("{n} pairs", "{n} 对", n=n * figures["pairs"]) for n in (1, 2, 4)),
    )
    rows = tuple(
        (row["kind"], row["seed"], row["parameters"], row["x1"], row["x2"], row["x4"])
        for row in figures["rows"]
    )
    title = both("Share of right answers", "答对的比例")
    return (Listing(title, headings, rows),)


def attention(width: int, distance: int) -> nn.Module:
    """One layer of attention that knows positions."""
    return MultiHeadAttention(width, 3, position=Rotary())


def decaying(width: int, distance: int) -> nn.Module:
    """One layer of attention whose positions make distant keys weaker."""
    return MultiHeadAttention(width, 4, position=ALiBi())


def recurrence(width: int, distance: int) -> nn.Module:
    """One LSTM as PyTorch initialises it: the forget gate is half open."""
    return nn.LSTM(width, width, batch_first=True)


def remembering(width: int, distance: int) -> nn.Module:
    """One LSTM whose forget gate starts with a bias of log(distance), as practitioners set it."""
    lstm = nn.LSTM(width, width, batch_first=True)
    with torch.no_grad():  # gates are in the order input, forget, cell, output
        lstm.get_parameter("bias_ih_l0")[width : 2 * width] = math.log(distance)
        lstm.get_parameter("bias_hh_l0")[width : 2 * width] = 0
    return lstm


def four_convolutions(width: int, distance: int) -> nn.Module:
    """Four layers of kernel 3, which see nine tokens."""
    return nn.Sequential(*(GatedConvolution(width, 3, 1) for _ in range(4)))


def five_dilated(width: int, distance: int) -> nn.Module:
    """Five layers of kernel 3, each with taps three times as far apart as the one before."""
    return nn.Sequential(*(GatedConvolution(width, 3, 3**layer) for layer in range(5)))


RIVALS: dict[str, tuple[int, Callable[[int, int], nn.Module]]] = {
    # name: its width, chosen so that all have about the same number of parameters; the layer
    "rotary": (36, attention),
    "ALiBi": (36, decaying),
    "LSTM": (28, recurrence),
    "LSTM remembering": (28, remembering),
    "4 convolutions": (16, four_convolutions),
    "5 dilated convolutions": (14, five_dilated),
}
NAMES = {
    "rotary": both("attention, rotary positions", "注意力，旋转位置"),
    "ALiBi": both("attention, ALiBi", "注意力，ALiBi"),
    "LSTM": both("LSTM", "LSTM"),
    "LSTM remembering": both("LSTM, forget bias log(distance)", "LSTM，遗忘门偏置 log(距离)"),
    "4 convolutions": both("4 layers of convolution", "4 层卷积"),
    "5 dilated convolutions": both("5 dilated layers", "5 层空洞卷积"),
}


def far(lab: Lab) -> tuple[int, ...]:
    """The distances to remember over."""
    return lab.pick("distances", tiny=(4, 12), quick=(4, 16, 64), full=(8, 32, 128))


def over_distances(lab: Lab) -> list[Piece]:
    """The trainings of `distances`."""
    return [
        (
            f"remember-{rival.replace(' ', '-')}-{distance}",
            remember,
            {"rival": rival, "distance": distance},
        )
        for rival in RIVALS
        for distance in far(lab)
    ]


def distances(lab: Lab) -> Figures:
    """Train each rival to remember one token over a distance, anew for every distance."""
    rows = lab.keep_all(over_distances(lab))
    trained = {name: rows[0][name] for name in ("steps", "seeds")}
    return {**trained, "chance": 1 / Delay(1).values, "rows": rows}


def remember(lab: Lab, folder: Path | None, rival: str, distance: int) -> dict[str, Any]:
    """Train one rival with several seeds at one distance; how much it remembers.

    `gradient` is the loss's gradient at the token that knows, over that at the one that asks,
    before training.
    """
    steps = lab.pick("steps", tiny=2, quick=250, full=600)
    seeds = lab.pick("seeds", tiny=1, quick=2, full=4)
    task, (width, build) = Delay(distance), RIVALS[rival]
    found, reaches = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        layer = build(width, distance)
        reaches.append(reach(RecallModel(layer, width, task), task))
        model = trained(layer, width, task, steps, seed)
        found.append(accuracy(model, task))
    return {
        "rival": rival,
        "distance": distance,
        "steps": steps,
        "seeds": seeds,
        "accuracy": sum(found) / seeds,
        "least": min(found),
        "gradient": sorted(reaches)[seeds // 2],
        "parameters": parameters(model),
    }


def reach(model: Any, task: Delay) -> float:
    """The norm of the loss's gradient at the first token's embedding over that at the last's."""
    drawn = task.draw(64, torch.Generator().manual_seed(0))
    x = (model.key(drawn.keys) + model.value(drawn.values)).detach().requires_grad_()
    mixed = model.layer(x)
    mixed = mixed[0] if isinstance(mixed, tuple) else mixed
    logits = model.answer(mixed[:, drawn.asking]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, drawn.answers.flatten())
    (gradient,) = torch.autograd.grad(loss, x)
    return float(gradient[:, 0].norm() / gradient[:, -1].norm().clamp_min(1e-30))


def judge_long_range(figures: Figures) -> Verdict:
    """Attention that knows positions must recall at every distance; what an LSTM needs to do so
    is the condition; the shallow convolution must not."""
    rows = figures["rows"]
    longest = max(row["distance"] for row in rows)

    def reach_of(name: str) -> int:
        """The largest distance up to which nine of ten answers are right, in every run."""
        mine = sorted((x for x in rows if x["rival"] == name), key=lambda x: x["distance"])
        good = 0
        for row in mine:
            if row["least"] < 0.9:
                break
            good = row["distance"]
        return int(good)

    reaches = {name: reach_of(name) for name in RIVALS}
    gradients = {x["rival"]: x["gradient"] for x in rows if x["distance"] == longest}
    because = both(
        "after {steps} steps, in every run of {seeds}: rotary attention recalls over {rotary} of "
        "{longest} tokens, attention with ALiBi over {alibi}, an LSTM as initialised by default "
        "over {lstm} and with a forget bias of log(distance) over {kept}, four layers of "
        "convolution over {plain} (they see 9 tokens), five dilated ones over {dilated}; before "
        "training the gradient at the first of {longest} tokens is {g_rotary:.0e} of that at the "
        "last in rotary attention, {g_lstm:.0e} in the LSTM, {g_kept:.0e} with the forget bias; "
        "{least:,} to {most:,} parameters",
        "训练 {steps} 步后，{seeds} 次训练全部达到：旋转位置的注意力能记住 {longest} 个词元中相距 "
        "{rotary} "
        "的内容，ALiBi {alibi}，默认初始化的 LSTM {lstm}，遗忘门偏置取 log(距离) 时 {kept}，"
        "四层卷积 "
        "{plain}（只能看到 9 个词元），五层空洞卷积 {dilated}；训练之前，{longest} "
        "个词元中第一个处的梯度与最后一个处之比：旋转位置的注意力 {g_rotary:.0e}，LSTM "
        "{g_lstm:.0e}，"
        "有遗忘门偏置时 {g_kept:.0e}；参数 {least:,} 到 {most:,} 个",
        steps=figures["steps"],
        seeds=figures["seeds"],
        longest=longest,
        rotary=reaches["rotary"],
        alibi=reaches["ALiBi"],
        lstm=reaches["LSTM"],
        kept=reaches["LSTM remembering"],
        plain=reaches["4 convolutions"],
        dilated=reaches["5 dilated convolutions"],
        g_rotary=gradients["rotary"],
        g_lstm=gradients["LSTM"],
        g_kept=gradients["LSTM remembering"],
        least=min(row["parameters"] for row in rows),
        most=max(row["parameters"] for row in rows),
    )
    if reaches["rotary"] < longest:
        return undecided(because)
    if reaches["4 convolutions"] == longest or reaches["LSTM"] == longest:
        return does_not_hold(because)
    if reaches["LSTM remembering"] < longest:
        return holds(because)
    condition = both(
        "the LSTM is initialised by default, with a forget gate that is half open: with a forget "
        "bias of log(distance) it remembers {longest} tokens as well",
        "LSTM 用默认初始化，遗忘门半开；若遗忘门偏置取 log(距离)，它同样能记住 {longest} 个词元",
        longest=longest,
    )
    return holds_when(condition, because)


def show_long_range(figures: Figures) -> tuple[Chart | Listing, ...]:
    """Accuracy against distance, and every figure."""
    curves = tuple(
        Series(
            label,
            [row["distance"] for row in figures["rows"] if row["rival"] == name],
            [row["accuracy"] for row in figures["rows"] if row["rival"] == name],
        )
        for name, label in NAMES.items()
    )
    title = both("Remembering one token", "记住一个词元")
    right = both("share of right answers", "答对的比例")
    headings = (
        both("rival", "对手"),
        both("distance", "距离"),
        both("right, mean", "答对，平均"),
        both("worst run", "最差一次"),
        both("gradient, first over last", "梯度，首尾之比"),
        both("parameters", "参数量"),
    )
    names = ("distance", "accuracy", "least", "gradient", "parameters")
    rows = tuple((NAMES[x["rival"]], *(x[name] for name in names)) for x in figures["rows"])
    return (
        Chart(title, both("distance", "距离"), right, curves, log_x=True),
        Listing(title, headings, rows),
    )


CLAIMS = (
    Claim(
        id="qkv-content",
        sentence=both(
            "Weights learnt directly are fixed, whatever the content: they do not generalise.",
            "直接学习的注意力权重是固定的，与内容无关，不能泛化。",
        ),
        notes="B",
        experiment=fixed_and_qkv,
        rule=judge_content,
        shows=show_fixed,
        moves=(SEEDS,),
        gpu=True,
    ),
    Claim(
        id="qkv-length",
        sentence=both(
            "Weights learnt directly do not serve sequences of another length.",
            "直接学习的注意力权重不支持变化长度的序列。",
        ),
        notes="B",
        experiment=served_lengths,
        rule=judge_length,
        shows=show_lengths,
        moves=(SEEDS,),
    ),
    Claim(
        id="rivals-long-range",
        sentence=both(
            "Attention has no decay over distance, RNNs suffer from vanishing or exploding "
            "gradients, and CNNs need depth.",
            "注意力没有距离衰减，RNN 受梯度消失或爆炸之苦，CNN 需要堆叠多层。",
        ),
        notes="B",
        experiment=distances,
        rule=judge_long_range,
        shows=show_long_range,
        moves=(Move("distance", both("distance", "距离"), "distance"),),
    ),
)
