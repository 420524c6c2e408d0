"""Whether weights tell what a prediction depends on: heads-explain."""

from __future__ import annotations

import torch

from headwise.apps.lab.charts import Chart, Listing, Series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, undecided
from headwise.apps.lab.experiments.edge_effects import MEASURES, SHARES, Subject, compared
from headwise.apps.lab.laboratory import Lab
from headwise.models import GPT
from headwise.models.trained import load

TEXTS = (
    "Anarchism is a political philosophy. Many anarchists say that anarchism is a political",
    "The Northern Crown is a small constellation in the northern sky. Its brightest star was named "
    "by the Greeks. The Northern",
    "one two three four one two three four one two three",
)

NAMES = {
    "effect": both("effect", "效应"),
    "weight": both("weight", "权重"),
    "gradient × weight": both("gradient × weight", "梯度 × 权重"),
    "rollout": both("rollout", "注意力展开"),
    "random": both("random", "随机"),
}


def explain(lab: Lab) -> Figures:
    """Hide edges of the built-in GPT one at a time, and of one that has learned nothing."""
    trained = load("gpt", lab.device)
    torch.manual_seed(0)
    fresh = GPT(trained.model.config).to(lab.device).eval()
    texts = TEXTS[: lab.pick(tiny=1, quick=len(TEXTS))]
    drawn, rows = lab.pick(tiny=12, quick=60, full=400), []
    for name, model, text in [
        *(("trained", trained.model, text) for text in texts),
        ("untrained", fresh, texts[0]),
    ]:
        ids = trained.encode(text)
        found = compared(Subject(name, model, lambda m=model, x=ids: m(x)[0, -1]), drawn)  # type: ignore[misc]
        rows.append({key: found[key] for key in ("subject", "probability", "spearman", "pearson")})
        rows[-1]["hidden"] = found["hidden"]
    return {"rows": rows, "shares": list(SHARES), "edges": drawn}


def judge(figures: Figures) -> Verdict:
    """Weights must rank edges as hiding them does; the trained texts count."""
    rows = [row for row in figures["rows"] if row["subject"] == "trained"]
    weight, effect = (
        sum(row["spearman"][name] for row in rows) / len(rows) for name in ("weight", "effect")
    )
    because = both(
        "over {edges} edges of each text, the ranks of what hiding an edge changes correlate "
        "{weight:.2f} with its weight and {effect:.2f} with its effect from one backward pass",
        "在每段文字的 {edges} 条边上，遮住一条边带来的改变，其名次与权重的相关为 {weight:.2f}，"
        "与一次反向传播给出的效应的相关为 {effect:.2f}",
        edges=figures["edges"],
        weight=weight,
        effect=effect,
    )
    if weight > 0.8:
        return holds(because)
    return does_not_hold(because) if weight < 0.6 and effect > weight + 0.2 else undecided(because)


def show(figures: Figures) -> tuple[Listing | Chart, ...]:
    """The correlations, and what is left of the first text's answer as edges are hidden."""
    headings = (
        both("model", "模型"),
        both("sure of its answer", "对答案的把握"),
        *(NAMES[name] for name in MEASURES),
    )
    names = {"trained": both("trained", "训练后"), "untrained": both("untrained", "未训练")}
    rows = tuple(
        (names[row["subject"]], row["probability"], *(row["spearman"][name] for name in MEASURES))
        for row in figures["rows"]
    )
    title = both("Rank correlation with the real change", "与真实改变的秩相关")
    curves = tuple(
        Series(NAMES[name], figures["shares"], left)
        for name, left in figures["rows"][0]["hidden"].items()
    )
    chart = Chart(
        both("Logit difference left, first text", "第一段文字剩下的 logit 差"),
        both("edges hidden", "遮住的边"),
        both("logit difference", "logit 差"),
        curves,
    )
    return (Listing(title, headings, rows), chart)


CLAIMS = (
    Claim(
        id="heads-explain",
        sentence=both(
            "The attention weights show which tokens a prediction depends on.",
            "注意力权重显示预测依赖哪些词元。",
        ),
        notes="F",
        experiment=explain,
        rule=judge,
        shows=show,
        derivation=both(
            "Hiding key j from row i and renormalising changes the row's output by exactly "
            "p/(1 − p) · (out − v_j): a heavy edge whose value is the average changes nothing.",
            "对第 i 行遮住键 j 并重新归一化，该行的输出恰好改变 p/(1 − p) · (out − v_j)："
            "一条很重的边，若其值等于平均值，就什么也不改变。",
        ),
    ),
)
