"""Softmax over unscaled scores: scale-saturation, scale-gradient, scale-range."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise import watch
from headwise.apps.lab.charts import Chart, Listing, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.experiments.why_scale import jacobian_norm
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.models.trained import load

SCALINGS = ("unscaled", "scaled")
LABELS = {
    "unscaled": both("q·k", "q·k"),
    "scaled": both("q·k/√d_k", "q·k/√d_k"),
}


def factor(scaling: str, d: int) -> float:
    """The factor on the dot products."""
    return 1 / math.sqrt(d) if scaling == "scaled" else 1.0


def weights_of(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """softmax(scale · q kᵀ): q (rows, d), k (keys, d) -> (rows, keys)."""
    return (scale * (q @ k.T)).softmax(-1)


def saturation(lab: Lab) -> Figures:
    """The largest weight and the entropy of rows, against d_k and the number of keys."""
    rows = lab.pick("rows", tiny=64, quick=256, full=2048)
    widths = lab.pick("d_k", tiny=(4, 1024), quick=(1, 4, 16, 64, 256, 1024, 4096))
    found = []
    for d in lab.each(widths, "d_k"):
        for keys in lab.pick("keys", tiny=(64,), quick=(16, 64, 256, 1024)):
            q, k = lab.normal(rows, d, stream=1), lab.normal(keys, d, stream=2)
            for scaling in SCALINGS:
                p = weights_of(q, k, factor(scaling, d))
                entropy = -torch.special.xlogy(p, p).sum(-1)
                top = float(p.max(-1).values.mean())
                share = float(entropy.mean()) / math.log(keys)  # 1 for equal weights
                found.append(
                    {"d": d, "keys": keys, "scaling": scaling, "top": top, "entropy": share}
                )
    return {"rows": found}


def judge_saturation(figures: Figures) -> Verdict:
    """At the widest head nearly all weight must be on one key, and more than at the narrowest."""
    rows = figures["rows"]
    widths = sorted({row["d"] for row in rows})

    def tops(scaling: str, d: int) -> list[float]:
        return sorted(x["top"] for x in rows if x["d"] == d and x["scaling"] == scaling)

    wide, narrow = tops("unscaled", widths[-1]), tops("unscaled", widths[0])
    scaled = tops("scaled", widths[-1])
    because = both(
        "the largest weight of a row is on average {wide[0]:.3f} to {wide[1]:.3f} at d_k = {d} "
        "without scaling, depending on the number of keys, and {narrow[0]:.3f} to {narrow[1]:.3f} "
        "at d_k = {first}; with scaling it is {scaled[0]:.3f} to {scaled[1]:.3f} at d_k = {d}",
        "不缩放时，每行最大权重的均值在 d_k = {d} 处为 {wide[0]:.3f} 至 {wide[1]:.3f}"
        "（因键数而异），在 d_k = {first} 处为 {narrow[0]:.3f} 至 {narrow[1]:.3f}；缩放后，"
        "d_k = {d} 处为 {scaled[0]:.3f} 至 {scaled[1]:.3f}",
        d=widths[-1],
        first=widths[0],
        wide=(wide[0], wide[-1]),
        narrow=(narrow[0], narrow[-1]),
        scaled=(scaled[0], scaled[-1]),
    )
    grows = wide[0] > 0.85 and wide[0] > narrow[0] + 0.2
    return holds(because) if grows else does_not_hold(because)


def show_saturation(figures: Figures) -> tuple[Chart, ...]:
    """Largest weight and entropy against width, at the most keys."""
    keys = max(row["keys"] for row in figures["rows"])

    def chart(name: str, title: tuple[str, str]) -> Chart:
        of = {
            scaling: [
                row | {scaling: row[name]}
                for row in figures["rows"]
                if row["scaling"] == scaling and row["keys"] == keys
            ]
            for scaling in SCALINGS
        }
        curves = [series(of[x], "d", (x, LABELS[x]))[0] for x in SCALINGS]
        heading = both(f"{title[0]}, {{keys}} keys", f"{title[1]}，{{keys}} 个键", keys=keys)
        return Chart(heading, both("d_k", "d_k"), both(*title), tuple(curves), log_x=True)

    return (
        chart("top", ("largest weight", "最大权重")),
        chart("entropy", ("entropy / log(keys)", "熵 / log(键数)")),
    )


def gradients(lab: Lab) -> Figures:
    """The norm of the softmax Jacobian of typical rows, and of ∂loss/∂W_q, against d_k."""
    tokens = lab.pick("tokens", tiny=32, quick=64, full=256)
    found = []
    for d in lab.each(lab.pick("d_k", tiny=(16, 1024), quick=(4, 16, 64, 256, 1024, 2048)), "d_k"):
        row: dict[str, float] = {"d": d}
        x = lab.normal(tokens, d, stream=1)
        w_q, w_k = (lab.normal(d, d, stream=s) / math.sqrt(d) for s in (2, 3))  # so q, k ~ N(0, 1)
        v, asked = (lab.normal(tokens, 16, stream=s) for s in (4, 5))
        for scaling in SCALINGS:
            w = w_q.clone().requires_grad_()
            p = weights_of(x @ w, x @ w_k, factor(scaling, d))
            (gradient,) = torch.autograd.grad((p @ v * asked).sum(), w)
            row[f"jacobian_{scaling}"] = float(jacobian_norm(p.detach()).median())
            row[f"query_{scaling}"] = float(gradient.norm())
        found.append(row)
    return {"tokens": tokens, "rows": found}


def judge_gradient(figures: Figures) -> Verdict:
    """Vanished: under a hundredth of what the scaled scores let through, at the widest head."""
    last = figures["rows"][-1]
    jacobian = last["jacobian_unscaled"] / last["jacobian_scaled"]
    query = last["query_unscaled"] / last["query_scaled"]
    because = both(
        "at d_k = {d} the softmax Jacobian of the median row has {jacobian:.2g} of its norm "
        "under scaling, and ∂loss/∂W_q, over all rows, {query:.2g} of its norm",
        "d_k = {d} 时，不缩放的中位行的 softmax 雅可比范数是缩放时的 {jacobian:.2g} 倍，"
        "所有行合计的 ∂loss/∂W_q 范数是缩放时的 {query:.2g} 倍",
        d=last["d"],
        jacobian=jacobian,
        query=query,
    )
    if jacobian >= 0.01:
        return does_not_hold(because)
    if query < 0.01:
        return holds(because)
    condition = both(
        "the gradient of a typical row is meant; the few rows in which two keys still compete "
        "get a gradient √d_k times as large as under scaling, and keep ∂loss/∂W_q from vanishing",
        "指的是典型的一行；少数仍有两个键在竞争的行，其梯度是缩放时的 √d_k 倍，使 ∂loss/∂W_q "
        "不致消失",
    )
    return holds_when(condition, because)


def show_gradient(figures: Figures) -> tuple[Chart, ...]:
    """Both norms against the width."""

    def chart(name: str, title: tuple[str, str]) -> Chart:
        curves = series(figures["rows"], "d", *((f"{name}_{x}", LABELS[x]) for x in SCALINGS))
        norm = both("norm", "范数")
        return Chart(both(*title), both("d_k", "d_k"), norm, curves, log_x=True, log_y=True)

    return (
        chart("jacobian", ("softmax Jacobian, median row", "softmax 雅可比，中位行")),
        chart("query", ("∂loss/∂W_q, all rows", "∂loss/∂W_q，所有行")),
    )


def ranges(lab: Lab) -> Figures:
    """Shift scores, squeeze them into [0, 1], and look where a trained model's logits lie."""
    keys = 64
    scores = lab.normal(lab.pick("rows", tiny=64, quick=1024), keys, stream=1)
    before = scores.softmax(-1)
    shifts = (-1000.0, -10.0, 10.0, 1000.0)
    changes = [float(((scores + shift).softmax(-1) - before).abs().max()) for shift in shifts]
    low, high = scores.min(-1, True).values, scores.max(-1, True).values
    squeezed = ((scores - low) / (high - low)).softmax(-1)
    gpt = load("gpt", lab.device)
    tokens = gpt.encode("A softmax takes any numbers and returns weights that sum to one.")
    with torch.no_grad(), watch(gpt.model, stats=("max_logit", "top_prob")) as seen:
        gpt.model(tokens)
    heads = list(seen.heads())
    return {
        "keys": keys,
        "shifts": shifts,
        "shift_changes": changes,
        "top": float(before.max(-1).values.mean()),
        "squeezed_top": float(squeezed.max(-1).values.mean()),
        "squeezed_limit": math.e / (math.e + keys - 1),
        "heads": len(heads),
        "heads_outside": sum(float(row["max_logit_max"]) > 1 for row in heads),
        "trained_logit": max(float(row["max_logit_max"]) for row in heads),
    }


