"""The size of q·k: scale-variance, scale-sigma, scale-magnitude."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise import watch
from headwise.apps.lab.charts import Chart, Listing, Series, series
from headwise.apps.lab.claim import (
    Claim,
    Figures,
    Verdict,
    both,
    does_not_hold,
    holds,
    holds_when,
)
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.models.trained import load

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SIGMAS = (0.25, 0.5, 1.0, 2.0, 4.0)
BAND = 4
"""Standard errors to each side of an estimate: chance alone leaves the band once in 16,000."""


def dots(lab: Lab, d: int, pairs: int, sigma_q: float = 1.0, sigma_k: float = 1.0) -> Tensor:
    """q·k of independent pairs (pairs,), the entries of q and k being N(0, σ²)."""
    together = max(1, 2**21 // d)  # so that wide vectors fit into memory
    parts = []
    for first in range(0, pairs, together):
        count = min(together, pairs - first)
        q, k = lab.normal(2, count, d, stream=d * pairs + first)  # (count, d) each
        parts.append((sigma_q * q * sigma_k * k).sum(-1))
    return torch.cat(parts)


def variance_error(values: Tensor) -> float:
    """The standard error of the variance of independent values (n,): √((m₄ − m₂²) / n)."""
    centred = values - values.mean()
    fourth, second = centred.pow(4).mean(), centred.square().mean()
    return float(((fourth - second.square()) / len(values)).sqrt())


def variances(lab: Lab) -> Figures:
    """Mean and variance of q·k for growing widths, and the variance in a trained model's heads."""
    pairs = lab.pick("pairs", tiny=2000, quick=20_000, full=400_000)
    widths = WIDTHS[:: lab.pick(tiny=5, quick=1)]
    rows = []
    for d in lab.each(widths, "d_k"):
        products = dots(lab, d, pairs)
        scaled = products / math.sqrt(d)
        rows.append(
            {
                "d": d,
                "mean": float(products.mean()),
                "mean_error": float(products.std()) / math.sqrt(pairs),
                "variance": float(products.var()),
                "variance_error": variance_error(products),
                "scaled_variance": float(scaled.var()),
                "scaled_error": variance_error(scaled),
            }
        )
    return {"pairs": pairs, "rows": rows, "trained": trained_variances(lab)}


def trained_variances(lab: Lab) -> list[float]:
    """The variance of the scaled logits of each head of the built-in GPT, on a text."""
    gpt = load("gpt", lab.device)
    text = "The variance of a dot product is the sum of the variances of its terms, if they are "
    tokens = gpt.encode(text * lab.pick(tiny=1, quick=8))
    with torch.no_grad(), watch(gpt.model, stats=("logit_var",)) as seen:
        gpt.model(tokens)
    return sorted(float(row["logit_var_mean"]) for row in seen.heads())


def judge_variance(figures: Figures) -> Verdict:
    """Every estimate must have theory's value in its band."""
    rows, trained = figures["rows"], figures["trained"]
    wrong = [
        row["d"]
        for row in rows
        if abs(row["mean"]) > BAND * row["mean_error"]
        or abs(row["variance"] - row["d"]) > BAND * row["variance_error"]
        or abs(row["scaled_variance"] - 1) > BAND * row["scaled_error"]
    ]
    ratios = [row["variance"] / row["d"] for row in rows]
    if wrong:
        return does_not_hold(
            both(
                "at d_k = {d} mean or variance leave the band around theory's value; "
                "Var(q·k)/d_k lies between {low:.3f} and {high:.3f}",
                "在 d_k = {d} 处，均值或方差超出了理论值的误差带；Var(q·k)/d_k 在 {low:.3f} 与 "
                "{high:.3f} 之间",
                d=wrong[0],
                low=min(ratios),
                high=max(ratios),
            )
        )
    return holds(
        both(
            "Var(q·k)/d_k lies between {low:.3f} and {high:.3f} for d_k = {first} to {last}, 1 "
            "within its error; in trained heads the entries are neither independent nor of "
            "variance "
            "one: the variance of their scaled logits is {least:.2f} to {most:.1f}",
            "d_k 从 {first} 到 {last} 时，Var(q·k)/d_k 在 {low:.3f} 与 {high:.3f} 之间，"
            "误差之内等于 1；训练好的头并不满足独立、方差为 1 的假设：缩放后的 logit 方差从 "
            "{least:.2f} 到 {most:.1f}",
            low=min(ratios),
            high=max(ratios),
            first=rows[0]["d"],
            last=rows[-1]["d"],
            least=min(trained),
            most=max(trained),
        )
    )


