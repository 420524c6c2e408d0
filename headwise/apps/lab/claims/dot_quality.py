"""The quality of dot product and additive attention: dot-quality, dot-small, dot-overfit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headwise import Dot
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
from headwise.apps.lab.estimates import (
    BLEU_POINTS,
    LEVEL,
    POINTS,
    Difference,
    difference,
    holm,
    measured,
)
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import SEEDS, Move
from headwise.apps.lab.recall import (
    Recall,
    RecallModel,
    Relation,
    Task,
    accuracy,
    learn,
    recipe_of,
    right,
)
from headwise.nn import Additive, MultiHeadAttention

SCORES: Mapping[str, Dot | Additive] = {
    "scaled": Dot(),
    "unscaled": Dot(1.0),
    "additive": Additive(),
}
LABELS = {
    "scaled": both("q·k/√d_k", "q·k/√d_k"),
    "unscaled": both("q·k", "q·k"),
    "additive": both("additive", "加性"),
}
NATS = both(" nats", " nat")
SMALL = 8
"""The widest head that counts as small."""


def reader(score: str, width: int, task: Task, seed: int) -> RecallModel:
    """A reader with one head of this width and score."""
    torch.manual_seed(seed)
    return RecallModel(MultiHeadAttention(width, 1, score=SCORES[score]), width, task)


def at_widths(lab: Lab) -> list[Piece]:
    """The trainings of `widths`."""
    every = lab.pick("d_k", tiny=(8, 16), quick=(4, 8, 32, 128), full=(4, 8, 16, 32, 64, 128))
    return [
        (f"recall-{score}-{d}", recalled, {"score": score, "d": d})
        for d in every
        for score in SCORES
    ]


def recalled(lab: Lab, folder: Path | None, score: str, d: int) -> dict[str, Any]:
    """The accuracy on recall after a short training, with one score at one width."""
    task = Recall(8)
    steps = lab.pick("steps", tiny=2, quick=120, full=300)
    rows = []
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=12)):
        model = reader(score, d, task, seed)
        learn(model, task, recipe_of(steps, 5e-3), seed=seed, batch=64)
        rows.append({"d": d, "score": score, "seed": seed, "accuracy": accuracy(model, task)})
    return {"steps": steps, "rows": rows}


def recalling(lab: Lab) -> Figures:
    """Accuracy on recall after a short training, by score and width."""
    found = lab.keep_all(at_widths(lab))
    return {"steps": found[0]["steps"], "rows": [row for each in found for row in each["rows"]]}


def widths(lab: Lab) -> Figures:
    """Accuracy on recall by score and width, and the BLEU of two scores."""
    return {**recalling(lab), "runs": runs(lab, "base", "additive")}


def gap(figures: Figures, d: int, one: str, other: str) -> Difference:
    """The accuracy of one score minus that of the other at a width, in percent."""
    groups = {
        score: [100 * x["accuracy"] for x in figures["rows"] if (x["d"], x["score"]) == (d, score)]
        for score in SCORES
    }
    return difference(groups, one, other)


def judge_quality(figures: Figures) -> Verdict:
    """Better on translation, and at the widths of recall, beyond chance."""
    bleu = gain(figures["runs"], "base", "additive")
    gaps = {d: gap(figures, d, "scaled", "additive") for d in widths_of(figures)}
    ahead = [d for d, found in gaps.items() if found.low > 0]
    behind = [d for d, found in gaps.items() if found.high < 0]
    because = both(
        "on translation scaled dot product gains {bleu} over additive, each at the rate that suits "
        "it best; on recall it is ahead at {ahead} of {all} widths and behind at {behind}",
        "在翻译上，缩放点积比加性高 {bleu}，各用最合适的学习率；在联想回忆上，{all} "
        "种宽度中领先 {ahead} 种，落后 {behind} 种",
        bleu=bleu.said(BLEU_POINTS),
        ahead=len(ahead),
        behind=len(behind),
        all=len(gaps),
    )
    verdict = undecided(because)
    if bleu.low > 0 and ahead and not behind:
        verdict = holds(because)
    elif bleu.low > 0:
        condition = both(
            "translation at this size is meant; on recall neither is ahead",
            "指的是这一规模下的翻译；在联想回忆上互无领先",
        )
        elsewhere = both(
            "translation at this size is meant; on recall additive is ahead at d_k = {behind}",
            "指的是这一规模下的翻译；在联想回忆上，d_k = {behind} 时加性领先",
            behind=", ".join(map(str, behind)),
        )
        verdict = holds_when(elsewhere if behind else condition, because)
    elif (bleu.high < 0 or bleu.within(-MATTERS, MATTERS)) and not ahead:
        verdict = does_not_hold(because)
    return measured(verdict, bleu, BLEU_POINTS, MATTERS)


def judge_small(figures: Figures) -> Verdict:
    """Additive must win at some small width, beyond the chance of looking at several."""
    small = [d for d in widths_of(figures) if d <= SMALL]
    gaps = {d: gap(figures, d, "additive", "scaled") for d in small}
    chances = dict(zip(small, holm([gaps[d].probability() for d in small]), strict=True))
    best = max(gaps, key=lambda d: gaps[d].low)
    because = both(
        "at d_k = {d} additive is {gap} more accurate on recall than scaled dot product (p = "
        "{chance:.2f}, corrected for {count} widths)",
        "d_k = {d} 时，加性在联想回忆上的正确率比缩放点积高 {gap}（对 {count} 种宽度校正后 p = "
        "{chance:.2f}）",
        d=best,
        gap=gaps[best].said(POINTS),
        chance=chances[best],
        count=len(small),
    )
    verdict = undecided(because)
    if gaps[best].low > 0 and chances[best] < LEVEL:
        verdict = holds(because)
    elif all(x.high < 0 or x.within(-2, 2) for x in gaps.values()):
        verdict = does_not_hold(because)
    return measured(verdict, gaps[best], POINTS, 2.0)


def widths_of(figures: Figures) -> list[int]:
    """The widths that were measured."""
    return sorted({row["d"] for row in figures["rows"]})


def show_widths(figures: Figures) -> tuple[Chart | Listing, ...]:
    """Accuracy against width; BLEU."""
    every = widths_of(figures)

    def mean(score: str, d: int) -> float:
        values = [x["accuracy"] for x in figures["rows"] if (x["d"], x["score"]) == (d, score)]
        return float(sum(values) / len(values))

    curves = tuple(
        Series(label, every, [mean(score, d) for d in every]) for score, label in LABELS.items()
    )
    title = both("Recall after {n} steps", "{n} 步后的联想回忆", n=figures["steps"])
    answers = both("share of right answers", "答对的比例")
    chart = Chart(title, both("d_k", "d_k"), answers, curves, log_x=True)
    if "runs" not in figures:
        return (chart,)
    bleu = tuple(
        (run["variant"], run["seed"], None if run["diverged"] else run["bleu"])
        for run in figures["runs"]
    )
    headings = both("variant", "变体"), both("seed", "种子"), both("BLEU", "BLEU")
    return chart, Listing(both("Translation", "翻译"), headings, bleu)


def on_few(lab: Lab) -> list[Piece]:
    """The trainings of `overfitting` on few sequences."""
    sizes = lab.pick("examples", tiny=(64,), quick=(64, 256, 1024), full=(64, 256, 1024, 4096))
    return [
        (f"overfit-{score}-{examples}", overfitted, {"score": score, "examples": examples})
        for score in ("scaled", "additive")
        for examples in sizes
    ]


def on_relation(lab: Lab) -> list[Piece]:
    """The trainings of `overfitting` on a relation that is not symmetric."""
    return [(f"relation-{score}", related, {"score": score}) for score in ("scaled", "additive")]


def overfitted(lab: Lab, folder: Path | None, score: str, examples: int) -> dict[str, Any]:
    """Train on few fixed sequences, and ask on these and on new ones."""
    steps = lab.pick("steps", tiny=2, quick=200, full=400)
    rows, task = [], Recall(8)
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=12)):
        model = reader(score, 32, task, seed)
        learn(model, task, recipe_of(steps, 5e-3), examples=examples, seed=seed, batch=64)
        known = task.draw(examples, torch.Generator().manual_seed(seed))
        seen = float(right(model, known).double().mean())
        new = accuracy(model, task)
        rows.append({"score": score, "examples": examples, "seed": seed, "seen": seen, "new": new})
    return {"rows": rows}


def related(lab: Lab, folder: Path | None, score: str) -> dict[str, Any]:
    """Train on a relation that is not symmetric; the mean loss tells how fast it is learnt."""
    steps = lab.pick("steps", tiny=2, quick=200, full=400)
    rows, task = [], Relation()
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=12)):
        model = reader(score, 32, task, seed)
        losses, _ = learn(model, task, recipe_of(steps, 1e-2), seed=seed, batch=64)
        row = {"score": score, "seed": seed, "accuracy": accuracy(model, task)}
        rows.append(row | {"loss": sum(losses) / steps})  # which has no ceiling
    return {"rows": rows}


def overfitting(lab: Lab) -> Figures:
    """Train on few fixed sequences and ask on new ones; and a relation that is not symmetric."""
    few, relations = (lab.keep_all(pieces) for pieces in (on_few(lab), on_relation(lab)))
    return {
        "rows": [row for each in few for row in each["rows"]],
        "relations": [row for each in relations for row in each["rows"]],
    }


def judge_overfit(figures: Figures) -> Verdict:
    """Both halves: a larger gap on few examples, and more accuracy on the relation."""
    gaps: dict[str, list[float]] = {}
    for row in figures["rows"]:
        key = f"{row['score']}-{row['examples']}"
        gaps.setdefault(key, []).append(100 * (row["seen"] - row["new"]))
    sizes = sorted({row["examples"] for row in figures["rows"]})
    more = {n: difference(gaps, f"additive-{n}", f"scaled-{n}") for n in sizes}
    asymmetric = {
        score: [row["loss"] for row in figures["relations"] if row["score"] == score]
        for score in ("scaled", "additive")
    }
    suits = difference(asymmetric, "scaled", "additive")
    right = [row["accuracy"] for row in figures["relations"]]
    chances = dict(zip(sizes, holm([more[n].probability() for n in sizes]), strict=True))
    worst = max(more, key=lambda n: more[n].low)
    because = both(
        "trained on {n} sequences, additive has a gap between seen and new ones that is larger "
        "than dot product's by {more} (p = {chance:.2f}, corrected for {count} sizes); on an "
        "asymmetric relation the worst of all runs ends at {right:.0%}, and over the training "
        "additive's loss is lower by {suits}",
        "用 {n} 个序列训练时，加性在见过与没见过的序列之间的差距比点积大 {more}（对 {count} "
        "种大小校正后 "
        "p = {chance:.2f}）；在非对称关系上，所有训练中最差的答对 {right:.0%}，"
        "训练期间加性的平均损失低 "
        "{suits}",
        n=worst,
        more=more[worst].said(POINTS),
        chance=chances[worst],
        count=len(sizes),
        right=min(right),
        suits=suits.said(NATS),
    )
    overfits, suited = more[worst].low > 0 and chances[worst] < LEVEL, suits.low > 0
    verdict = undecided(because)
    if overfits and suited:
        verdict = holds(because)
    elif overfits or suited:
        which = (
            both("the overfitting alone is meant", "只就过拟合而言")
            if overfits
            else both("the asymmetric relation alone is meant", "只就非对称关系而言")
        )
        verdict = holds_when(which, because)
    elif all(x.within(-5, 5) for x in more.values()) and suits.high < 0:
        verdict = does_not_hold(because)
    return measured(verdict, more[worst], POINTS, 5.0)


def show_overfit(figures: Figures) -> tuple[Listing, ...]:
    """The accuracies of every run."""
    headings = (
        both("score", "打分"),
        both("sequences", "序列数"),
        both("seed", "种子"),
        both("seen ones", "见过的"),
        both("new ones", "没见过的"),
    )
    names = ("score", "examples", "seed", "seen", "new")
    rows = tuple(tuple(row[name] for name in names) for row in figures["rows"])
    relations = tuple(
        (x["score"], x["seed"], x["accuracy"], x["loss"]) for x in figures["relations"]
    )
    return (
        Listing(both("Few sequences", "少量序列"), headings, rows),
        Listing(
            both("An asymmetric relation", "非对称关系"),
            (
                both("score", "打分"),
                both("seed", "种子"),
                both("accuracy", "正确率"),
                both("mean loss", "平均损失"),
            ),
            relations,
        ),
    )


CLAIMS = (
    Claim(
        id="dot-quality",
        sentence=both(
            "Dot product attention gives better results than additive attention.",
            "点积注意力的效果优于加性注意力。",
        ),
        notes="C",
        experiment=widths,
        rule=judge_quality,
        shows=show_widths,
        moves=(
            Move("d_k", both("d_k"), "d"),
            SEEDS,
        ),
        gpu=True,
    ),
    Claim(
        id="dot-small",
        sentence=both(
            "Additive attention may be better when d_k is small.",
            "d_k 较小时，加性注意力可能更好。",
        ),
        notes="C",
        experiment=recalling,
        rule=judge_small,
        shows=show_widths,
        moves=(
            Move("d_k", both("d_k"), "d", how="only"),
            SEEDS,
        ),
    ),
    Claim(
        id="dot-overfit",
        sentence=both(
            "Additive attention has spare parameters and overfits small data, but suits "
            "asymmetric interactions.",
            "加性注意力参数冗余，在小数据集上可能过拟合；但适合非对称的交互。",
        ),
        notes="C",
        experiment=overfitting,
        rule=judge_overfit,
        shows=show_overfit,
        moves=(
            Move("sequences", both("sequences", "序列数"), "examples"),
            Move("seeds", both("seeds", "种子数"), "seed", ("rows", "relations")),
        ),
    ),
)
