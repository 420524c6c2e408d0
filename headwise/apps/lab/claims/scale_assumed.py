"""What 1/√d_k takes for granted: scale-aligned, scale-keys, scale-starts."""

from __future__ import annotations

import math

import torch

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move


def alignment(lab: Lab) -> Figures:
    """The size of q·k against d_k, for queries and keys that are independent, and aligned."""
    rho = lab.pick("correlation", tiny=0.5, quick=0.5)
    pairs = lab.pick("pairs", tiny=500, quick=5000)
    rows = []
    for d in lab.each(lab.pick("d_k", tiny=(16, 64, 256), quick=(16, 64, 256, 1024)), "d_k"):
        q, noise = lab.normal(2, pairs, d, stream=d)
        k = rho * q + math.sqrt(1 - rho**2) * noise  # each entry has variance one, as before
        row: dict[str, float] = {"d": d}
        for name, keys in (("independent", noise), ("aligned", k)):
            size = float((q * keys).sum(-1).square().mean().sqrt())
            row |= {f"{name}_root": size / math.sqrt(d), f"{name}_whole": size / d}
        rows.append(row)
    widths = [row["d"] for row in rows]
    return {
        "correlation": rho,
        "rows": rows,
        "powers": {x: slope(widths, [row[x] for row in rows]) for x in rows[0] if x != "d"},
    }


def judge_aligned(figures: Figures) -> Verdict:
    """The same size: an exponent of d_k below a tenth."""
    powers, rows = figures["powers"], figures["rows"]
    because = both(
        "from d_k = {first} to {last} the size of q·k/√d_k grows with d_k to the power "
        "{independent:.2f} for independent q and k, and {aligned:.2f} where their entries "
        "correlate by {rho}; there q·k/d_k grows to the power {whole:.2f}",
        "d_k 从 {first} 到 {last}，q·k/√d_k 的大小随 d_k 增长的次方：q、k 独立时 "
        "{independent:.2f}，分量相关系数为 {rho} 时 {aligned:.2f}；后者的 q·k/d_k 是 {whole:.2f} "
        "次方",
        first=rows[0]["d"],
        last=rows[-1]["d"],
        independent=powers["independent_root"],
        aligned=powers["aligned_root"],
        rho=figures["correlation"],
        whole=powers["aligned_whole"],
    )
    if abs(powers["independent_root"]) > 0.1:
        return does_not_hold(because)
    if abs(powers["aligned_root"]) < 0.1:
        return holds(because)
    condition = both(
        "queries and keys are independent, as at the start; once training aligns them q·k grows "
        "like d_k, and dividing by d_k, as μP does, keeps its size",
        "查询与键相互独立，如训练之初；训练使它们对齐之后，q·k 随 d_k 增长，"
        "这时像 μP 那样除以 d_k 才能保持大小",
    )
    return holds_when(condition, because)


def show_aligned(figures: Figures) -> tuple[Chart, ...]:
    """The sizes against the width."""
    curves = series(
        figures["rows"],
        "d",
        ("independent_root", both("independent, q·k/√d_k", "独立，q·k/√d_k")),
        ("aligned_root", both("aligned, q·k/√d_k", "对齐，q·k/√d_k")),
        ("independent_whole", both("independent, q·k/d_k", "独立，q·k/d_k")),
        ("aligned_whole", both("aligned, q·k/d_k", "对齐，q·k/d_k")),
    )
    title = both("Which factor keeps the size", "哪个因子保持大小")
    size = both("root mean square", "均方根")
    return (Chart(title, both("d_k", "d_k"), size, curves, log_x=True, log_y=True),)


