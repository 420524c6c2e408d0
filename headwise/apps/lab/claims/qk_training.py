"""Projections of Q and K in training: qk-none, qk-gradient."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.apps.lab.charts import Listing
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
from headwise.apps.lab.claims.translation_quality import percent, runs
from headwise.apps.lab.estimates import BLEU, difference
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.recall import Recall, RecallModel, Relation, Task, accuracy, learn
from headwise.nn import MultiHeadAttention, Projections, Separate, Shared, Unprojected

KINDS: Mapping[str, Projections] = {
    "separate": Separate(),
    "shared": Shared(),
    "unprojected": Unprojected(),
}
WIDTH = 32


def reader(kind: str, task: Task, seed: int) -> RecallModel:
    """A reader with one head and these projections."""
    torch.manual_seed(seed)
    return RecallModel(MultiHeadAttention(WIDTH, 1, projections=KINDS[kind]), WIDTH, task)


TASKS: Mapping[str, Task] = {"recall": Recall(16), "relation": Relation()}


def on_tasks(lab: Lab) -> list[Piece]:
    """The trainings of `adapting`."""
    return [
        (f"adapt-{kind}-{task}", adapted, {"kind": kind, "task": task})
        for kind in KINDS
        for task in TASKS
    ]


def adapted(lab: Lab, folder: Path | None, kind: str, task: str) -> dict[str, Any]:
    """The accuracy of one kind on one task, for every seed."""
    steps = lab.pick(tiny=2, quick=300, full=600)
    found = []
    for seed in range(lab.pick(tiny=1, quick=3, full=8)):
        model = reader(kind, TASKS[task], seed)
        learn(model, TASKS[task], steps, seed=seed, rate=1e-2)
        found.append(accuracy(model, TASKS[task]))
    return {"kind": kind, "task": task, "accuracies": found}


def adapting(lab: Lab) -> Figures:
    """Each kind on recall (find your own key) and on relation (find the next key), and BLEU."""
    found = lab.keep_all(on_tasks(lab))
    rows = [
        {"kind": kind, "seed": seed}
        | {each["task"]: each["accuracies"][seed] for each in found if each["kind"] == kind}
        for kind in KINDS
        for seed in range(len(found[0]["accuracies"]))
    ]
    return {"rows": rows, "runs": runs(lab, ("base", "unprojected"), ("base",))}


def of(figures: Figures, kind: str, task: str) -> list[float]:
    """The accuracies of all runs of a kind on a task."""
    return [row[task] for row in figures["rows"] if row["kind"] == kind]


def judge_none(figures: Figures) -> Verdict:
    """Without projections: what can't be learnt that separate matrices learn."""
    found = {
        (kind, task): of(figures, kind, task) for kind in KINDS for task in ("recall", "relation")
    }
    loss = percent(figures, "base", "unprojected")
    because = both(
        "without projections the worst layer finds its own key in {recall:.0%} of cases, and "
        "the best one the next key in {relation:.0%}; with separate matrices the worst finds "
        "{own:.0%} and {next:.0%}; on translation projections gain {loss}",
        "没有投影时，最差的层找到相同的键 {recall:.0%}，最好的层找到下一个键 {relation:.0%}；"
        "独立矩阵时最差的层分别是 {own:.0%} 与 {next:.0%}；在翻译上，投影带来 {loss}",
        recall=min(found["unprojected", "recall"]),
        relation=max(found["unprojected", "relation"]),
        own=min(found["separate", "recall"]),
        next=min(found["separate", "relation"]),
        loss=loss.said(BLEU),
    )
    if min(found["separate", "relation"]) < 0.9:
        return undecided(because)
    if max(found["unprojected", "relation"]) > 0.9:
        return does_not_hold(because)
    if max(found["unprojected", "recall"]) < 0.5:
        return holds(because)
    condition = both(
        "the task asks for anything but similar tokens; embeddings learn which tokens are "
        "similar, so similarity itself needs no projection",
        "任务要找的不是相似的词元；嵌入本身会学出哪些词元相似，所以找相似并不需要投影",
    )
    return holds_when(condition, because)


def show_none(figures: Figures) -> tuple[Listing, ...]:
    """The accuracy of every run."""
    headings = (
        both("projections", "投影"),
        both("seed", "种子"),
        both("own key", "相同的键"),
        both("next key", "下一个键"),
    )
    rows = tuple((x["kind"], x["seed"], x["recall"], x["relation"]) for x in figures["rows"])
    bleu = tuple(
        (run["variant"], run["seed"], None if run["diverged"] else run["bleu"])
        for run in figures["runs"]
    )
    return (
        Listing(both("Share of right answers", "答对的比例"), headings, rows),
        Listing(
            both("Translation", "翻译"),
            (both("variant", "变体"), both("seed", "种子"), both("BLEU", "BLEU")),
            bleu,
        ),
    )


