"""Sentences attributed to the 2017 paper, "Attention Is All You Need", settled by the paper."""

from __future__ import annotations

from headwise.apps.lab.charts import Listing
from headwise.apps.lab.claim import Claim, Figures, Verdict, attributed, both, undecided
from headwise.apps.lab.laboratory import Lab
from headwise.messages import Sentence

ABOUT = (0.5, 2.5)
"""What "about 1–2" allows."""
BASE = {"heads": 8, "d_k": 64, "perplexity": 4.92, "bleu": 25.8}
"""Table 3, the base model on the development set (newstest2013)."""

TABLE_3 = {
    "A": (  # heads at equal cost
        {"heads": 1, "d_k": 512, "perplexity": 5.29, "bleu": 24.9},
        {"heads": 4, "d_k": 128, "perplexity": 5.00, "bleu": 25.5},
        {"heads": 16, "d_k": 32, "perplexity": 4.91, "bleu": 25.8},
        {"heads": 32, "d_k": 16, "perplexity": 5.01, "bleu": 25.4},
    ),
    "B": (  # narrower keys
        {"heads": 8, "d_k": 16, "perplexity": 5.16, "bleu": 25.1},
        {"heads": 8, "d_k": 32, "perplexity": 5.01, "bleu": 25.4},
    ),
}
VARIED = {
    "A": "number of heads, at equal cost",
    "B": "width of keys",
    "C": "model size",
    "D": "dropout and label smoothing",
    "E": "learned positions",
}
"""Everything that the rows of table 3 vary."""

CHINESE = {
    "A": "等代价下的头数",
    "B": "键的宽度",
    "C": "模型大小",
    "D": "dropout 与标签平滑",
    "E": "学习的位置",
}
"""The same in 中文."""

PASSAGES = {
    "additive": ("3.2.1", "for small values of d_k the two mechanisms perform similarly"),
    "unscaled": ("3.2.1", "additive attention outperforms dot product attention without scaling"),
    "faster": ("3.2.1", "dot-product attention is much faster and more space-efficient"),
    "suspects": ("3.2.1", "We suspect that for large values of d_k"),
    "gradients": ("3.2.1", "regions where it has extremely small gradients"),
    "roles": ("4", "related to the syntactic and semantic structure"),
    "far": ("figure 3", "long-distance dependencies"),
    "anaphora": ("figure 4", "apparently involved in anaphora resolution"),
    "structure": ("figure 5", "related to the structure of the sentence"),
}
"""All that the paper says of these matters, phrase by phrase, with its place."""


def heads_table(lab: Lab) -> Figures:
    """Table 3, rows A: the loss of one head, and of too many, against the base model."""
    return {"base": BASE, "rows": list(TABLE_3["A"])}


def judge_heads(figures: Figures) -> Verdict:
    """Right if the gain of 8 heads over 1 is about 1–2, in percent or in points of BLEU."""
    base = figures["base"]["bleu"]
    rows = {row["heads"]: row["bleu"] for row in figures["rows"]}
    gain = base - rows[1]
    percent = 100 * gain / rows[1]
    because = both(
        "table 3, rows A: one head has {one} BLEU and eight have {base}, {gain:.1f} BLEU or "
        "{percent:.1f} % more; 32 heads have {many}",
        "表 3 的 A 行：单头 {one} BLEU，八头 {base}，高 {gain:.1f} BLEU，即 {percent:.1f}%；32 "
        "头是 {many}",
        one=rows[1],
        base=base,
        gain=gain,
        percent=percent,
        many=rows[32],
    )
    readings = {
        both("“1–2 %” means percent of BLEU", "“1–2%”指的是 BLEU 的百分比"): percent,
        both(
            "“1–2 %” means points of BLEU: 0.9 is about 1", "“1–2%”指的是 BLEU 的分数点：0.9 约为 1"
        ): gain,
    }
    fit = [name for name, value in readings.items() if ABOUT[0] < value < ABOUT[1]]
    return attributed(bool(fit), because, fit[0] if len(fit) == 1 else None)


def show_heads(figures: Figures) -> tuple[Listing, ...]:
    """The rows of the table."""
    headings = (
        both("heads", "头数"),
        both("d_k", "d_k"),
        both("perplexity", "困惑度"),
        both("BLEU", "BLEU"),
    )
    rows = sorted([figures["base"], *figures["rows"]], key=lambda row: row["heads"])
    return (
        Listing(
            both("Table 3 of the paper, rows A", "论文表 3 的 A 行"),
            headings,
            tuple((row["heads"], row["d_k"], row["perplexity"], row["bleu"]) for row in rows),
        ),
    )


def reading(*names: str, words: tuple[str, ...] = ()) -> Figures:
    """The passages of these names, the words looked for, and what table 3 varies."""
    return {
        "passages": [{"place": PASSAGES[x][0], "phrase": PASSAGES[x][1]} for x in names],
        "words": list(words),
        "varied": VARIED,
    }


def found(figures: Figures) -> list[str]:
    """The words that occur in the passages, or in what the table varies."""
    text = " ".join(x["phrase"] for x in figures["passages"]) + " ".join(figures["varied"].values())
    return [word for word in figures["words"] if word in text.lower()]


def show_passages(figures: Figures) -> tuple[Listing, ...]:
    """The passages with their places, and what the ablations vary."""
    headings = both("place", "位置"), both("the paper", "论文")
    passages = tuple((x["place"], x["phrase"]) for x in figures["passages"])
    varied = tuple(
        (both("table 3, rows {row}", "表 3，{row} 行", row=row), Sentence(what, CHINESE.get(row)))
        for row, what in figures["varied"].items()
    )
    return (Listing(both("What the paper says", "论文所说"), headings, passages + varied),)