def show_variance(figures: Figures) -> tuple[Chart, ...]:
    """Variance against width, scaled and not, beside theory."""
    rows = [
        row
        | {
            f"{name}_{end}": row[name] + sign * BAND * row[error]
            for name, error in (("variance", "variance_error"), ("scaled_variance", "scaled_error"))
            for end, sign in (("low", -1), ("high", 1))
        }
        for row in figures["rows"]
    ]
    curves = series(
        rows,
        "d",
        ("variance", both("q·k, measured", "q·k，实测")),
        ("scaled_variance", both("q·k/√d_k, measured", "q·k/√d_k，实测")),
        ("d", both("d_k, theory", "d_k，理论")),
    )
    title = both("Variance of the dot product", "点积的方差")
    width, variance = both("d_k", "d_k"), both("variance", "方差")
    return (Chart(title, width, variance, curves, log_x=True, log_y=True),)


def sigmas(lab: Lab) -> Figures:
    """Var(q·k)/d_k against σ: of both vectors, and of the queries alone."""
    d, pairs = 64, lab.pick("pairs", tiny=4000, quick=40_000, full=1_000_000)
    of_both, of_one = (
        [float(dots(lab, d, pairs, sigma, sigma if two else 1.0).var()) / d for sigma in SIGMAS]
        for two in (True, False)
    )
    return {
        "d": d,
        "sigmas": SIGMAS,
        "both": of_both,
        "one": of_one,
        "both_power": slope(SIGMAS, of_both),
        "one_power": slope(SIGMAS, of_one),
    }


