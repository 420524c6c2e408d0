"""Claims about translation: scale-training, heads-quality, heads-robust, qk-shared-quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
from headwise.apps.lab.estimates import BLEU, Difference, difference
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.translation_runs import translated

NATS = both(" nats per token", " nat/词元")
MANY = 8
"""Seeds of the full form where 1 % of BLEU has to be told from chance."""


CLAIMED = (
    *("base", "heads-1", "heads-2", "heads-4", "heads-16", "heads-32"),
    *("shared", "unprojected", "additive", "unscaled-heads-1"),
)
"""The translators that claims need; the others stand in the table alone."""


def runs(lab: Lab, variants: Sequence[str], often: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The runs of these variants; those named in `often` with many seeds in the full form."""
    found = []
    for variant in variants:
        # two runs of the base model give the scatter that chance alone makes
        quick = 2 if variant == "base" else 1
        seeds = lab.pick(tiny=1, quick=quick, full=MANY if variant in often else 2)
        found += [translated(lab, variant, seed) for seed in range(seeds)]
    return found


def grouped(figures: Figures, name: str) -> dict[str, list[float]]:
    """A figure of all finished runs, by variant."""
    found: dict[str, list[float]] = {}
    for run in figures["runs"]:
        if not run["diverged"]:
            found.setdefault(run["variant"], []).append(run[name])
    return found


def percent(figures: Figures, one: str, other: str) -> Difference:
    """The BLEU of one variant minus that of the other, in percent of the latter."""
    groups = grouped(figures, "bleu")
    mean = sum(groups[other]) / len(groups[other])
    return difference(groups, one, other).scaled(100 / max(mean, 1e-9))


def sized(gain: Difference, low: float, high: float, because: Any) -> Verdict:
    """Judge a gain that is said to lie between `low` and `high`."""
    if gain.high < 0 or (gain.high < low and gain.low > -low):
        return does_not_hold(because)
    if gain.low <= 0:
        return undecided(because)
    if gain.low <= high and gain.high >= low:
        return holds(because)
    condition = both(
        "the sign is meant, and not the size: here it is {gain}",
        "只就正负而言，大小不符：这里是 {gain}",
        gain=gain.said(BLEU),
    )
    return holds_when(condition, because)


def scaling(lab: Lab) -> Figures:
    """Translators with one wide head, scaled and not, and the base model for the scatter."""
    return {"runs": runs(lab, ("base", "heads-1", "unscaled-heads-1"), ("base", "heads-1"))}