def roles(lab: Lab) -> Figures:
    """The paper's sentences on the roles of heads."""
    return reading("roles", "far", "anaphora", "structure", words=("tense", "agreement"))


def judge_roles(figures: Figures) -> Verdict:
    """Right if tense and agreement are named."""
    named = found(figures)
    because = both(
        "the paper shows pictures of a few heads: long-distance dependencies, anaphora, sentence "
        "structure; of tense and agreement it names {named}, and it counts nothing",
        "论文只给出几个头的图：长距离依赖、指代、句子结构；时态与主谓一致两者中提到的是："
        "{named}，且没有任何统计",
        named=both("both", "两者")
        if len(named) == 2
        else both("none", "无")
        if not named
        else named[0],
    )
    return attributed(len(named) == len(figures["words"]), because)


def additive(lab: Lab) -> Figures:
    """The paper's sentences on additive attention."""
    words = ("outperforms additive", "better than additive", "additive")
    return reading("faster", "additive", "unscaled", words=words[:2])


def judge_additive(figures: Figures) -> Verdict:
    """Right if a sentence or a row says that dot product gives better results."""
    named = found(figures)
    rows = [what for what in figures["varied"].values() if "additive" in what]
    because = both(
        "section 3.2.1 calls dot product faster and smaller in practice; of quality it says that "
        "both are similar at small d_k and that additive wins over unscaled dot product at large "
        "d_k, from another paper; {rows} rows of its tables compare the two",
        "3.2.1 节说点积在实践中更快、更省空间；关于效果，它说 d_k 小时两者相近，d_k "
        "大时加性优于未缩放的点积（引自另一篇论文）；表格中比较两者的行数是 {rows}",
        rows=len(rows),
    )
    return attributed(bool(named or rows), because)


def unscaled(lab: Lab) -> Figures:
    """The paper's sentences on unscaled dot products."""
    return reading("suspects", "gradients", "unscaled", words=("unstable", "diverge", "scaling"))


def judge_unscaled(figures: Figures) -> Verdict:
    """Right if training without scaling is reported: a row of a table, or the word unstable."""
    rows = [what for what in figures["varied"].values() if "scaling" in what]
    named = [word for word in found(figures) if word != "scaling"]
    because = both(
        "the paper suspects that large dot products push softmax to small gradients (3.2.1); "
        "{rows} rows of its tables train without scaling, and it reports no instability",
        "论文只是推测大的点积会把 softmax 推到梯度极小的区域（3.2.1）；表格中不缩放训练的行数是 "
        "{rows}，也没有报告不稳定",
        rows=len(rows),
    )
    return attributed(bool(rows or named), because)


def shared_qk(lab: Lab) -> Figures:
    """Everything that the paper's ablations vary."""
    return reading(words=("shared", "sharing", "tied"))


def judge_shared_qk(figures: Figures) -> Verdict:
    """Right if a row of the tables shares Q and K; the notes name no paper that could be wrong."""
    rows = [what for what in figures["varied"].values() if any(x in what for x in figures["words"])]
    because = both(
        "the notes speak of ablations and name none; the paper of 2017 is no source for it: its "
        "table 3 varies {varied}, and {rows} of its rows share the matrices of Q and K; what was "
        "measured here is qk-shared-quality",
        "笔记只说“消融实验”，没有给出处；2017 年的论文并非其来源：表 3 改变的是 {varied}，共用 Q、"
        "K "
        "矩阵的行数是 {rows}；这里的实测见 qk-shared-quality",
        varied=Sentence(
            "; ".join(figures["varied"].values()),
            "、".join(CHINESE.get(row, what) for row, what in figures["varied"].items()),
        ),
        rows=len(rows),
    )
    return attributed(True, because) if rows else undecided(because)


CLAIMS = (
    Claim(
        id="paper-heads",
        kind="read",
        sentence=both(
            "The 2017 paper: many heads gain about 1–2 % BLEU over one.",
            "2017 年论文：多头相比单头 BLEU 提高约 1–2%。",
        ),
        notes="C",
        experiment=heads_table,
        rule=judge_heads,
        shows=show_heads,
    ),
    Claim(
        id="paper-roles",
        kind="read",
        sentence=both(
            "The 2017 paper: heads learn linguistic features such as tense and agreement.",
            "2017 年论文：不同的头学到时态、主谓一致等语言学特征。",
        ),
        notes="CE",
        experiment=roles,
        rule=judge_roles,
        shows=show_passages,
    ),
    Claim(
        id="paper-additive",
        kind="read",
        sentence=both(
            "The 2017 paper: dot product attention translates better than additive attention.",
            "2017 年论文：点积注意力的翻译效果优于加性注意力。",
        ),
        notes="C",
        experiment=additive,
        rule=judge_additive,
        shows=show_passages,
    ),
    Claim(
        id="paper-unscaled",
        kind="read",
        sentence=both(
            "The 2017 paper: without scaling, training is unstable, slower and ends worse.",
            "2017 年论文：不缩放时训练不稳定、收敛慢、最终效果下降。",
        ),
        notes="CE",
        experiment=unscaled,
        rule=judge_unscaled,
        shows=show_passages,
    ),
    Claim(
        id="paper-shared-qk",
        kind="read",
        sentence=both(
            "Ablations show that sharing the matrices of Q and K costs 1–2 % BLEU.",
            "消融实验表明，共用 Q、K 矩阵会使 BLEU 降低 1–2%。",
        ),
        notes="C",
        experiment=shared_qk,
        rule=judge_shared_qk,
        shows=show_passages,
    ),
)