def judge_range(figures: Figures) -> Verdict:
    """If a shift by 1000 changes no weight, softmax does not ask for a range."""
    change = max(figures["shift_changes"])
    because = both(
        "adding −1000 to 1000 to all scores changes no weight by more than {change:.1g}; "
        "{outside} of {heads} heads of a trained model use logits above 1 (up to {logit:.0f}); "
        "squeezed into [0, 1] the largest of {keys} weights falls from {top:.2f} to "
        "{squeezed:.3f} and can't exceed {limit:.3f}",
        "给所有分数加上 −1000 到 1000，权重的变化不超过 {change:.1g}；训练好的模型的 {heads} "
        "个头中有 {outside} 个用到大于 1 的 logit（最大 {logit:.0f}）；压缩到 [0, 1] 后，{keys} "
        "个权重中最大的从 {top:.2f} 降到 {squeezed:.3f}，且不可能超过 {limit:.3f}",
        change=change,
        outside=figures["heads_outside"],
        heads=figures["heads"],
        logit=figures["trained_logit"],
        keys=figures["keys"],
        top=figures["top"],
        squeezed=figures["squeezed_top"],
        limit=figures["squeezed_limit"],
    )
    needed = change > 1e-6 or figures["heads_outside"] == 0
    return holds(because) if needed else does_not_hold(because)


