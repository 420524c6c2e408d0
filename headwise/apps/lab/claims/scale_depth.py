"""Scaling as depth and drift see it: scale-exploding, scale-layernorm."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.claims.scale_softmax import LABELS, SCALINGS, factor
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.messages import Sentence

ARRANGEMENTS = {
    "plain": both("layers without residual connections", "没有残差连接的层"),
    "residual": both("layers with residual connections", "有残差连接的层"),
    "pre-norm": both("pre-norm layers with residual connections", "有残差连接的 pre-norm 层"),
}
GAINS = (0.5, 1.0, 2.0)


def stack(x: Tensor, weights: Tensor, scaling: str, arrangement: str) -> Tensor:
    """A stack of one-head attention layers: x (n, d), weights (layers, 3, d, d) -> (n, d)."""
    d = x.shape[-1]
    for w_q, w_k, w_v in weights:
        y = torch.nn.functional.layer_norm(x, (d,)) if arrangement == "pre-norm" else x
        p = (factor(scaling, d) * (y @ w_q) @ (y @ w_k).T).softmax(-1)
        out = p @ (y @ w_v)
        x = out if arrangement == "plain" else x + out
    return x


def growth(lab: Lab) -> Figures:
    """‖∂loss/∂x‖ at the input over that at the output, through 1 to 16 layers, several starts."""
    tokens, d = 32, lab.pick("d_k", tiny=32, quick=64, full=256)
    depths = lab.pick("depths", tiny=(1, 4), quick=(1, 2, 4, 8, 16))
    found = []
    for arrangement in ARRANGEMENTS:
        for gain in lab.each(GAINS, f"{arrangement}, gain"):
            for depth in depths:
                row = {"arrangement": arrangement, "gain": gain, "depth": depth}
                for scaling in SCALINGS:
                    ratios = []
                    for draw in range(lab.pick("draws", tiny=2, quick=5, full=20)):
                        x = lab.normal(tokens, d, stream=3 * draw).requires_grad_()
                        weights = lab.normal(depth, 3, d, d, stream=3 * draw + 1)
                        out = stack(x, gain * weights / math.sqrt(d), scaling, arrangement)
                        asked = lab.normal(tokens, d, stream=3 * draw + 2)
                        (gradient,) = torch.autograd.grad((out * asked).sum(), x)
                        ratios.append(float(gradient.norm() / asked.norm()))
                    row[scaling] = sorted(ratios)[len(ratios) // 2]
                found.append(row)
    return {"d": d, "tokens": tokens, "rows": found}


def judge_exploding(figures: Figures) -> Verdict:
    """Exploded: at the greatest depth over a thousand, and over a hundred times the scaled one."""
    depth = max(row["depth"] for row in figures["rows"])
    deepest = [row for row in figures["rows"] if row["depth"] == depth]
    exploded = [
        row for row in deepest if row["unscaled"] > 1e3 and row["unscaled"] > 1e2 * row["scaled"]
    ]
    worst = max(deepest, key=lambda row: row["unscaled"] / row["scaled"])
    because = both(
        "through {depth} layers the gradient grows more than a thousandfold, and a hundred times "
        "as much as with scaling, in {count} of {all} cases; the largest difference is in "
        "{arrangement}, gain {gain}: {unscaled:.2g}-fold unscaled, {scaled:.2g}-fold scaled",
        "经过 {depth} 层，{all} 种情形中有 {count} 种的梯度增大千倍以上且是缩放时的百倍以上；"
        "差别最大的是{arrangement}，增益 {gain}：不缩放 {unscaled:.2g} 倍，缩放 {scaled:.2g} 倍",
        depth=depth,
        count=len(exploded),
        all=len(deepest),
        arrangement=ARRANGEMENTS[worst["arrangement"]],
        gain=worst["gain"],
        unscaled=worst["unscaled"],
        scaled=worst["scaled"],
    )
    if not exploded:
        return does_not_hold(because)
    kinds = [name for name in ARRANGEMENTS if any(row["arrangement"] == name for row in exploded)]
    if len(kinds) == len(ARRANGEMENTS):
        return holds(because)
    gains = {
        name: [row["gain"] for row in exploded if row["arrangement"] == name] for name in kinds
    }
    listed = [
        both(
            "{name} at gain {gains}",
            "{name}（增益 {gains}）",
            name=ARRANGEMENTS[name],
            gains=" / ".join(map(str, gains[name])),
        )
        for name in kinds
    ]
    condition = both(
        "the stack has residual connections and its weights are not small; it did here in {listed}",
        "层之间有残差连接且权重不小；这里出现在{listed}",
        listed=Sentence("; ".join(listed), "；".join(x.zh for x in listed)),
    )
    return holds_when(condition, because)


def show_exploding(figures: Figures) -> tuple[Chart, ...]:
    """The gradient against depth, one chart per arrangement."""

    def chart(arrangement: str) -> Chart:
        rows: dict[int, dict[str, float]] = {}
        for row in figures["rows"]:
            if row["arrangement"] == arrangement:
                mine = rows.setdefault(row["depth"], {"depth": row["depth"]})
                mine |= {f"{x}{row['gain']}": row[x] for x in SCALINGS}
        lines = [
            (f"{x}{gain}", both(f"{LABELS[x]}, gain {gain}", f"{LABELS[x]}，增益 {gain}"))
            for x in SCALINGS
            for gain in GAINS
        ]
        curves = series(list(rows.values()), "depth", *lines)
        depth, title = both("layers", "层数"), ARRANGEMENTS[arrangement]
        return Chart(title, depth, both("gradient", "梯度"), curves, log_x=True, log_y=True)

    return tuple(chart(arrangement) for arrangement in ARRANGEMENTS)


def drift(lab: Lab) -> Figures:
    """The logits' deviation and the largest weight while q and k grow, for two ways to scale."""
    d, rows, keys = 64, lab.pick("rows", tiny=64, quick=1024), 64
    q, k = lab.normal(rows, d, stream=1), lab.normal(keys, d, stream=2)
    found = []
    for growth_of_q_and_k in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0):
        row: dict[str, float] = {"growth": growth_of_q_and_k}
        for way in ("constant", "normed"):
            a, b = growth_of_q_and_k * q, growth_of_q_and_k * k
            if way == "normed":  # QK-norm: each vector is brought to length √d
                a, b = rms_normed(a), rms_normed(b)
            logits = a @ b.T / math.sqrt(d)
            row[f"{way}_deviation"] = float(logits.std())
            row[f"{way}_top"] = float(logits.softmax(-1).max(-1).values.mean())
        found.append(row)
    return {"d": d, "keys": keys, "rows": found}


