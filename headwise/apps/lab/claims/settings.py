"""Claims over many settings, drawn before the runs: scale-, heads-, qk- and dot-settings.

A verdict from one design may hang on its width or its rate. Here defensible choices are drawn at
random, both sides of a sentence are trained in every setting, and the verdict is the share of
settings in which it holds, with the choice on which it depends most.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import Dot
from headwise.apps.lab.charts import Bars, Chart, Listing, Series
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
from headwise.apps.lab.estimates import LEVEL, Share, proportion, unlike
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import Move
from headwise.apps.lab.recall import Recall, RecallModel, Relation, accuracy, learn, recipe_of
from headwise.messages import Sentence
from headwise.nn import Additive, MultiHeadAttention, Shared

CHOICES: Mapping[str, Sequence[Any]] = {
    "task": ("recall", "relation"),
    "length": (8, 16),
    "width": (16, 32, 64),
    "rate": (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2),
    "warm": (0.02, 0.1, 0.3),
    "gain": (0.5, 1.0, 2.0),
    "optimiser": ("Adam", "long memory", "decay"),
    "seed": range(1000),
}
"""The choices that make a setting, drawn independently of each other."""
OPTIMISERS: Mapping[str, Mapping[str, Any]] = {
    "Adam": {},
    "long memory": {"betas": (0.9, 0.98)},
    "decay": {"weight_decay": 0.1},
}
NAMES = {
    "task": both("the task", "任务"),
    "length": both("the number of tokens", "词元数"),
    "width": both("the width", "宽度"),
    "rate": both("the learning rate", "学习率"),
    "warm": both("the share of steps that warm up", "预热的步数比例"),
    "gain": both("the factor on the initial weights", "初始权重的倍数"),
    "optimiser": both("the optimiser", "优化器"),
}
SIDES: Mapping[str, Mapping[str, Any]] = {
    "base": {},
    "unscaled": {"score": Dot(1.0)},
    "heads": {"heads": 4},
    "shared": {"projections": Shared()},
    "additive": {"score": Additive()},
}
"""The models trained in every setting: one scaled head with separate matrices, and variants."""
CONTRASTS = {
    "scale": ("base", "unscaled"),
    "heads": ("heads", "base"),
    "qk": ("base", "shared"),
    "dot": ("base", "additive"),
}
"""The side that ought to learn better, and the other."""
MATTERS = 0.1
"""Nats by which the mean loss of a training has to be lower before one side is called better."""
LOST = 10.0
"""The mean loss that counts for a training that diverged: more than that of guessing."""
DRAW = 20261119


def drawn(count: int) -> list[dict[str, Any]]:
    """The settings, the same for everybody; more of them begin with the same ones."""
    dice = random.Random(DRAW)
    return [{name: dice.choice(every) for name, every in CHOICES.items()} for _ in range(count)]


def in_settings(lab: Lab) -> list[Piece]:
    """The trainings of `settings`."""
    count = lab.pick("settings", tiny=3, quick=30, full=100)
    return [(f"setting-{number}", setting, each) for number, each in enumerate(drawn(count))]


def setting(lab: Lab, folder: Path | None, **chosen: Any) -> dict[str, Any]:
    """Train every side in one setting: its mean loss over the training, and right answers after."""
    task = (Recall if chosen["task"] == "recall" else Relation)(chosen["length"])
    steps = lab.pick("steps", tiny=2, quick=150, full=400)
    row = dict(chosen)
    for side, changes in SIDES.items():
        torch.manual_seed(chosen["seed"])
        layer = MultiHeadAttention(chosen["width"], **{"heads": 1, **changes})
        with torch.no_grad():
            for module in layer.modules():
                if isinstance(module, nn.Linear):
                    module.weight.mul_(chosen["gain"])
        model = RecallModel(layer, chosen["width"], task)
        optimiser = OPTIMISERS[chosen["optimiser"]]
        recipe = recipe_of(steps, chosen["rate"], chosen["warm"], **optimiser)
        losses, _ = learn(model, task, recipe, seed=chosen["seed"], batch=64)
        mean = sum(losses) / steps
        row[f"{side}_loss"] = mean if math.isfinite(mean) else None
        row[f"{side}_right"] = accuracy(model, task, count=500)
    return {"steps": steps, "row": row}


def settings(lab: Lab) -> Figures:
    """Readers of every side in all settings that were drawn."""
    found = lab.keep_all(in_settings(lab))
    return {"steps": found[0]["steps"], "rows": [each["row"] for each in found]}


def ahead(row: Mapping[str, Any], contrast: str) -> float:
    """By how many nats the mean loss of the better side is lower; what diverged has lost."""
    one, other = (row[f"{side}_loss"] for side in CONTRASTS[contrast])
    return (LOST if other is None else other) - (LOST if one is None else one)


def parts(name: str, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Sentence, list[bool]]]:
    """The ways to part settings in two by a choice: the words for a part, and who belongs to it."""
    values = [row[name] for row in rows]
    label = NAMES[name]
    if isinstance(values[0], str):
        words = both("{label} is “{value}”", "{label}是“{value}”", label=label, value="{value}")
        cuts = [(words, each, [x == each for x in values]) for each in dict.fromkeys(values)]
    else:
        least = both(
            "{label} is {value} or less", "{label}不超过 {value}", label=label, value="{value}"
        )
        most = both("{label} is above {value}", "{label}大于 {value}", label=label, value="{value}")
        cuts = [
            (words, each, [(x <= each) is low for x in values])
            for each in sorted(set(values))[:-1]
            for words, low in ((least, True), (most, False))
        ]
    return [(both(str(words), words.zh, value=str(each)), inside) for words, each, inside in cuts]


def depends(
    rows: Sequence[Mapping[str, Any]], contrast: str
) -> tuple[Sentence, Share, Share] | None:
    """The part of the settings in which the sentence holds more often than elsewhere, if any.

    Every other setting chooses it: of all ways to part them in two, the one that chance explains
    least. The rest test it, by Fisher's exact test; theirs are the shares inside and outside.
    """
    ways = [part for name in NAMES for part in parts(name, rows)]
    choosing = [
        (unlike(sum(here), len(here), sum(there), len(there)), number)
        for number, (_, inside) in enumerate(ways)
        for here, there in [parted(rows[::2], inside[::2], contrast)]
        if here and there and sum(here) * len(there) > sum(there) * len(here)
    ]
    if not choosing:
        return None
    words, inside = ways[min(choosing)[1]]
    here, there = parted(rows[1::2], inside[1::2], contrast)
    if not (here and there and sum(here) * len(there) > sum(there) * len(here)):
        return None
    if unlike(sum(here), len(here), sum(there), len(there)) >= LEVEL:
        return None
    return words, proportion(sum(here), len(here)), proportion(sum(there), len(there))


def parted(
    rows: Sequence[Mapping[str, Any]], inside: Sequence[bool], contrast: str
) -> tuple[list[bool], list[bool]]:
    """In which settings the sentence holds, inside a part and outside of it."""
    held = [(ahead(row, contrast) > MATTERS, of) for row, of in zip(rows, inside, strict=True)]
    return [yes for yes, of in held if of], [yes for yes, of in held if not of]


def judge(contrast: str, figures: Figures) -> Verdict:
    """The share of settings in which the sentence holds, and the choice on which it depends."""
    rows = figures["rows"]
    gaps = [ahead(row, contrast) for row in rows]
    found = proportion(sum(gap > MATTERS for gap in gaps), len(gaps))
    place = depends(rows, contrast)
    because = both(
        "holds in {found}, drawn before the runs; in {against} it is the other way round, in the "
        "others the mean losses over {steps} steps differ by {least} nats or less",
        "在{found}中成立（设置在训练之前抽定）；{against} 个中相反，其余的 {steps} "
        "步平均损失相差不超过 {least} nat",
        found=found.said,
        against=sum(gap < -MATTERS for gap in gaps),
        steps=figures["steps"],
        least=MATTERS,
    )
    if place is not None:
        because = both(
            "{because}; where {words}, which one half of the settings chose, it holds in {inside} "
            "of {inner} of the other half, and elsewhere in {outside} of {outer}",
            "{because}；由一半设置选出的条件是{words}：在另一半中，满足的 {inner} 个里有 {inside} "
            "个成立，其余 {outer} 个里有 {outside} 个",
            because=because,
            words=place[0],
            inside=place[1].holds,
            inner=place[1].of,
            outside=place[2].holds,
            outer=place[2].of,
        )
    most = both(
        "most settings are meant; no single choice tells which",
        "指的是多数设置；单看哪个选择都说不准",
    )
    if found.low > 0.9:
        verdict = holds(because)
    elif place is not None and place[1].low > 0.5:
        verdict = holds_when(place[0], because)
    elif found.low > 0.5:
        verdict = holds_when(most, because)
    elif found.high < 0.5:
        verdict = does_not_hold(because)
    else:
        power = found.power(0.75)
        so_many = both(
            "{because}; so many settings show that a true share of 75 % is above half with a "
            "probability of {power:.0%}",
            "{because}；若真实比例是 75%，这样多的设置能看出它过半的概率是 {power:.0%}",
            because=because,
            power=power,
        )
        verdict = replace(undecided(so_many), power=power)
    return replace(verdict, interval=found.interval)


def show(contrast: str, figures: Figures) -> tuple[Chart | Bars | Listing, ...]:
    """The share of settings by each choice, every setting in order, and all figures."""
    rows = figures["rows"]
    names, shares = [], list[Share]()
    for name, label in NAMES.items():
        for each in sorted({row[name] for row in rows}):
            held = [ahead(row, contrast) > MATTERS for row in rows if row[name] == each]
            names.append(both("{label}: {each}", "{label}：{each}", label=label, each=each))
            shares.append(proportion(sum(held), len(held)))
    line = Series(
        both("share, 95 % interval", "比例，95% 区间"),
        list(range(len(names))),
        [each.holds / each.of for each in shares],
        [each.low for each in shares],
        [each.high for each in shares],
    )
    ordered = sorted(ahead(row, contrast) for row in rows)
    every = Series(both("difference", "差值"), list(range(1, len(rows) + 1)), ordered)
    one, other = CONTRASTS[contrast]
    columns = (*CHOICES, f"{one}_loss", f"{other}_loss", f"{one}_right", f"{other}_right")
    return (
        Bars(
            both("Where it holds", "在哪里成立"),
            both("share of settings", "设置的比例"),
            tuple(names),
            (line,),
        ),
        Chart(
            both("All settings, in order", "全部设置，按大小排列"),
            both("setting", "设置"),
            both("nats by which the mean loss is lower", "平均损失低多少 nat"),
            (every,),
        ),
        Listing(
            both("Every setting", "每个设置"),
            tuple(both(x, x) for x in columns),
            tuple(tuple(row[x] for x in columns) for row in rows),
        ),
    )


SENTENCES = {
    "scale": both(
        "Whatever the other choices, attention learns better with scaled scores than without.",
        "无论其他选择如何，缩放的注意力都比不缩放的学得好。",
    ),
    "heads": both(
        "Whatever the other choices, four heads learn better than one of the same width in all.",
        "无论其他选择如何，总宽度相同时，四个头都比一个头学得好。",
    ),
    "qk": both(
        "Whatever the other choices, separate matrices for Q and K learn better than a shared one.",
        "无论其他选择如何，Q 与 K 用各自的矩阵都比共用一个学得好。",
    ),
    "dot": both(
        "Whatever the other choices, scaled dot product learns better than additive attention.",
        "无论其他选择如何，缩放点积都比加性注意力学得好。",
    ),
}

CLAIMS = tuple(
    Claim(
        id=f"{contrast}-settings",
        sentence=sentence,
        notes="F",
        experiment=settings,
        rule=partial(judge, contrast),
        shows=partial(show, contrast),
        moves=(
            Move("task", both("task", "任务"), "task", how="only"),
            Move("width", both("width", "宽度"), "width"),
            Move("rate", both("learning rate", "学习率"), "rate"),
            Move("gain", both("factor on the start", "初值的倍数"), "gain", how="only"),
        ),
    )
    for contrast, sentence in SENTENCES.items()
)
