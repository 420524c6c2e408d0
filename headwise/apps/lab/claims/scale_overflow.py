"""Overflow of large logits: scale-overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.apps.lab.charts import Chart, Listing, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move

TYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LOGITS = (8.0, 10.0, 12.0, 40.0, 80.0, 88.0, 90.0, 200.0, 1000.0, 30_000.0)


def naive_softmax(s: Tensor) -> Tensor:
    """exp(s) / Σ exp(s), as the formula is written: (..., n) -> (..., n)."""
    e = s.exp()
    return e / e.sum(-1, keepdim=True)


def stable_softmax(s: Tensor) -> Tensor:
    """The same with the largest score subtracted first: exp never sees a positive number."""
    return naive_softmax(s - s.max(-1, keepdim=True).values)


def overflows(lab: Lab) -> Figures:
    """Both ways to write softmax, three dtypes: a growing logit, and random unscaled scores."""
    single = []
    for name, dtype in TYPES.items():
        rows = torch.tensor([[logit, 0.0] for logit in LOGITS], dtype=dtype, device=lab.device)
        single.append(
            {
                "type": name,
                "naive": first_broken(naive_softmax(rows)),
                "stable": first_broken(stable_softmax(rows)),
                "log_largest": math.log(torch.finfo(dtype).max),
            }
        )
    count, keys = lab.pick("keys", tiny=64, quick=512, full=4096), 256
    random = []
    for d in lab.each(
        lab.pick("d_k", tiny=(64, 1024), quick=(16, 64, 256, 512, 1024, 4096)), "d_k"
    ):
        scores = lab.normal(count, d, stream=1) @ lab.normal(keys, d, stream=2).T
        row: dict[str, float] = {"d": d}
        for name, dtype in TYPES.items():
            low = scores.to(dtype)
            row[f"naive_{name}"] = share_broken(naive_softmax(low))
            row[f"stable_{name}"] = share_broken(stable_softmax(low))
        random.append(row)
    return {"logits": LOGITS, "single": single, "random": random, "product": product_overflow(lab)}


def first_broken(p: Tensor) -> float | None:
    """The first of LOGITS whose row is not finite, None if all are."""
    broken = (~p.isfinite().all(-1)).nonzero()
    return LOGITS[int(broken[0])] if len(broken) else None


def share_broken(p: Tensor) -> float:
    """The share of rows that are not finite."""
    return float((~p.isfinite().all(-1)).double().mean())


def product_overflow(lab: Lab) -> list[dict[str, float | bool]]:
    """q·k in fp16 for entries of one size in q and k, d_k = 128: its range ends at 65,504."""
    d, found = 128, []
    for size in (1.0, 4.0, 16.0, 22.0, 24.0, 64.0):
        q = torch.full((d,), size, dtype=torch.float16)
        exact = d * size**2
        found.append(
            {
                "size": size,
                "exact": exact,
                "finite": bool((q.float() @ q.float()).half().isfinite()),
                "scaled_finite": bool(((q.float() / math.sqrt(d)) @ q.float()).half().isfinite()),
            }
        )
    return found


def judge_overflow(figures: Figures) -> Verdict:
    """It depends on how softmax is written, and on the range of the scores' own dtype."""
    naive = {row["type"]: row["naive"] for row in figures["single"]}
    stable = [row["stable"] for row in figures["single"]]
    widest = figures["random"][-1]
    products = [row["exact"] for row in figures["product"] if not row["finite"]]
    values = {
        "d": widest["d"],
        "f32": naive["float32"],
        "f16": naive["fp16"],
        "rows": widest["naive_float32"],
        "stable": max(widest[f"stable_{name}"] for name in TYPES),
        "product": min(products, default=math.inf),
    }
    because = both(
        "exp(s) without the maximum subtracted gives no weights from a logit of {f32} in float32 "
        "and of {f16} in fp16, in {rows:.0%} of random unscaled rows at d_k = {d}; with the "
        "maximum subtracted in {stable:.0%}; in fp16 the product q·k itself overflows from "
        "{product:,.0f}",
        "不减最大值直接算 exp(s)，float32 中 logit 到 {f32}、fp16 中到 {f16} 就得不到权重，d_k = "
        "{d} 的随机未缩放分数中有 {rows:.0%} 的行如此；减去最大值后是 {stable:.0%}；fp16 中 q·k "
        "本身从 {product:,.0f} 起溢出",
        **values,
    )
    if all(value is None for value in naive.values()):
        return does_not_hold(because)
    if any(value is not None for value in stable) or values["stable"] > 0:
        return holds(because)
    condition = both(
        "softmax is written without subtracting the row's maximum, which every library does, or "
        "q·k is stored in fp16 and exceeds 65,504",
        "softmax 没有先减去行内最大值（各个库都会减），或者 q·k 以 fp16 存放且超过 65,504",
    )
    return holds_when(condition, because)


def show_overflow(figures: Figures) -> tuple[Chart | Listing, ...]:
    """The share of rows without weights against d_k; the first logit that breaks each dtype."""
    lines = [
        (f"{way}_{name}", both(f"{english}, {name}", f"{chinese}，{name}"))
        for way, english, chinese in (
            ("naive", "as written", "照公式写"),
            ("stable", "maximum subtracted", "减去最大值"),
        )
        for name in TYPES
    ]
    headings = (
        both("dtype", "类型"),
        both("log of the largest number", "最大数的对数"),
        both("first logit that breaks it, as written", "照公式写，最先出错的 logit"),
        both("maximum subtracted", "减去最大值"),
    )
    return (
        Chart(
            both("Rows without weights, unscaled scores", "得不到权重的行，未缩放的分数"),
            both("d_k", "d_k"),
            both("share of rows", "行的比例"),
            series(figures["random"], "d", *lines),
            log_x=True,
        ),
        Listing(
            both("softmax of (logit, 0)", "(logit, 0) 的 softmax"),
            headings,
            tuple(
                (row["type"], row["log_largest"], row["naive"], row["stable"])
                for row in figures["single"]
            ),
        ),
    )


CLAIMS = (
    Claim(
        id="scale-overflow",
        kind="derived",
        sentence=both(
            "Large dot products, in the hundreds or thousands, overflow the exponential.",
            "非常大的点积（几百或几千）会使指数函数上溢出。",
        ),
        notes="D",
        experiment=overflows,
        rule=judge_overflow,
        shows=show_overflow,
        moves=(Move("d_k", both("d_k"), "d", ("random",)),),
        derivation=both(
            "exp(s) overflows where s exceeds the logarithm of the largest number: 88.7 in "
            "float32 and bf16, 11.1 in fp16. softmax(s) = softmax(s − max s), and there every "
            "exponent is at most 0: exp is at most 1.",
            "s 超过最大数的对数时 exp(s) 溢出：float32 与 bf16 是 88.7，fp16 是 11.1。而 "
            "softmax(s) = softmax(s − max s)，其中每个指数都不大于 0，exp 不大于 1。",
        ),
    ),
)
