"""Where attention wins: how many pairs are recalled, how far, with how much state, at what cost:
rivals-phase, rivals-capacity."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise import mask as masks
from headwise.apps.lab.charts import Chart, Listing, Series, WeightMap
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
from headwise.apps.lab.counting import parameters
from headwise.apps.lab.estimates import Line, fitted
from headwise.apps.lab.grids import (
    Examples,
    GridModel,
    recall_examples,
    right_answers,
    start_training,
)
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import Move
from headwise.apps.lab.translation_rivals import GatedRecurrence, Recurrence, SlidingWindow
from headwise.messages import Sentence
from headwise.nn import MultiHeadAttention, Rotary

ASKED = 16
"""Questions at the end of each sequence."""
DEPTH = 5
"""Layers of the convolution: with taps three times as far apart in each they see 243 tokens."""
HEADS = 1
NAMES = {
    "attention": both("attention, rotary positions", "注意力，旋转位置"),
    "LSTM": both("LSTM, gates initialised for the length", "LSTM，门按长度初始化"),
    "linear": both("gated linear recurrence", "门控线性循环"),
    "convolution": both("dilated convolution, five layers", "空洞卷积，五层"),
}
RECURRENT = ("LSTM", "linear")
"""The rivals whose state does not grow with the length."""
LEAD = 0.1
"""The share of right answers by which one must be ahead to win."""


class LongMemory(nn.Module):
    """One LSTM layer whose gates start with half-lives up to `length` (Tallec and Ollivier, 2018).

    x (B, N, width) -> (B, N, width).
    """

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.width = width
        self.cell = Recurrence(width, width)
        self.cell.start()
        spans = torch.empty(width).uniform_(1, length - 1).log()
        with torch.no_grad():  # gates are in the order input, forget, cell, output
            self.cell.input.bias[:width] = -spans
            self.cell.input.bias[width : 2 * width] = spans
            self.cell.state.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], self.width)
        cell, states = hidden, []
        for given in self.cell.input(x).unbind(1):
            hidden, cell = self.cell.step(given, hidden, cell)
            states.append(hidden)
        return torch.stack(states, 1)


class Dilated(nn.Module):
    """Layers of gated convolution, each added to what it sees, with taps ever farther apart."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(DEPTH))
        self.layers = nn.ModuleList(SlidingWindow(width, True, 3**at) for at in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return x


def mixer(kind: str, width: int, length: int) -> nn.Module:
    """What mixes the tokens of sequences of a length."""
    if kind == "attention":
        return MultiHeadAttention(width, 1, position=Rotary(), mask=masks.causal())
    if kind == "LSTM":
        return LongMemory(width, length)
    if kind == "linear":
        layer = GatedRecurrence(width, HEADS, causal=True)
        with torch.no_grad():  # half is forgotten after the length
            layer.forget.weight.mul_(0.1)
            layer.forget.bias.fill_(torch.logit(torch.tensor(0.5 ** (1 / length))))
        return layer
    return Dilated(width)


def state(kind: str, width: int, length: int) -> int:
    """The numbers that a rival keeps to answer: of each token so far, or of all of them."""
    if kind == "attention":
        return 2 * width * length
    if kind == "LSTM":
        return 2 * width
    if kind == "linear":
        return width * (width // 2) // HEADS
    reach: int = 3**DEPTH - 1
    return reach * width


def width_of(kind: str, budget: int, example: Examples) -> int:
    """The width, a multiple of four, that brings a rival nearest to so many parameters."""

    def size(width: int) -> int:
        with torch.device("meta"):
            return parameters(GridModel(example, width, [mixer(kind, width, 8)]))

    wider = bisect_left(range(4, 400, 4), budget, key=size)
    near = (max(4, 4 * wider), 4 * wider + 4)
    return min(near, key=lambda width: abs(size(width) - budget))


def phase_pieces(lab: Lab) -> list[Piece]:
    """The trainings of `phases`, one piece for each rival and size."""
    return [
        (f"phase-{kind}-{budget}", region, {"kind": kind, "budget": budget})
        for budget in lab.pick(
            "budgets", tiny=(2000, 6000), quick=(5000, 20_000), full=(10_000, 40_000, 160_000)
        )
        for kind in NAMES
    ]


def region(lab: Lab, folder: Path | None, kind: str, budget: int) -> dict[str, Any]:
    """Train a rival of one size at every rate and seed, on sequences of all numbers of pairs and
    distances; ask at each of them, at the rate that suits it best on other sequences."""
    steps = lab.pick("steps", tiny=3, quick=300, full=2000)
    batch = lab.pick("batch", tiny=8, quick=32, full=128)
    pairs = lab.pick("pairs", tiny=(1, 4), quick=(1, 2, 4, 8), full=(1, 2, 4, 8, 16, 32, 64))
    distances = lab.pick("distances", tiny=(0, 4), quick=(0, 6, 24), full=(0, 16, 64, 128))
    rates = lab.pick("rates", tiny=(5e-3,), quick=(4e-3, 1.6e-2), full=(2e-3, 6e-3, 2e-2))
    seeds = range(lab.pick("seeds", tiny=2, quick=3))
    tests = lab.pick("tests", tiny=8, quick=64, full=128)
    most, far = max(pairs), max(distances)
    length = most + far + ASKED

    def mixed(seed: int) -> Examples:
        random = torch.Generator(lab.device).manual_seed(seed)
        exponents = torch.rand(2, steps * batch, generator=random, device=lab.device)
        some = (most + 1) ** exponents[0]  # as many of one pair as of two or three
        apart = (far + 1) ** exponents[1] - 1
        some, apart = some.long().clamp(1, most), apart.long().clamp(0, far)
        return recall_examples(some, apart, ASKED, length, random)

    def at(count: int, distance: int, stream: int) -> Examples:
        random = torch.Generator(lab.device).manual_seed(stream)
        some, apart = torch.tensor([[count], [distance]], device=lab.device).expand(2, tests)
        return recall_examples(some, apart, ASKED, length, random)

    data = [mixed(seed) for seed in seeds]
    width = width_of(kind, budget, data[0])
    runs = [(rate, seed) for rate in rates for seed in seeds]
    models = []
    for _, seed in runs:
        torch.manual_seed(seed)
        models.append(GridModel(data[0], width, [mixer(kind, width, length)]))
    of = [seed for _, seed in runs]
    training = start_training(lab, models, [rate for rate, _ in runs], steps, data, of, batch)
    for step in range(steps):
        training.update()
        if step % 100 == 0:
            lab.report(f"{kind}, {budget} parameters, step", step, steps)
    asked = [(count, distance) for count in pairs for distance in distances]
    chosen, right = (
        [right_answers(training, [at(*place, stream)], [0] * len(runs)) for place in asked]
        for stream in (10_001, 10_002)
    )
    by_rate = {
        rate: mean(each[at] for each in chosen for at, (mine, _) in enumerate(runs) if mine == rate)
        for rate in rates
    }
    best = max(by_rate, key=by_rate.__getitem__)
    rows = [
        {
            **{"kind": kind, "budget": budget, "pairs": count, "distance": distance},
            **{"seed": seed, "right": each[at]},
        }
        for (count, distance), each in zip(asked, right, strict=True)
        for at, (rate, seed) in enumerate(runs)
        if rate == best
    ]
    cost = hw.cost(models[0], inputs=(data[0].tokens[:1].cpu().long(),))
    about = {
        **{"kind": kind, "budget": budget, "width": width, "parameters": parameters(models[0])},
        **{"state": state(kind, width, length), "flops": cost.flops / length},
        **{"rate": best, "rates": list(by_rate.items())},
    }
    return {"steps": steps, "length": length, "rows": rows, "size": about}


def phases(lab: Lab) -> Figures:
    """Every rival of every size on every number of pairs and distance."""
    found = lab.keep_all(phase_pieces(lab))
    return {
        **{name: found[0][name] for name in ("steps", "length")},
        "sizes": [each["size"] for each in found],
        "rows": [row for each in found for row in each["rows"]],
    }


Cells = dict[tuple[str, int, int, int], list[float]]


def shares(figures: Figures) -> Cells:
    """The shares of right answers of the seeds by rival, size, pairs and distance."""
    found: Cells = {}
    for row in figures["rows"]:
        place = (row["kind"], row["budget"], row["pairs"], row["distance"])
        found.setdefault(place, []).append(row["right"])
    return found


def mean(values: Iterable[float]) -> float:
    """The mean of some values."""
    each = list(values)
    return sum(each) / len(each)


def leads(cells: Cells) -> dict[tuple[int, int, int], float]:
    """By how much attention is ahead of its best rival, by size, pairs and distance."""
    found = {}
    for (kind, budget, pairs, far), right in cells.items():
        if kind == "attention":
            rivals = [mean(cells[name, budget, pairs, far]) for name in NAMES if name != kind]
            found[budget, pairs, far] = mean(right) - max(rivals)
    return found


def judge_phase(figures: Figures) -> Verdict:
    """Attention must never lose, and win where there is most to remember; the fewest pairs from
    which on it wins everywhere are the condition, or else the places where it does."""
    cells = shares(figures)
    ahead = leads(cells)
    every = sorted({pairs for _, pairs, _ in ahead})
    won = [
        pairs for pairs in every if all(x > LEAD for (_, p, _), x in ahead.items() if p >= pairs)
    ]
    most, farthest = every[-1], max(distance for *_, distance in ahead)
    largest = max(budget for budget, *_ in ahead)
    there = {name: mean(cells[name, largest, most, farthest]) for name in NAMES}
    wins = sum(x > LEAD for x in ahead.values())
    losses = sum(x < -LEAD for x in ahead.values())
    because = both(
        "of {of} places (size, pairs, distance) attention is ahead of its best rival by more than "
        "{lead:.0%} of the answers in {wins} and behind in {losses}; with {pairs} pairs, "
        "{distance} tokens and about {size:,} parameters attention is right in {attention:.0%}, "
        "the linear recurrence in {linear:.0%}, the LSTM in {lstm:.0%}, the convolution in "
        "{convolution:.0%}, after {steps} steps, each at its best rate",
        "在 {of} 处（规模、对数、距离）中，注意力答对的比例比最好的对手高出 {lead:.0%} 以上的有 "
        "{wins} 处，低的有 {losses} 处；{pairs} 对、相距 {distance} 个词元、约 {size:,} "
        "个参数时，训练 {steps} 步后各用最合适的学习率：注意力答对 {attention:.0%}，线性循环 "
        "{linear:.0%}，LSTM {lstm:.0%}，卷积 {convolution:.0%}",
        of=len(ahead),
        lead=LEAD,
        wins=wins,
        losses=losses,
        pairs=most,
        distance=farthest,
        size=largest,
        attention=there["attention"],
        linear=there["linear"],
        lstm=there["LSTM"],
        convolution=there["convolution"],
        steps=figures["steps"],
    )
    if losses:
        return does_not_hold(because)
    if wins == len(ahead):
        return holds(because)
    if won:
        few = both(
            "there are {pairs} pairs or more; with fewer, the best rival keeps up, at any distance "
            "or at some",
            "至少有 {pairs} 对；更少时，最好的对手在所有或部分距离上不落后",
            pairs=won[0],
        )
        return holds_when(few, because)
    if wins:
        some = both(
            "it is one of {wins} of {of} places; at the others the best rival keeps up",
            "是 {of} 处中的 {wins} 处之一；在其余各处，最好的对手不落后",
            wins=wins,
            of=len(ahead),
        )
        return holds_when(some, because)
    return does_not_hold(because)


def capacity(right: dict[int, float], floor: float) -> float:
    """The pairs at which the share of right answers falls half-way to chance, between measured
    ones on a scale of logarithms; the least or most that was asked if it lies beyond."""
    asked = sorted(right)
    half = (1 + floor) / 2
    for few, many in pairwise(asked):
        if right[few] >= half > right[many]:
            share = (right[few] - half) / (right[few] - right[many])
            return float(few * (many / few) ** share)
    return float(asked[-1] if right[asked[-1]] >= half else asked[0])


CHANCE = 1 / 16


def capacities(figures: Figures) -> dict[tuple[str, int, int], list[float]]:
    """The capacity of each rival by size and distance, of every seed."""
    found: dict[tuple[str, int, int], list[float]] = {}
    cells = shares(figures)
    for kind, budget, distance in dict.fromkeys((k, b, d) for k, b, _, d in cells):
        of = {p: x for (k, b, p, d), x in cells.items() if (k, b, d) == (kind, budget, distance)}
        seeds = range(min(map(len, of.values())))
        found[kind, budget, distance] = [
            capacity({pairs: right[seed] for pairs, right in of.items()}, CHANCE) for seed in seeds
        ]
    return found


def lines(figures: Figures) -> dict[str, Line | None]:
    """The capacity of each recurrence as a power of its state, with an interval; None if it is the
    same in every training, as it is where none learns.

    A training counts once, by the mean over the distances: they are not independent.
    """
    found = {}
    for kind in RECURRENT:
        sizes, pairs = list[int](), list[float]()
        for each in figures["sizes"]:
            if each["kind"] == kind:
                far = [
                    map(math.log, of)
                    for (name, budget, _), of in capacities(figures).items()
                    if (name, budget) == (kind, each["budget"])
                ]
                trainings = [math.exp(mean(x)) for x in zip(*far, strict=True)]
                sizes += [each["state"]] * len(trainings)
                pairs += trainings
        if len(set(sizes)) < 2 or len(sizes) < 3:
            raise ValueError("a line needs two sizes of state and three trainings")
        found[kind] = fitted(sizes, pairs) if len(set(pairs)) > 1 else None
    return found


def power_of(line: Line | None) -> Sentence:
    """An exponent in a sentence."""
    if line is None:
        return both("of zero (the same in every training)", "零（每次训练都一样）")
    return line.said


GROWS = 0.5
"""The exponent that a law of capacity ought to have at least."""


def judge_capacity(figures: Figures) -> Verdict:
    """The state must set the capacity of both recurrences."""
    fits, found = lines(figures), capacities(figures)
    most = max(row["pairs"] for row in figures["rows"])
    full = [each for (kind, *_), of in found.items() if kind == "attention" for each in of]
    because = both(
        "pairs that are recalled half the time grow with the size of the state to the power "
        "{linear} in the gated linear recurrence and {lstm} in the LSTM; attention, whose state "
        "grows with the length, recalls all {most} pairs in {full} of {of} trainings; {steps} "
        "steps, each at its best rate",
        "能回忆一半的对数随状态大小增长的次方：门控线性循环 {linear}，LSTM {lstm}；"
        "状态随长度增长的注意力在 {of} 次训练中有 {full} 次能回忆全部 {most} 对；训练 {steps} "
        "步，各用最合适的学习率",
        linear=power_of(fits["linear"]),
        lstm=power_of(fits["LSTM"]),
        most=most,
        full=sum(each >= most for each in full),
        of=len(full),
        steps=figures["steps"],
    )
    known = {kind: line for kind, line in fits.items() if line is not None}
    grows = [kind for kind, line in known.items() if line.low > 0]
    if len(grows) == len(RECURRENT):
        return holds(because)
    if grows:
        linear = both("gated and linear", "带门的线性循环")
        which = linear if grows == ["linear"] else both("an LSTM", "LSTM")
        condition = both(
            "the recurrence is {which}; of the other, training and not the state sets the limit",
            "循环是{which}；另一种循环的极限来自训练，而不是状态",
            which=which,
        )
        return holds_when(condition, because)
    if len(known) == len(RECURRENT) and all(line.high < GROWS for line in known.values()):
        return does_not_hold(because)
    power = min((line.shows(GROWS) for line in known.values()), default=0.0)
    because = both(
        "{because}; so many trainings show a true power of {grows} with a probability of "
        "{power:.0%}",
        "{because}；若真实次方是 {grows}，这样多的训练能看出来的概率是 {power:.0%}",
        because=because,
        grows=GROWS,
        power=power,
    )
    return replace(undecided(because), power=power)


def show_phase(figures: Figures) -> tuple[Chart | Listing | WeightMap, ...]:
    """A map of attention's lead by pairs and distance at each size, and every share."""
    cells = shares(figures)
    ahead = leads(cells)
    every, far = ({place[at] for place in ahead} for at in (1, 2))
    maps = tuple(
        WeightMap(
            both(
                "Attention's lead by pairs (rows) and distance, about {size:,} parameters",
                "注意力的领先幅度：行是对数，列是距离，约 {size:,} 个参数",
                size=budget,
            ),
            [f"{pairs}" for pairs in sorted(every)],
            [f"{distance}" for distance in sorted(far)],
            [[max(0.0, ahead[budget, p, d]) for d in sorted(far)] for p in sorted(every)],
        )
        for budget in sorted({budget for budget, *_ in ahead}, reverse=True)
    )
    headings = (
        both("parameters, about", "参数量，约"),
        both("pairs", "对数"),
        both("distance", "距离"),
        *NAMES.values(),
    )
    rows = tuple(
        (budget, pairs, distance, *(mean(cells[kind, budget, pairs, distance]) for kind in NAMES))
        for budget, pairs, distance in ahead
    )
    title = both("Share of right answers", "答对的比例")
    return (*maps, Listing(title, headings, rows), cheapest(figures), costs(figures))


ENOUGH = 0.9
"""The share of right answers from which on a rival is as good as another."""


def cheapest(figures: Figures) -> Listing:
    """The least FLOPs per token with which each rival is right often enough, in every place."""
    flops = {(each["kind"], each["budget"]): each["flops"] for each in figures["sizes"]}
    places: dict[tuple[int, int], dict[str, float]] = {}
    for (kind, budget, pairs, distance), right in shares(figures).items():
        least = places.setdefault((pairs, distance), {})
        if mean(right) >= ENOUGH:
            least[kind] = min(flops[kind, budget], least.get(kind, flops[kind, budget]))
    rows = tuple(
        (
            *place,
            *(least.get(kind) for kind in NAMES),
            NAMES[min(least, key=least.__getitem__)] if least else None,
        )
        for place, least in places.items()
    )
    title = both(
        "Least FLOPs per token for {enough:.0%} right answers",
        "答对 {enough:.0%} 所需的每词元最少 FLOPs",
        enough=ENOUGH,
    )
    headings = (both("pairs", "对数"), both("distance", "距离"), *NAMES.values())
    return Listing(title, (*headings, both("cheapest", "最便宜的")), rows)


def costs(figures: Figures) -> Listing:
    """The size, state and cost of each rival."""
    headings = (
        both("rival", "对手"),
        both("width", "宽度"),
        both("parameters", "参数量"),
        both("state, numbers", "状态，数的个数"),
        both("FLOPs per token, forward", "每词元前向 FLOPs"),
        both("rate", "学习率"),
    )
    names = ("width", "parameters", "state", "flops", "rate")
    rows = tuple((NAMES[x["kind"]], *(x[name] for name in names)) for x in figures["sizes"])
    title = both("At {n} tokens", "{n} 个词元时", n=figures["length"])
    return Listing(title, headings, rows)


def show_capacity(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The capacity against the state, and by distance."""
    states = {(each["kind"], each["budget"]): each["state"] for each in figures["sizes"]}
    by_kind: dict[str, dict[int, list[float]]] = {}
    found = capacities(figures)
    for (kind, budget, _), of in found.items():
        by_kind.setdefault(kind, {}).setdefault(states[kind, budget], []).extend(of)
    curves = tuple(
        Series(
            NAMES[kind], list(of), [mean(x) for x in of.values()],
            [min(x) for x in of.values()], [max(x) for x in of.values()],
        )
        for kind, of in by_kind.items()
    )  # fmt: skip
    headings = (
        both("rival", "对手"),
        both("state, numbers", "状态，数的个数"),
        both("distance", "距离"),
        both("pairs recalled half the time", "能回忆一半的对数"),
        both("FLOPs per token", "每词元 FLOPs"),
    )
    flops = {(each["kind"], each["budget"]): each["flops"] for each in figures["sizes"]}
    rows = tuple(
        (NAMES[kind], states[kind, budget], distance, mean(of), flops[kind, budget])
        for (kind, budget, distance), of in found.items()
    )
    title = both("Pairs recalled half the time", "能回忆一半的对数")
    size, pairs = both("size of the state", "状态大小"), both("pairs", "对数")
    return (
        Chart(title, size, pairs, curves, log_x=True, log_y=True),
        Listing(title, headings, rows),
    )


MOVES = (
    Move("pairs", both("pairs", "对数"), "pairs"),
    Move("distance", both("distance", "距离"), "distance"),
    Move("budget", both("parameters", "参数量"), "budget", ("rows", "sizes"), needs=1),
)

CLAIMS = (
    Claim(
        id="rivals-phase",
        sentence=both(
            "With as many parameters, attention remembers better than a recurrence or a "
            "convolution.",
            "参数量相同时，注意力比循环与卷积记得更好。",
        ),
        notes="F",
        experiment=phases,
        rule=judge_phase,
        shows=show_phase,
        moves=MOVES,
        gpu=True,
    ),
    Claim(
        id="rivals-capacity",
        sentence=both(
            "A recurrence remembers as much as its state has room for.",
            "循环能记住多少，取决于状态有多大。",
        ),
        notes="F",
        experiment=phases,
        rule=judge_capacity,
        shows=show_capacity,
        moves=(MOVES[1],),
        gpu=True,
    ),
)