def show_range(figures: Figures) -> tuple[Listing, ...]:
    """The change of the weights for each shift."""
    pairs = tuple(zip(figures["shifts"], figures["shift_changes"], strict=True))
    headings = both("added to every score", "加到每个分数上"), both("largest change", "最大变化")
    return (Listing(both("A shift of the scores", "分数的平移"), headings, pairs),)


CLAIMS = (
    Claim(
        id="scale-saturation",
        kind="derived",
        sentence=both(
            "Without scaling, softmax tends to a one-hot vector as d_k grows.",
            "不缩放时，随着 d_k 增大，softmax 的输出趋向 one-hot。",
        ),
        notes="ACD",
        experiment=saturation,
        rule=judge_saturation,
        shows=show_saturation,
        moves=(
            Move("d_k", both("d_k"), "d"),
            Move("keys", both("keys", "键数"), "keys", how="only"),
        ),
        derivation=both(
            "The ratio of two weights is exp(s_a − s_b). Unscaled, s_a − s_b has deviation √(2 "
            "d_k), so the ratio of the two largest weights grows as exp(c·√d_k) and the largest "
            "weight tends to one. Scaled, the deviation is √2 at every width.",
            "两个权重之比是 exp(s_a − s_b)。不缩放时 s_a − s_b 的标准差是 √(2 d_k)，"
            "最大两个权重之比按 exp(c·√d_k) 增长，最大权重趋于 1。缩放后，任何宽度下标准差都是 "
            "√2。",
        ),
    ),
    Claim(
        id="scale-gradient",
        sentence=both(
            "Saturation makes the gradient of softmax vanish.",
            "softmax 饱和会使梯度消失。",
        ),
        notes="ACD",
        experiment=gradients,
        rule=judge_gradient,
        shows=show_gradient,
        moves=(Move("d_k", both("d_k"), "d"),),
        derivation=both(
            "∂p_i/∂s_j = p_i (δ_ij − p_j). For a one-hot p every entry is 0. For p = (1 − ε, ε, "
            "0, …) the norm is about 2ε, and ε falls as exp(−c·√d_k) in a typical row. The "
            "gradient of a score is multiplied by the scale on its way to W_q: 1 unscaled, "
            "1/√d_k scaled.",
            "∂p_i/∂s_j = p_i (δ_ij − p_j)。p 为 one-hot 时各项都是 0；p = (1 − ε, ε, 0, …) "
            "时范数约为 2ε，而典型的一行里 ε 按 exp(−c·√d_k) 下降。分数的梯度传到 W_q "
            "时还要乘以缩放因子：不缩放是 1，缩放是 1/√d_k。",
        ),
    ),
    Claim(
        id="scale-range",
        kind="derived",
        sentence=both(
            "Scores must lie in a range such as 0 to 1 for softmax to model probabilities.",
            "注意力分数须限制在 0 到 1 之类的范围内，softmax 才能很好地建模概率分布。",
        ),
        notes="D",
        experiment=ranges,
        rule=judge_range,
        shows=show_range,
        derivation=both(
            "softmax(s + c) = e^c e^s / Σ e^c e^s = softmax(s): only differences count. Scores "
            "in [0, 1] differ by at most 1, so no weight exceeds e / (e + n − 1).",
            "softmax(s + c) = e^c e^s / Σ e^c e^s = softmax(s)：只有差值起作用。[0, 1] "
            "内的分数至多相差 1，因此任何权重都不超过 e / (e + n − 1)。",
        ),
    ),
)