def watched_trainings(lab: Lab) -> list[Piece]:
    """The trainings of `gradients`."""
    return [(f"gradients-{kind}", jumping, {"kind": kind}) for kind in ("separate", "shared")]


def jumping(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """The gradient norms of W_q and W_k over training, for every seed."""
    steps = lab.pick(tiny=4, quick=300, full=600)
    rows = []
    for seed in range(lab.pick(tiny=1, quick=5, full=20)):
        task = Recall(16)
        model = reader(kind, task, seed)
        norms = watched(model)
        learn(model, task, steps, seed=seed)
        late = torch.tensor(norms[len(norms) // 4 :]).clamp_min(1e-30).log()
        jumps = late.diff().abs()  # how much the norm changes from step to step
        rows.append(
            {
                "kind": kind,
                "seed": seed,
                "norm": float(late.mean().exp()),
                "jump": float(jumps.mean()),
                "accuracy": accuracy(model, task),
            }
        )
    return {"rows": rows}


def gradients(lab: Lab) -> Figures:
    """The gradient norms of W_q and W_k over training, for separate and shared matrices."""
    found = lab.keep_all(watched_trainings(lab))
    return {"rows": [row for each in found for row in each["rows"]]}


def watched(model: RecallModel) -> list[float]:
    """A list that gets the norm of the gradient of W_q and W_k at every step of training."""
    norms: list[float] = []
    layer = model.layer
    assert isinstance(layer, MultiHeadAttention) and isinstance(layer.query, nn.Linear)
    matrices = [layer.query.weight]
    if isinstance(layer.key, nn.Linear):
        matrices.append(layer.key.weight)
    squares: list[float] = []

    def note(gradient: torch.Tensor) -> None:
        squares.append(float(gradient.square().mean()))
        if len(squares) == len(matrices):
            norms.append((sum(squares) / len(squares)) ** 0.5)
            squares.clear()

    for matrix in matrices:
        matrix.register_hook(note)
    return norms


def judge_gradient(figures: Figures) -> Verdict:
    """Steadier: the norm changes less from step to step, beyond chance."""
    jumps: dict[str, list[float]] = {}
    for row in figures["rows"]:
        jumps.setdefault(row["kind"], []).append(row["jump"])
    more = difference(jumps, "shared", "separate")
    mean = {kind: sum(x) / len(x) for kind, x in jumps.items()}
    because = both(
        "from step to step the gradient of W_q and W_k changes by a factor of e^{separate:.3f} "
        "with separate matrices and of e^{shared:.3f} with a shared one; the difference is "
        "{more}",
        "相邻两步之间，W_q 与 W_k 的梯度范数变化 e^{separate:.3f} 倍（独立）与 e^{shared:.3f} "
        "倍（共享）；相差 {more}",
        separate=mean["separate"],
        shared=mean["shared"],
        more=more.said(),
    )
    if more.low > 0:
        return holds(because)
    small = 0.1 * mean["separate"]
    return does_not_hold(because) if more.high < small else undecided(because)


def show_gradient(figures: Figures) -> tuple[Listing, ...]:
    """The figures of every run."""
    headings = (
        both("projections", "投影"),
        both("seed", "种子"),
        both("gradient, root mean square", "梯度，均方根"),
        both("change per step (log)", "每步变化（对数）"),
        both("accuracy", "正确率"),
    )
    keys = ("kind", "seed", "norm", "jump", "accuracy")
    rows = tuple(tuple(row[key] for key in keys) for row in figures["rows"])
    return (Listing(both("Gradients in training", "训练中的梯度"), headings, rows),)


CLAIMS = (
    Claim(
        id="qk-none",
        sentence=both(
            "With Q = K = X and no projections, attention can't adapt to its task.",
            "直接令 Q = K = X 而没有投影时，注意力无法适应任务。",
        ),
        notes="C",
        experiment=adapting,
        rule=judge_none,
        shows=show_none,
        gpu=True,
        derivation=both(
            "x_i·x_j = x_j·x_i: a token that must find its successor scores its predecessor "
            "exactly as high, and no score exceeds that of the longest token with itself.",
            "x_i·x_j = x_j·x_i：要找后继的词元，会给前驱打出完全相同的分数；"
            "且任何分数都不超过最长的词元与自身的分数。",
        ),
    ),
    Claim(
        id="qk-gradient",
        sentence=both(
            "Separate matrices decouple the gradients of Q and K and make training steadier.",
            "独立的矩阵使 Q 与 K 的梯度解耦，训练更稳定。",
        ),
        notes="C",
        experiment=gradients,
        rule=judge_gradient,
        shows=show_gradient,
    ),
)
