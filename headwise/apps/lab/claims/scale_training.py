"""Training with and without scaling, at several rates and from two starts: scale-training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise import Dot
from headwise.apps.lab.ablations import scores
from headwise.apps.lab.charts import Chart, Listing
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
from headwise.apps.lab.claims.translation_quality import NATS, runs, show_curves
from headwise.apps.lab.estimates import POINTS, Difference, difference, measured
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import Move
from headwise.apps.lab.recall import Recall, RecallModel, accuracy, learn, recipe_of
from headwise.nn import MultiHeadAttention

STARTS = {
    "scaled": both("scaled", "缩放"),
    "unscaled": both("not scaled", "不缩放"),
    "narrow": both(
        "not scaled, W_q and b_q divided by √d_k at the start", "不缩放，W_q、b_q 初值除以 √d_k"
    ),
}
SAME = 5.0
"""Percentage points of right answers within which two ways to train are called the same."""


def reader(start: str, width: int, seed: int) -> RecallModel:
    """A reader with one head of this width; a narrow start has the logits of a scaled one."""
    torch.manual_seed(seed)
    score = Dot() if start == "scaled" else Dot(1.0)
    layer = MultiHeadAttention(width, 1, score=score)
    if start == "narrow":
        assert isinstance(layer.query, nn.Linear)
        with torch.no_grad():
            for parameter in layer.query.parameters():
                parameter.div_(math.sqrt(width))
    return RecallModel(layer, width, Recall(8))


def cells(lab: Lab) -> list[Piece]:
    """The trainings of `scaling`: every start at every width, rate and length of the warm-up."""
    return [
        (f"scale-{start}-{d}-{rate}-{warm}", cell, settings)
        for d in lab.pick("d_k", tiny=(16,), quick=(256,), full=(16, 64, 256))
        for start in STARTS
        for rate in lab.pick("rates", tiny=(3e-3,), quick=(1e-3, 3e-3, 1e-2))
        for warm in lab.pick("warm_up", tiny=(0.1,), quick=(0.02, 0.3))
        for settings in ({"start": start, "d": d, "rate": rate, "warm": warm},)
    ]


def cell(
    lab: Lab, folder: Path | None, start: str, d: int, rate: float, warm: float
) -> dict[str, Any]:
    """Train at one rate; what is known at the end, when half was learnt, the largest gradient."""
    steps, task = lab.pick("steps", tiny=4, quick=150, full=300), Recall(8)
    rows = []
    for seed in range(lab.pick("seeds", tiny=1, quick=2, full=6)):
        model = reader(start, d, seed)
        losses, norms = learn(model, task, recipe_of(steps, rate, warm), seed=seed, batch=64)
        late = norms[steps // 4 :]
        rows.append(
            {
                "start": start,
                "d": d,
                "rate": rate,
                "warm": warm,
                "seed": seed,
                "chosen": accuracy(model, task, seed=20_000),  # by which the rate is chosen
                "accuracy": accuracy(model, task),
                "half": half_way(losses, math.log(task.values)),
                "spike": max(late) / sorted(late)[len(late) // 2],
                "finite": all(map(math.isfinite, losses)),
            }
        )
    return {"steps": steps, "rows": rows}


def half_way(losses: Sequence[float], start: float) -> int:
    """The first step from which a window of ten losses averages less than half of the start's."""
    for step in range(len(losses) - 9):
        if sum(losses[step : step + 10]) / 10 < start / 2:
            return step
    return len(losses)


def scaling(lab: Lab) -> Figures:
    """Readers of all cells, and translators of both starts, each at its best rate."""
    found = lab.keep_all(cells(lab))
    return {
        "steps": found[0]["steps"],
        "rows": [row for each in found for row in each["rows"]],
        "runs": runs(lab, "base", "unscaled", "unscaled-narrow"),
    }


def best_cell(figures: Figures, d: int, start: str) -> list[dict[str, Any]]:
    """The runs at the rate and warm-up that suit a start best, chosen on other sequences."""
    by_cell: dict[tuple[float, float], list[dict[str, Any]]] = {}
    for row in figures["rows"]:
        if (row["d"], row["start"]) == (d, start):
            by_cell.setdefault((row["rate"], row["warm"]), []).append(row)
    return max(by_cell.values(), key=lambda rows: sum(row["chosen"] for row in rows))


