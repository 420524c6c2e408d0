"""Projections of Q and K in training: qk-none, qk-gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.apps.lab.ablations import gain
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
from headwise.apps.lab.claims.translation_quality import MATTERS, runs
from headwise.apps.lab.estimates import BLEU_POINTS, difference, measured
from headwise.apps.lab.laboratory import Lab, Piece
from headwise.apps.lab.moves import SEEDS
from headwise.apps.lab.recall import Recall, RecallModel, Relation, Task, accuracy, learn, recipe_of
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
    steps = lab.pick("steps", tiny=2, quick=300, full=600)
    found = []
    for seed in range(lab.pick("seeds", tiny=1, quick=3, full=8)):
        model = reader(kind, TASKS[task], seed)
        learn(model, TASKS[task], recipe_of(steps, 1e-2), seed=seed)
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
    return {"rows": rows, "runs": runs(lab, "base", "unprojected")}


def of(figures: Figures, kind: str, task: str) -> list[float]:
    """The accuracies of all runs of a kind on a task."""
    return [row[task] for row in figures["rows"] if row["kind"] == kind]


def judge_none(figures: Figures) -> Verdict:
    """Without projections: what can't be learnt that separate matrices learn."""
    found = {
        (kind, task): of(figures, kind, task) for kind in KINDS for task in ("recall", "relation")
    }
    loss = gain(figures["runs"], "base", "unprojected")
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
        loss=loss.said(BLEU_POINTS),
    )
    if min(found["separate", "relation"]) < 0.9:
        verdict = undecided(because)
    elif max(found["unprojected", "relation"]) > 0.9:
        verdict = does_not_hold(because)
    elif max(found["unprojected", "recall"]) < 0.5:
        verdict = holds(because)
    else:
        condition = both(
            "the task asks for anything but similar tokens; embeddings learn which tokens are "
            "similar, so similarity itself needs no projection",
            "任务要找的不是相似的词元；嵌入本身会学出哪些词元相似，所以找相似并不需要投影",
        )
        verdict = holds_when(condition, because)
    return measured(verdict, loss, BLEU_POINTS, MATTERS)


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


SOLVED = 0.05
"""The loss from which on a task counts as solved: what gradients do then is noise."""


def jumping(lab: Lab, folder: Path | None, kind: str) -> dict[str, Any]:
    """The gradients of W_q and W_k before and after the task is solved, for every seed."""
    steps = lab.pick("steps", tiny=4, quick=300, full=600)
    rows = []
    for seed in range(lab.pick("seeds", tiny=2, quick=5, full=20)):
        task = Recall(16)
        model = reader("separate", task, seed)
        seen = watched(model, tied=kind == "shared")
        losses, _ = learn(model, task, recipe_of(steps, 3e-3), seed=seed)
        solved = next((step for step, loss in enumerate(losses) if loss < SOLVED), steps)
        rows.append(
            {
                "kind": kind,
                "seed": seed,
                "solved": solved,
                "jump": mean_jump(seen[:solved]),
                "jump_after": mean_jump(seen[solved:]),
                "cosine": sum(cosine for _, cosine in seen[:solved]) / max(1, solved),
                "accuracy": accuracy(model, task),
            }
        )
    return {"rows": rows}


def mean_jump(seen: Sequence[tuple[float, float]]) -> float:
    """By how much the logarithm of the gradient's norm changes from step to step."""
    if len(seen) < 2:
        return 0.0
    norms = torch.tensor([norm for norm, _ in seen]).clamp_min(1e-30).log()
    return float(norms.diff().abs().mean())


def gradients(lab: Lab) -> Figures:
    """The gradients of W_q and W_k in training, for separate and shared matrices."""
    found = lab.keep_all(watched_trainings(lab))
    return {"rows": [row for each in found for row in each["rows"]]}