def judge_scaling(figures: Figures) -> Verdict:
    """Worse: a higher loss beyond chance. Unstable: a run that diverged."""
    failed = sum(run["diverged"] for run in figures["runs"] if run["variant"] == "unscaled-heads-1")
    losses = grouped(figures, "test_loss")
    if failed or "unscaled-heads-1" not in losses:
        because = both(
            "{failed} unscaled runs diverged", "{failed} 次未缩放的训练发散", failed=failed
        )
        return holds(because)
    worse = difference(losses, "unscaled-heads-1", "heads-1")
    slower = {
        name: half_way(next(run for run in figures["runs"] if run["variant"] == name))
        for name in ("heads-1", "unscaled-heads-1")
    }
    steepest = {
        name: max(
            norm
            for run in figures["runs"]
            if run["variant"] == name
            for norm in run["gradient_norms"][len(run["gradient_norms"]) // 4 :]
        )
        for name in ("heads-1", "unscaled-heads-1")
    }
    because = both(
        "one head without scaling ends higher than with it by {worse}, and is half-way down at "
        "step {unscaled} instead of {scaled}; no run "
        "diverged, and after the first quarter no gradient norm exceeds {wild:.1f}, with scaling "
        "{tame:.1f}",
        "单头不缩放时，最终损失比缩放时高 {worse}，在第 {unscaled} "
        "步降到一半，缩放时是第 {scaled} 步；没有发散，前四分之一之后梯度范数最大 "
        "{wild:.1f}，缩放时最大 {tame:.1f}",
        worse=worse.said(NATS),
        unscaled=slower["unscaled-heads-1"],
        scaled=slower["heads-1"],
        wild=steepest["unscaled-heads-1"],
        tame=steepest["heads-1"],
    )
    if worse.low > 0:
        return holds(because)
    return does_not_hold(because) if worse.high < 0.02 else undecided(because)


def half_way(run: dict[str, Any]) -> int:
    """The first evaluation at which half of the run's fall in validation loss is done."""
    first, last = run["curve"][0][1], run["curve"][-1][1]
    return int(next(step for step, loss in run["curve"] if loss <= (first + last) / 2))


def show_curves(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The validation loss of every variant, the mean of its runs, and the figures of each run."""
    curves: dict[str, list[list[list[float]]]] = {}
    for run in figures["runs"]:
        if not run["diverged"]:
            curves.setdefault(run["variant"], []).append(run["curve"])
    means = tuple(
        Series(
            both("{variant}", "{variant}", variant=variant),
            [step for step, _ in mine[0]],
            [sum(loss for _, loss in at) / len(at) for at in zip(*mine, strict=True)],
        )
        for variant, mine in curves.items()
    )
    headings = (
        both("variant", "变体"),
        both("seed", "种子"),
        both("BLEU", "BLEU"),
        both("test loss", "测试损失"),
        both("train loss", "训练损失"),
    )
    names = ("variant", "seed", "bleu", "test_loss", "train_loss")
    rows = tuple(tuple(run.get(name) for name in names) for run in figures["runs"])
    step, loss = both("step", "步"), both("nats per token", "每词元 nat")
    return (
        Chart(
            both("Validation loss, mean of all seeds", "验证损失，各种子平均"), step, loss, means
        ),
        Listing(both("Runs", "训练"), headings, rows),
    )


def heads(lab: Lab) -> Figures:
    """Translators with different numbers of heads at equal width."""
    few = ("base", "heads-1", "heads-16")
    every = ("heads-1", "heads-2", "heads-4", "base", "heads-16", "heads-32")
    variants = lab.pick(tiny=few, quick=few, full=every)
    return {"runs": runs(lab, variants, often=("base", "heads-1"))}


def judge_quality(figures: Figures) -> Verdict:
    """The gain over one head, in percent, with its interval."""
    gain = percent(figures, "base", "heads-1")
    means = {name: sum(x) / len(x) for name, x in grouped(figures, "bleu").items()}
    because = both(
        "the base model's heads gain {gain} over one head: {base:.2f} "
        "against {one:.2f}; the most heads have {most:.2f}",
        "基准模型的多头比单头高 {gain}：{base:.2f} 对 {one:.2f}；头最多的是 {most:.2f}",
        gain=gain.said(BLEU),
        base=means["base"],
        one=means["heads-1"],
        most=means["heads-32" if "heads-32" in means else "heads-16"],
    )
    return sized(gain, 1, 2, because)


def judge_robust(figures: Figures) -> Verdict:
    """Both halves: the gap between test and training, and the loss without one head."""
    gaps: dict[str, list[float]] = {}
    harm: dict[str, list[float]] = {}
    for run in figures["runs"]:
        if not run["diverged"]:
            gaps.setdefault(run["variant"], []).append(run["test_loss"] - run["train_loss"])
            losses = [loss for layer in run["without_head"].values() for loss in layer]
            harmed = [loss - run["test_loss"] for loss in losses]
            harm.setdefault(run["variant"], []).append(sum(harmed) / len(harmed))
    gap = difference(gaps, "base", "heads-1")
    mean = {name: sum(x) / len(x) for name, x in harm.items()}
    because = both(
        "removing one head costs {one:.3f} nats per token where a layer has one, {base:.3f} in "
        "the base model, {many:.3f} with 16; the gap between test and training loss of the base "
        "model exceeds that of one head by {gap}",
        "每层只有一个头时，去掉它使每词元损失增加 {one:.3f} nat，基准模型去掉一个头增加 "
        "{base:.3f}，16 头增加 {many:.3f}；基准模型的测试与训练损失之差比单头大 {gap}",
        one=mean["heads-1"],
        base=mean["base"],
        many=mean["heads-16"],
        gap=gap.said(NATS),
    )
    if mean["base"] >= mean["heads-1"]:
        return does_not_hold(because)
    if gap.high < 0:
        return holds(because)
    condition = both(
        "it is about the dependence on a single head; a smaller gap to the training loss was not "
        "found",
        "指的是对单个头的依赖；没有发现与训练损失的差距变小",
    )
    return holds_when(condition, because)


def sharing(lab: Lab) -> Figures:
    """Translators with separate and with shared matrices for Q and K."""
    return {"runs": runs(lab, ("base", "shared"), often=("base", "shared"))}


def judge_shared(figures: Figures) -> Verdict:
    """The loss of BLEU, in percent, with its interval."""
    gain = percent(figures, "base", "shared")
    because = both(
        "separate matrices gain {gain} over a shared one",
        "独立的矩阵比共享的高 {gain}",
        gain=gain.said(BLEU),
    )
    return sized(gain, 1, 2, because)


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
        shows=show_curves,
        gpu=True,
    ),
    Claim(
        id="heads-quality",
        sentence=both(
            "Many heads beat one on translation by about 1–2 % BLEU.",
            "在翻译上，多头比单头的 BLEU 高约 1–2%。",
        ),
        notes="C",
        experiment=heads,
        rule=judge_quality,
        shows=show_curves,
        gpu=True,
    ),
    Claim(
        id="heads-robust",
        sentence=both(
            "Many heads resist overfitting and depend less on any single one.",
            "多头能防止过拟合，降低对单个头的依赖。",
        ),
        notes="AC",
        experiment=heads,
        rule=judge_robust,
        shows=show_curves,
        gpu=True,
    ),
    Claim(
        id="qk-shared-quality",
        sentence=both(
            "Sharing one matrix between Q and K costs 1–2 % BLEU.",
            "Q 与 K 共用矩阵会使 BLEU 降低 1–2%。",
        ),
        notes="C",
        experiment=sharing,
        rule=judge_shared,
        shows=show_curves,
        gpu=True,
    ),
)