def lost(figures: Figures, d: int, start: str, name: str) -> Difference:
    """A figure under scaling minus that of a start, each at its best rate."""
    factor = 100 if name == "accuracy" else 1
    groups = {
        each: [factor * row[name] for row in best_cell(figures, d, each)]
        for each in ("scaled", start)
    }
    return difference(groups, "scaled", start)


def judge_scaling(figures: Figures) -> Verdict:
    """Three assertions, each at the best rate: ends worse, is slower, is unstable.

    If the same logits without the division, from a narrow start, train as well, what mattered is
    the size of the logits and not the division.
    """
    d = max(row["d"] for row in figures["rows"])
    worse, narrow = (lost(figures, d, start, "accuracy") for start in ("unscaled", "narrow"))
    slower = lost(figures, d, "unscaled", "half").scaled(-1)
    spikes = {start: max(row["spike"] for row in best_cell(figures, d, start)) for start in STARTS}
    failed = sum(run["diverged"] for run in figures["runs"])
    failed += sum(not row["finite"] for row in figures["rows"])
    because = both(
        "at d_k = {d}, each at its best rate and warm-up: scaled is more often right than unscaled "
        "by {worse}, and than unscaled from a narrow start by {narrow}; unscaled is half-way down "
        "{slower} steps later; after the first quarter the largest gradient is {wild:.1f} times "
        "the median, with scaling {tame:.1f}; {failed} runs diverged; at the rate that suits "
        "each best, the test loss of an unscaled translator is higher by {nats}, from a narrow "
        "start by {kept}",
        "d_k = {d}，各用最合适的学习率与预热：缩放比不缩放多答对 {worse}，"
        "比从窄初值开始的不缩放多答对 "
        "{narrow}；不缩放降到一半晚 {slower} 步；前四分之一之后最大梯度是中位数的 {wild:.1f} 倍，"
        "缩放时 {tame:.1f} 倍；发散 {failed} 次；"
        "各用最合适的学习率时，不缩放的翻译模型测试损失高 {nats}，从窄初值开始时高 {kept}",
        d=d,
        worse=worse.said(POINTS),
        narrow=narrow.said(POINTS),
        slower=slower.said(),
        wild=spikes["unscaled"],
        tame=spikes["scaled"],
        failed=failed,
        nats=difference(scores(figures["runs"], "test_loss"), "unscaled", "base").said(NATS),
        kept=difference(scores(figures["runs"], "test_loss"), "unscaled-narrow", "base").said(NATS),
    )
    hurt = worse.low > 0 or slower.low > 0
    verdict = undecided(because)
    if hurt and narrow.within(-SAME, SAME):
        condition = both(
            "the initialisation stays that of scaled attention: with W_q divided by √d_k at the "
            "start, unscaled attention learns as well",
            "初始化沿用缩放时的：若 W_q 初值除以 √d_k，不缩放也学得一样好",
        )
        verdict = holds_when(condition, because)
    elif worse.low > 0 and slower.low > 0 and narrow.low > 0:
        verdict = holds(because)
    elif worse.within(-SAME, SAME) and slower.low <= 0:
        verdict = does_not_hold(because)
    return measured(verdict, worse, POINTS, SAME)


def show_scaling(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The share of right answers of every cell, and the translators."""
    means: dict[tuple[Any, ...], list[float]] = {}
    for row in figures["rows"]:
        key = (STARTS[row["start"]], row["d"], row["rate"], row["warm"])
        means.setdefault(key, []).append(row["accuracy"])
    headings = (
        both("start", "初始"),
        both("d_k", "d_k"),
        both("rate", "学习率"),
        both("warm-up", "预热"),
        both("right, mean of the seeds", "答对，各种子平均"),
    )
    title = both("Recall after {n} steps", "{n} 步后的联想回忆", n=figures["steps"])
    rows = tuple((*key, sum(values) / len(values)) for key, values in means.items())
    return (Listing(title, headings, rows), *show_curves(figures))


CLAIMS = (
    Claim(
        id="scale-training",
        sentence=both(
            "Without scaling, training is unstable, converges more slowly and ends worse.",
            "不缩放时训练不稳定、收敛慢、最终效果下降。",
        ),
        notes="CD",
        experiment=scaling,
        rule=judge_scaling,
        shows=show_scaling,
        moves=(
            Move("d_k", both("d_k"), "d"),
            Move("rate", both("learning rate", "学习率"), "rate", how="only"),
            Move("warm", both("warm-up", "预热"), "warm", how="only"),
            Move("seeds", both("seeds", "种子数"), "seed"),
        ),
        gpu=True,
    ),
)