def watched(model: RecallModel, tied: bool) -> list[tuple[float, float]]:
    """A list that gets, at every step, the norm of the gradient and the cosine of its two parts.

    Queries and keys that are `tied` start alike and get the sum of both gradients, which is how
    one shared matrix trains; its two parts, from the queries and from the keys, stay visible.
    """
    layer = model.layer
    assert isinstance(layer, MultiHeadAttention)
    assert isinstance(layer.query, nn.Linear) and isinstance(layer.key, nn.Linear)
    seen: list[tuple[float, float]] = []
    waiting: set[str] = set()
    if tied:
        layer.key.load_state_dict(layer.query.state_dict())

    def note(name: str, one: nn.Parameter, other: nn.Parameter) -> None:
        if name not in waiting:  # the other of the two comes later
            waiting.add(name)
            return
        waiting.remove(name)
        assert one.grad is not None and other.grad is not None
        if name == "weight":
            a, b = one.grad.flatten(), other.grad.flatten()
            whole = (a + b).norm() if tied else torch.cat((a, b)).norm()
            seen.append((float(whole), float(torch.cosine_similarity(a, b, 0))))
        if tied:
            together = one.grad + other.grad
            one.grad, other.grad = together, together.clone()

    for name, one in layer.query.named_parameters():
        other = layer.key.get_parameter(name)
        for each in (one, other):
            each.register_post_accumulate_grad_hook(
                lambda _, name=name, one=one, other=other: note(name, one, other)
            )
    return seen


def by_kind(figures: Figures, name: str) -> dict[str, list[float]]:
    """A figure of all runs, by kind."""
    found: dict[str, list[float]] = {}
    for row in figures["rows"]:
        found.setdefault(row["kind"], []).append(row[name])
    return found


def judge_gradient(figures: Figures) -> Verdict:
    """Steadier until the task is solved, beyond chance; what happens afterwards is a condition."""
    jumps = by_kind(figures, "jump")
    before = difference(jumps, "shared", "separate")
    after = difference(by_kind(figures, "jump_after"), "shared", "separate")
    mean = {kind: sum(x) / len(x) for kind, x in jumps.items()}
    cosines, solved = by_kind(figures, "cosine"), by_kind(figures, "solved")
    because = both(
        "until the task is solved (loss {loss}) the logarithm of the gradient's norm changes by "
        "{separate:.3f} a step with separate matrices and by {shared:.3f} with a shared one, "
        "{before} more; afterwards by {after} more; the parts of a shared matrix's gradient, from "
        "queries and from keys, have a mean cosine of {cosine:.2f}; separate matrices need "
        "{fast:.0f} steps, a shared one {slow:.0f}",
        "任务解决之前（损失 {loss}），梯度范数的对数每步变化：独立 {separate:.3f}，共享 "
        "{shared:.3f}，"
        "多 {before}；之后多 {after}；共享矩阵的梯度中来自查询与来自键的两部分，平均余弦 "
        "{cosine:.2f}；"
        "独立矩阵需要 {fast:.0f} 步，共享 {slow:.0f} 步",
        loss=SOLVED,
        separate=mean["separate"],
        shared=mean["shared"],
        before=before.said(),
        after=after.said(),
        cosine=sum(cosines["shared"]) / len(cosines["shared"]),
        fast=sum(solved["separate"]) / len(solved["separate"]),
        slow=sum(solved["shared"]) / len(solved["shared"]),
    )
    small = 0.1 * mean["separate"]
    verdict = undecided(because)
    if before.low > 0 and after.high >= 0:
        verdict = holds(because)
    elif before.low > 0:
        condition = both(
            "the task is not solved yet; once it is, gradients are noise and those of separate "
            "matrices are the less steady ones",
            "任务尚未解决；解决之后梯度只剩噪声，反而是独立矩阵的更不稳定",
        )
        verdict = holds_when(condition, because)
    elif before.high < 0 or before.within(-small, small):
        verdict = does_not_hold(because)
    return measured(verdict, before, both("", ""), small)


def show_gradient(figures: Figures) -> tuple[Listing, ...]:
    """The figures of every run."""
    headings = (
        both("projections", "投影"),
        both("seed", "种子"),
        both("solved at step", "解决于第几步"),
        both("change per step before (log)", "之前每步变化（对数）"),
        both("after", "之后"),
        both("cosine of both parts", "两部分的余弦"),
        both("accuracy", "正确率"),
    )
    keys = ("kind", "seed", "solved", "jump", "jump_after", "cosine", "accuracy")
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
        moves=(SEEDS,),
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
        moves=(SEEDS,),
    ),
)