def rms_normed(x: Tensor) -> Tensor:
    """Vectors (..., d) of root mean square one."""
    return x / x.square().mean(-1, keepdim=True).sqrt()


def judge_layernorm(figures: Figures) -> Verdict:
    """A dynamic normalisation keeps the logits' deviation while its inputs grow."""
    rows = figures["rows"]

    def change(way: str) -> float:
        values = [row[f"{way}_deviation"] for row in rows]
        return float(max(values) / min(values))

    because = both(
        "while q and k grow {grown:.0f}-fold the deviation of q·k/√d_k changes "
        "{constant:,.0f}-fold and that of normed q and k (QK-norm) {normed:.2f}-fold",
        "q 与 k 增大 {grown:.0f} 倍时，q·k/√d_k 的标准差变化 {constant:,.0f} 倍，归一化后的 q 与 "
        "k（QK-norm）变化 {normed:.2f} 倍",
        grown=rows[-1]["growth"] / rows[0]["growth"],
        constant=change("constant"),
        normed=change("normed"),
    )
    return holds(because) if change("constant") < 1.1 else does_not_hold(because)


def show_layernorm(figures: Figures) -> tuple[Chart, ...]:
    """The logits' deviation against the growth of q and k."""
    curves = series(
        figures["rows"],
        "growth",
        ("constant_deviation", both("divided by √d_k", "除以 √d_k")),
        ("normed_deviation", both("QK-norm", "QK-norm")),
    )
    return (
        Chart(
            both("Deviation of the logits while q and k grow", "q、k 增大时 logit 的标准差"),
            both("factor on q and k", "q 与 k 的倍数"),
            both("deviation", "标准差"),
            curves,
            log_x=True,
            log_y=True,
        ),
    )


CLAIMS = (
    Claim(
        id="scale-exploding",
        sentence=both(
            "Without scaling, gradients may also explode.",
            "不缩放时，梯度也可能爆炸。",
        ),
        notes="CD",
        experiment=growth,
        rule=judge_exploding,
        shows=show_exploding,
        moves=(
            Move("layers", both("layers", "层数"), "depth"),
            Move("stack", both("stack", "结构"), "arrangement", how="only"),
            Move("gain", both("gain", "增益"), "gain", how="only"),
        ),
    ),
    Claim(
        id="scale-layernorm",
        kind="derived",
        sentence=both(
            "Dividing by √d_k is a simple dynamic normalisation, like BatchNorm or LayerNorm.",
            "除以 √d_k 类似批归一化或层归一化，是动态调整特征分布的简单方法。",
        ),
        notes="A",
        experiment=drift,
        rule=judge_layernorm,
        shows=show_layernorm,
        moves=(Move("growth", both("factor on q and k", "q 与 k 的倍数"), "growth", needs=2),),
        derivation=both(
            "LayerNorm divides by what it measures: LN(c·x) = LN(x). The constant 1/√d_k divides "
            "by what is assumed: (c·q)·(c·k)/√d_k = c²·q·k/√d_k, so every growth of q and k stays.",
            "LayerNorm 除以它实际测得的量：LN(c·x) = LN(x)。常数 1/√d_k 除以的是假设的量："
            "(c·q)·(c·k)/√d_k = c²·q·k/√d_k，q 与 k 的增大全部保留。",
        ),
    ),
)