def crowding(lab: Lab) -> Figures:
    """The weight of one key that fits, beside more and more that do not, for two factors."""
    d, fit = 64, lab.pick("fit", tiny=6.0, quick=6.0)
    rows, count = lab.pick("rows", tiny=8, quick=64), 32
    found = []
    lengths = lab.pick("keys", tiny=(32, 512), quick=(32, 128, 512, 2048, 8192, 32_768))
    for n in lab.each(lengths, "keys"):
        q, k = lab.normal(rows, d, stream=1), lab.normal(n, d, stream=2)
        scores = q @ k.T / math.sqrt(d)
        scores[:, 0] = fit  # so many deviations above those of the others
        longer = math.log(n) / math.log(count)  # what the scores are multiplied by
        row: dict[str, float] = {"keys": n}
        for name, factor in (("constant", 1.0), ("growing", longer)):
            row[name] = float((factor * scores).softmax(-1)[:, 0].median())
        found.append(row)
    return {"fit": fit, "rows": found}


def judge_keys(figures: Figures) -> Verdict:
    """The key that fits must keep half of its weight among the most keys."""
    first, last = figures["rows"][0], figures["rows"][-1]
    kept = last["constant"] / first["constant"]
    because = both(
        "a key whose score lies {fit} deviations above the others gets {one:.2f} of the weight "
        "among {few} keys and {other:.4f} among {many:,}; with scores that are multiplied by a "
        "factor that grows as log n, {growing:.2f}",
        "分数比其余高 {fit} 个标准差的键，在 {few} 个键中得到 {one:.2f} 的权重，在 {many:,} "
        "个中得到 {other:.4f}；若分数再乘以随 log n 增长的因子，则得到 {growing:.2f}",
        fit=figures["fit"],
        one=first["constant"],
        few=first["keys"],
        other=last["constant"],
        many=last["keys"],
        growing=last["growing"],
    )
    if kept > 0.5:
        return holds(because)
    if last["keys"] <= 4 * first["keys"]:
        return does_not_hold(because)
    condition = both(
        "the number of keys stays that of the training: weight is divided among e^s of all keys, "
        "so scores have to grow as log n for a key to keep its share",
        "键的数目保持训练时的大小：权重在所有键的 e^s 之间分配，分数须随 log n 增长，"
        "一个键才能保住它的份额",
    )
    return holds_when(condition, because)


def show_keys(figures: Figures) -> tuple[Chart, ...]:
    """The weight against the number of keys."""
    curves = series(
        figures["rows"],
        "keys",
        ("constant", both("q·k/√d_k", "q·k/√d_k")),
        ("growing", both("q·k/√d_k · log n", "q·k/√d_k · log n")),
    )
    title = both("The one key that fits", "唯一合适的键")
    weight = both("its weight, median", "它的权重，中位")
    return (Chart(title, both("keys", "键数"), weight, curves, log_x=True),)


def starts(lab: Lab) -> Figures:
    """The first steps of gradient descent on W_q, for the same logits made in three ways."""
    d, tokens, steps = 48, 32, lab.pick("steps", tiny=3, quick=20)
    rate = lab.pick("rate", tiny=1.0, quick=1.0)
    x, w_q, w_k = (lab.normal(tokens, d, stream=1), *lab.normal(2, d, d, stream=2) / math.sqrt(d))
    v, asked = (lab.normal(tokens, d, stream=s) for s in (3, 4))
    rows: list[dict[str, float]] = [{"step": step} for step in range(steps + 1)]
    root = math.sqrt(d)
    ways = {
        # the factor on the scores, the start of W_q, the rate of plain gradient descent
        "scaled": (1 / root, 1.0, rate),
        "narrow": (1.0, 1 / root, rate / d),
        "same rate": (1.0, 1 / root, rate),
    }
    for name, (factor, start, each) in ways.items():
        w = (start * w_q).requires_grad_()
        for step in range(steps + 1):
            p = (factor * (x @ w) @ (x @ w_k).T).softmax(-1)
            loss = (p @ v - asked).square().mean()
            rows[step][name] = float(loss.detach())
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w.detach() - each * gradient).requires_grad_()
    return {"d": d, "rows": rows}


