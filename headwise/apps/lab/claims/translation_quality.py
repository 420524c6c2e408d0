"""Claims about translation: heads-quality, heads-robust, qk-shared-quality."""

from __future__ import annotations

from typing import Any

from headwise.apps.lab.ablations import gain, scores
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
from headwise.apps.lab.estimates import BLEU_POINTS, Difference, difference, measured
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import SEEDS
from headwise.apps.lab.translation_runs import translated
from headwise.messages import Sentence

NATS = both(" nats per token", " nat/词元")
CLAIMED = (
    *("base", "heads-1", "heads-4", "heads-16", "keys-half", "shared", "twin-keys-half"),
    *("unprojected", "unscaled", "unscaled-narrow", "additive", "fixed"),
)
"""The translators that claims need; the others stand in the table alone."""


def runs(lab: Lab, *variants: str) -> list[dict[str, Any]]:
    """The runs of these variants, all seeds."""
    return [run for variant in variants for run in translated(lab, variant)]


ABOUT = (0.5, 2.5)
"""What "about 1–2" allows; the 90 % interval has to lie inside."""
MATTERS = 0.5
"""The smallest difference in points of BLEU that a comparison ought to show."""


def sized(points: Difference, mean: float, because: Sentence) -> Verdict:
    """Judge a gain of "1–2 %", which may mean percent of `mean` or points of BLEU."""
    percent = points.scaled(100 / max(mean, 1e-9))
    readings = {
        both("percent of BLEU", "BLEU 的百分比"): percent,
        both("points of BLEU", "BLEU 的分数点"): points,
    }
    fit = [name for name, gain in readings.items() if gain.within(*ABOUT)]
    verdict = undecided(because)
    if points.high < 0 or percent.within(-1, 1):
        verdict = does_not_hold(because)
    elif points.low > 0 and len(fit) == len(readings):
        verdict = holds(because)
    elif points.low > 0:
        sign = both(
            "the sign is meant: neither reading has this size", "只就正负而言：两种读法的大小都不符"
        )
        meant = (
            both("“1–2 %” means {reading}", "“1–2%”指的是{reading}", reading=fit[0])
            if fit
            else sign
        )
        verdict = holds_when(meant, because)
    return measured(verdict, points, BLEU_POINTS, MATTERS)


def in_both_units(points: Difference, mean: float) -> Sentence:
    """A gain in points with its interval, and in percent."""
    return both(
        "{points}, {percent:.1f} %",
        "{points}，即 {percent:.1f}%",
        points=points.said(BLEU_POINTS),
        percent=100 * points.mean / max(mean, 1e-9),
    )


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
    return {"runs": runs(lab, *few, *lab.pick("more", tiny=(), quick=(), full=("heads-4",)))}


def judge_quality(figures: Figures) -> Verdict:
    """The gain over one head, in points and in percent, with its interval."""
    more = gain(figures["runs"], "base", "heads-1")
    means = {name: sum(x) / len(x) for name, x in scores(figures["runs"], "bleu").items()}
    because = both(
        "the base model's heads gain {gain} over one head: {base:.2f} "
        "against {one:.2f}; sixteen heads have {most:.2f}; each at the rate that suits it best",
        "基准模型的多头比单头高 {gain}：{base:.2f} 对 {one:.2f}；十六个头是 {most:.2f}；"
        "各用最合适的学习率",
        gain=in_both_units(more, means["heads-1"]),
        base=means["base"],
        one=means["heads-1"],
        most=means["heads-16"],
    )
    return sized(more, means["heads-1"], because)


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
    tested = {name: sum(x) / len(x) for name, x in scores(figures["runs"], "test_loss").items()}
    because = both(
        "the gap between test and training loss of the base model exceeds that of one head by "
        "{gap}, while its test loss is {test:.2f} against {single:.2f}; removing one head costs "
        "{one:.3f} nats per token where a layer has one, "
        "{base:.3f} in the base model, {many:.3f} with 16, which is nearly true by construction: "
        "the only head is all of its layer",
        "基准模型的测试与训练损失之差比单头大 {gap}，而测试损失是 {test:.2f} 对 {single:.2f}；"
        "每层只有一个头时，去掉它使每词元损失增加 {one:.3f} nat，基准模型去掉一个头增加 "
        "{base:.3f}，16 头增加 {many:.3f}，但这几乎是必然的：唯一的头就是整层",
        one=mean["heads-1"],
        base=mean["base"],
        many=mean["heads-16"],
        gap=gap.said(NATS),
        test=tested["base"],
        single=tested["heads-1"],
    )
    if mean["base"] >= mean["heads-1"] or gap.low > 0:
        verdict = does_not_hold(because)
    elif gap.high < 0:
        verdict = holds(because)
    else:
        verdict = undecided(because)
    return measured(verdict, gap, NATS, 0.02)


def sharing(lab: Lab) -> Figures:
    """Translators with separate and shared matrices for Q and K, and two of the shared size."""
    return {"runs": runs(lab, "base", "shared", "keys-half", "twin-keys-half")}


def judge_shared(figures: Figures) -> Verdict:
    """The loss of BLEU with its interval, and what of it a model of the same size loses."""
    more, half, twin = (
        gain(figures["runs"], each, "shared") for each in ("base", "keys-half", "twin-keys-half")
    )
    mean = sum(scores(figures["runs"], "bleu")["shared"]) / len(
        scores(figures["runs"], "bleu")["shared"]
    )
    because = both(
        "separate matrices gain {gain} over a shared one; of models with as many parameters as the "
        "shared one, separate matrices half as wide gain {half}, and separate ones beside narrower "
        "inner layers {twin}",
        "独立的矩阵比共享的高 {gain}；参数量与共享的相同时，宽度减半的独立矩阵高 {half}，"
        "前馈层较窄的独立矩阵高 {twin}",
        gain=in_both_units(more, mean),
        half=half.said(BLEU_POINTS),
        twin=twin.said(BLEU_POINTS),
    )
    return sized(more, mean, because)


CLAIMS = (
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
        moves=(SEEDS,),
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
        moves=(SEEDS,),
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
        moves=(SEEDS,),
        gpu=True,
    ),
)
