"""The translation table beside what others say: the 2017 paper's table 3, and the notes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwise.apps.lab.ablations import Run, against_base, scores
from headwise.apps.lab.charts import NO, YES, Cell, Listing
from headwise.apps.lab.claim import both
from headwise.apps.lab.claims.paper import BASE, TABLE_3
from headwise.apps.lab.claims.translation_quality import ABOUT, MATTERS
from headwise.apps.lab.estimates import LEVEL
from headwise.messages import Sentence

UNCERTAIN = both("not certain", "不确定")
CHANCE = both("chance may explain it", "可能出于偶然")
FEW = both("too few runs", "次数太少")

FEW_HEADS = (
    both("one wide head follows one pattern a layer", "一个宽的头每层只能跟随一种模式"),
    both("short sentences need few patterns at once", "短句同时需要的模式少"),
)
MANY_HEADS = (
    both("a head becomes too narrow to tell keys apart", "头变得太窄，分不清各个键"),
    both("short sentences have few keys to tell apart", "短句要分清的键少"),
)
NARROW_KEYS = (
    both("narrow keys compare less", "窄的键能比较的东西少"),
    both(
        "a small vocabulary of short sentences needs less to compare",
        "词表小、句子短，要比较的东西少",
    ),
)
"""Reasons why few heads, many heads and narrow keys lose, and why they may not lose here."""

Reasons = tuple[Sentence, Sentence]
PAPER: Sequence[tuple[str, int, str, Sentence, Reasons]] = (
    # the row of table 3, the variant that corresponds to it, what it changes, and why
    ("A", 0, "heads-1", both("1 head", "1 个头"), FEW_HEADS),
    ("A", 1, "heads-4", both("4 heads", "4 个头"), FEW_HEADS),
    ("A", 2, "heads-16", both("16 heads", "16 个头"), MANY_HEADS),
    ("B", 1, "keys-half", both("keys half as wide", "键宽减半"), NARROW_KEYS),
)
"""Table 3 of the paper: eight heads of the base model's width there and here."""

NOTES: Sequence[tuple[str, Sentence, bool]] = (
    # a variant, what the notes say of it, and whether they say “1–2 %”
    ("heads-1", both("many heads gain 1–2 % over one", "多头比单头高 1–2%"), True),
    ("shared", both("a shared matrix for Q and K costs 1–2 %", "Q、K 共用矩阵降低 1–2%"), True),
    ("unprojected", both("without projections it can't adapt", "没有投影就无法适应"), False),
    ("additive", both("dot product beats additive", "点积优于加性"), False),
    ("unscaled", both("without scaling it ends worse", "不缩放效果下降"), False),
    ("fixed", both("fixed weights do not generalise", "固定权重不能泛化"), False),
    ("lstm-attention", both("an LSTM loses what is far", "LSTM 丢失远处的内容"), False),
    ("convolution", both("a convolution sees what is near", "卷积只看得到近处"), False),
)
"""The notes' sentences about results. Where they give no number, the sign is what they say."""


def beside_the_paper(runs: Sequence[Run]) -> Listing:
    """Rows A and B of table 3, against its base model and against ours: the direction, and why."""
    against = against_base(runs)
    rows: list[tuple[Cell | Sentence, ...]] = []
    for letter, number, variant, what, (alike, otherwise) in PAPER:
        theirs = float(TABLE_3[letter][number]["bleu"]) - BASE["bleu"]
        row: tuple[Cell | Sentence, ...] = (letter, what, f"{theirs:+.1f}")
        if variant not in against:
            rows.append((*row, None, None, None))
            continue
        ours, chance = against[variant]
        same, why = UNCERTAIN, CHANCE
        if not math.isfinite(ours.high):
            why = FEW
        elif chance < LEVEL:
            # where the paper sees no difference, one that is certain here is another direction
            same, why = (YES, alike) if ours.mean * theirs > 0 else (NO, otherwise)
            why = alike if ours.mean < 0 else why
        elif abs(theirs) < 0.05 and ours.within(-MATTERS, MATTERS):
            same, why = YES, both("both within half a point", "都在半分以内")
        rows.append((*row, ours.brief, same, why))
    headings = (
        both("row", "行"),
        both("change", "改动"),
        both("the paper, BLEU from its base", "论文，与其基准相差 BLEU"),
        both("here, BLEU (95 % interval)", "这里，BLEU（95% 区间）"),
        both("same direction", "方向一致"),
        both("why", "原因"),
    )
    return Listing(both("Table 3 of the paper", "论文的表 3"), headings, tuple(rows))


def beside_the_notes(runs: Sequence[Run]) -> Listing:
    """The notes' sentences about BLEU, and the gain of the base model: its sign and its size."""
    groups = scores(runs)
    against = against_base(runs)
    rows: list[tuple[Cell | Sentence, ...]] = []
    for variant, said, sized in NOTES:
        if variant not in against:
            rows.append((said, None, None, None, None))
            continue
        gap, chance = against[variant]
        points, mean = gap.scaled(-1), sum(groups[variant]) / len(groups[variant])
        same = UNCERTAIN if chance >= LEVEL else YES if points.mean > 0 else NO
        sizes = (points, points.scaled(100 / max(mean, 1e-9)))
        fits = [YES if each.within(*ABOUT) else NO for each in sizes]
        rows.append((said, points.brief, same, *(fits if sized and same is YES else (None, None))))
    headings = (
        both("the notes", "笔记"),
        both("gain here, BLEU (95 % interval)", "这里的增益，BLEU（95% 区间）"),
        both("same direction", "方向一致"),
        both("same size, in points", "幅度一致，按分数点"),
        both("same size, in percent", "幅度一致，按百分比"),
    )
    return Listing(both("What the notes say", "笔记的说法"), headings, tuple(rows))