def judge_sigma(figures: Figures) -> Verdict:
    """The exponent of σ in the variance says which formula is right."""
    two, one = figures["both_power"], figures["one_power"]
    because = both(
        "Var(q·k) grows with σ to the power {two:.2f} when q and k both have variance σ², and to "
        "the power {one:.2f} when only one of them has",
        "q 与 k 的方差都是 σ² 时，Var(q·k) 随 σ 的 {two:.2f} 次方增长；只有一方是 σ² 时，随 "
        "{one:.2f} 次方增长",
        two=two,
        one=one,
    )
    if abs(two - 2) < 0.1:
        return holds(because)
    if abs(two - 4) < 0.1 and abs(one - 2) < 0.1:
        condition = both(
            "only one of q and k has variance σ² and the other has variance 1, as for σ = 1; "
            "with σ² in both it is d_k·σ⁴",
            "q 与 k 只有一方的方差是 σ²，另一方是 1（σ = 1 时也成立）；两者都是 σ² 时应为 d_k·σ⁴",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_sigma(figures: Figures) -> tuple[Chart, ...]:
    """Var(q·k)/d_k against σ."""
    return (
        Chart(
            both("Var(q·k) / d_k at d_k = {d}", "d_k = {d} 时的 Var(q·k) / d_k", d=figures["d"]),
            both("σ", "σ"),
            both("Var(q·k) / d_k", "Var(q·k) / d_k"),
            tuple(
                Series(both(english, chinese), figures["sigmas"], figures[name])
                for name, english, chinese in (
                    ("both", "σ² in q and k", "q 与 k 都是 σ²"),
                    ("one", "σ² in q alone", "只有 q 是 σ²"),
                )
            ),
            log_x=True,
            log_y=True,
        ),
    )


def magnitudes(lab: Lab) -> Figures:
    """The size of q·k at d_k = 512: typical, rare and largest, before and after the division."""
    d = lab.pick("d_k", tiny=512, quick=512)
    pairs = lab.pick("pairs", tiny=4000, quick=100_000, full=4_000_000)
    size = dots(lab, d, pairs).abs()
    k = lab.normal(1000, d, stream=1)
    return {
        "d": d,
        "pairs": pairs,
        "root_mean_square": float(size.square().mean().sqrt()),
        "median": float(size.median()),
        "one_in_1000": float(size.kthvalue(math.ceil(0.999 * pairs)).values),
        "largest": float(size.max()),
        "parallel": float(k.square().sum(-1).mean()),  # a query that points as its key does
    }


def judge_magnitude(figures: Figures) -> Verdict:
    """The typical size, or the largest possible one, must be within a factor of two of 512."""
    d, size = figures["d"], figures["root_mean_square"]
    root = math.sqrt(d)
    because = both(
        "at d_k = {d} a dot product is typically {size:.1f} (root mean square), one in a "
        "thousand exceeds {rare:.0f} and the largest of {pairs:,} is {largest:.0f}; a query that "
        "points as its key does gives {parallel:.0f}, the most that Cauchy and Schwarz allow for "
        "such lengths; divided by {root:.1f} they are {scaled:.2f} and {bound:.1f}",
        "d_k = {d} 时点积的典型大小是 {size:.1f}（均方根），千分之一超过 {rare:.0f}，{pairs:,} "
        "个中最大的是 {largest:.0f}；查询与键同向时是 {parallel:.0f}，"
        "即这样的长度下柯西–施瓦茨不等式"
        "允许的最大值；除以 {root:.1f} 之后分别是 {scaled:.2f} 与 {bound:.1f}",
        d=d,
        size=size,
        rare=figures["one_in_1000"],
        pairs=figures["pairs"],
        largest=figures["largest"],
        parallel=figures["parallel"],
        root=root,
        scaled=size / root,
        bound=figures["parallel"] / root,
    )
    said, after = float(d), root
    if 0.5 < size / said < 2 and 0.5 < size / root / after < 2:
        return holds(because)
    if 0.5 < figures["parallel"] / said < 2:
        condition = both(
            "“can reach” is meant as a bound: it takes a key that points as its query does; of "
            "unrelated ones the size is √d_k before and 1 after",
            "“可能会达到”指的是上界：键与查询同向时才会达到；互不相关时，之前是 √d_k，之后是 1",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_magnitude(figures: Figures) -> tuple[Listing, ...]:
    """The sizes before and after, beside what is said."""
    root = math.sqrt(figures["d"])
    names = (
        ("median", both("half are below", "一半小于")),
        ("root_mean_square", both("root mean square", "均方根")),
        ("one_in_1000", both("one in 1000 is above", "千分之一大于")),
        ("largest", both("largest", "最大")),
        ("parallel", both("of parallel vectors", "同向时")),
    )
    rows = tuple((label, figures[name], figures[name] / root) for name, label in names)
    return (
        Listing(
            both("|q·k| at d_k = {d}", "d_k = {d} 时的 |q·k|", d=figures["d"]),
            (both("size", "大小"), both("|q·k|", "|q·k|"), both("|q·k| / √d_k", "|q·k| / √d_k")),
            (*rows, (both("as said", "笔记所说"), 512.0, 22.0)),
        ),
    )


CLAIMS = (
    Claim(
        id="scale-variance",
        kind="derived",
        sentence=both(
            "If the entries of q and k are independent N(0, 1), then q·k has mean 0, variance "
            "d_k and deviation √d_k; divided by √d_k it has variance 1.",
            "若 q、k 的分量独立且服从 N(0, 1)，则 q·k 的均值为 0、方差为 d_k、标准差为 √d_k；"
            "除以 √d_k 后方差为 1。",
        ),
        notes="ACD",
        experiment=variances,
        rule=judge_variance,
        shows=show_variance,
        moves=(Move("d_k", both("d_k"), "d"),),
        derivation=both(
            "E[q_i k_i] = E[q_i] E[k_i] = 0 and Var(q_i k_i) = E[q_i²] E[k_i²] − 0 = 1, because "
            "q_i and k_i are independent. The d_k terms of q·k = Σ q_i k_i are independent too, "
            "so their variances add up: Var(q·k) = d_k. Var(c·X) = c² Var(X) with c = 1/√d_k "
            "gives 1.",
            "q_i 与 k_i 独立，故 E[q_i k_i] = E[q_i] E[k_i] = 0，Var(q_i k_i) = E[q_i²] E[k_i²] "
            "− 0 = 1。q·k = Σ q_i k_i 的 d_k 项也相互独立，方差相加：Var(q·k) = d_k。由 Var(c·X) "
            "= c² Var(X)，取 c = 1/√d_k，得 1。",
        ),
    ),
    Claim(
        id="scale-sigma",
        kind="derived",
        sentence=both(
            "If the inputs have variance σ², the variance of q·k is d_k·σ².",
            "若输入的方差为 σ²，则 q·k 的方差为 d_k·σ²。",
        ),
        notes="D",
        experiment=sigmas,
        rule=judge_sigma,
        shows=show_sigma,
        derivation=both(
            "Var(q_i k_i) = E[q_i²] E[k_i²] = σ_q² σ_k². The sum of d_k such terms has variance "
            "d_k σ_q² σ_k²: this is d_k·σ² if one of the two deviations is 1, and d_k·σ⁴ if both "
            "are σ.",
            "Var(q_i k_i) = E[q_i²] E[k_i²] = σ_q² σ_k²。d_k 个这样的项之和的方差是 d_k σ_q² "
            "σ_k²：两个标准差之一为 1 时是 d_k·σ²，两者都是 σ 时是 d_k·σ⁴。",
        ),
    ),
    Claim(
        id="scale-magnitude",
        kind="derived",
        sentence=both(
            "For d_k = 512 the dot product reaches the order of 512, and dividing by √512 ≈ 22.6 "
            "brings it to about 22.",
            "d_k = 512 时点积可达 512 的量级，除以 √512 ≈ 22.6 后缩小到约 22。",
        ),
        notes="D",
        experiment=magnitudes,
        rule=judge_magnitude,
        shows=show_magnitude,
        derivation=both(
            "512 would need every one of the 512 terms to be about +1. Terms of random sign partly "
            "cancel: the sum has deviation √512 ≈ 22.6, and divided by 22.6 it has deviation 1.",
            "要达到 512，512 项中的每一项都须约为 +1。符号随机的项会部分抵消：和的标准差是 √512 "
            "≈ 22.6，除以 22.6 后标准差是 1。",
        ),
    ),
)