def judge_starts(figures: Figures) -> Verdict:
    """Nothing else can do it: the losses must differ at every step."""
    rows = figures["rows"]
    apart = max(abs(row["scaled"] - row["narrow"]) for row in rows)
    other = max(abs(row["scaled"] - row["same rate"]) for row in rows)
    because = both(
        "through {steps} steps of gradient descent the loss with q·k/√d_k and that with q·k, W_q "
        "divided by √d_k at the start and the rate of W_q by d_k differ by {apart:.0e}; with the "
        "rate left as it was, by {other:.1g}",
        "梯度下降 {steps} 步，用 q·k/√d_k 的损失，与用 q·k、W_q 初值除以 √d_k、W_q 的学习率除以 "
        "d_k 的损失，相差 {apart:.0e}；学习率不变时相差 {other:.1g}",
        steps=len(rows) - 1,
        apart=apart,
        other=other,
    )
    return does_not_hold(because) if apart < 1e-9 else holds(because)


def show_starts(figures: Figures) -> tuple[Chart, ...]:
    """The losses of the three ways."""
    narrow = both("q·k, W_q / √d_k, rate / d_k", "q·k，W_q / √d_k，学习率 / d_k")
    curves = series(
        figures["rows"],
        "step",
        ("scaled", both("q·k/√d_k", "q·k/√d_k")),
        ("narrow", narrow),
        ("same rate", both("q·k, W_q / √d_k, same rate", "q·k，W_q / √d_k，学习率不变")),
    )
    title = both("The same training in other words", "同一训练的不同写法")
    return (Chart(title, both("step", "步"), both("loss", "损失"), curves),)


CLAIMS = (
    Claim(
        id="scale-aligned",
        kind="derived",
        sentence=both(
            "Dividing by √d_k keeps the scores the same size at every width.",
            "除以 √d_k 使分数在任何宽度下都保持同样大小。",
        ),
        notes="F",
        experiment=alignment,
        rule=judge_aligned,
        shows=show_aligned,
        derivation=both(
            "If entries of q and k correlate by ρ, each term q_i k_i has mean ρ: the sum has mean "
            "ρ·d_k and deviation √(d_k·(1 + ρ²)). For ρ = 0 only the deviation is left.",
            "若 q、k 的分量相关系数为 ρ，每项 q_i k_i 的均值就是 ρ：和的均值是 ρ·d_k，标准差是 "
            "√(d_k·(1 + ρ²))。ρ = 0 时只剩标准差。",
        ),
    ),
    Claim(
        id="scale-keys",
        kind="derived",
        sentence=both(
            "The factor 1/√d_k serves any number of keys.",
            "因子 1/√d_k 适用于任意多的键。",
        ),
        notes="F",
        experiment=crowding,
        rule=judge_keys,
        shows=show_keys,
        moves=(Move("keys", both("keys", "键数"), "keys", needs=2),),
        derivation=both(
            "Beside n keys with scores N(0, 1), whose e^s have mean √e, a key with score m gets "
            "about e^m / (e^m + n·√e): half of the weight takes m = log n + 1/2.",
            "旁边有 n 个分数为 N(0, 1) 的键，其 e^s 的均值为 √e；分数为 m 的键约得 e^m / (e^m + "
            "n·√e)：要得到一半的权重，须有 m = log n + 1/2。",
        ),
    ),
    Claim(
        id="scale-starts",
        kind="derived",
        sentence=both(
            "Only the division by √d_k can keep softmax where it learns.",
            "只有除以 √d_k 才能让 softmax 留在仍有梯度的区间。",
        ),
        notes="F",
        experiment=starts,
        rule=judge_starts,
        shows=show_starts,
        derivation=both(
            "Take W′ = c·W in place of W and divide the scores by c: they are the same, ∂loss/∂W′ "
            "= ∂loss/∂W / c, and a step of c²·η on W′ is a step of η on W (with Adam, which "
            "forgets the size of gradients, a step of c·η). So factors on the scores, on the start "
            "and on the rate can stand in for one another.",
            "以 W′ = c·W 代替 W，再把分数除以 c：分数不变，∂loss/∂W′ = ∂loss/∂W / c，对 W′ 以 c²·η "
            "走一步，等于对 W 以 η 走一步（Adam 不计梯度的大小，是 c·η）。"
            "所以分数、初值、学习率上的因子可以互相替代。",
        ),
    ),
)
