"""The cost of dot product and additive attention: dot-cost, dot-parameters."""

from __future__ import annotations

from functools import partial

import torch

from headwise import Dot, attention, score
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
from headwise.apps.lab.counting import flops, in_turns, kept_bytes, parameters
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.experiments.dot_and_additive import (
    Scored,
    additive,
    textbook,
    without_numbers,
)
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.nn import Additive, AdditiveAttention, MultiHeadAttention


def costs(lab: Lab) -> Figures:
    """Operations, kept bytes and seconds of both scores, as taught and fused, at several sizes."""
    sizes = lab.pick(
        tiny=((32, 16), (64, 16), (64, 32)),
        quick=((128, 64), (256, 64), (512, 64), (256, 16), (256, 32), (256, 128)),
        full=((1024, 64), (2048, 64), (4096, 64), (2048, 32), (2048, 128), (2048, 256)),
    )
    rows = []
    for n, d in lab.each(sizes, "n, d"):
        q, k, v = lab.normal(3, 1, 1, n, d, stream=1).float()
        weight = additive(d, 0).weight.to(lab.device)
        scores: dict[str, Scored] = {"dot": Dot(), "additive": score.Additive(weight)}
        row: dict[str, float] = {"n": n, "d": d}
        for name, chosen in scores.items():
            a, b, c, bare = without_numbers(q, k, v, chosen)  # counting needs no numbers
            fused = partial(attention, a, b, c, score=bare, engine="streaming")
            row[f"{name}_flops"] = flops(fused)
            for x in (a, b, c):
                x.requires_grad_()
            row[f"{name}_bytes"] = kept_bytes(partial(textbook, a, b, c, bare))
            row[f"{name}_fused_bytes"] = kept_bytes(fused)
        calls = [partial(textbook, q, k, v, each) for each in scores.values()]
        calls += [partial(attention, q, k, v, score=each) for each in scores.values()]
        taken = in_turns(calls, lab.pick("repeats", tiny=1, quick=5, full=20), device=lab.device)
        names = ("dot_seconds", "additive_seconds", "dot_fused_seconds", "additive_fused_seconds")
        rows.append(row | dict(zip(names, taken, strict=True)))
    return {"rows": rows}


def judge_cost(figures: Figures) -> Verdict:
    """Both counts grow as n²·d, and additive takes longer at every size, 1.5 times as long or more.

    Between one and 1.5 times the launch of the kernels, which is the same for both, counts too.
    """
    rows = figures["rows"]
    widths, lengths = ladder(rows, "d", "n"), ladder(rows, "n", "d")
    powers = {
        f"{name}_{axis}": slope(
            [row[axis] for row in along], [row[f"{name}_flops"] for row in along]
        )
        for name in ("dot", "additive")
        for axis, along in (("n", lengths), ("d", widths))
    }
    same = all(
        abs(powers[f"{x}_n"] - 2) < 0.1 and abs(powers[f"{x}_d"] - 1) < 0.1
        for x in ("dot", "additive")
    )
    taught = [row["additive_seconds"] / row["dot_seconds"] for row in rows]
    fused = [row["additive_fused_seconds"] / row["dot_fused_seconds"] for row in rows]
    because = both(
        "the operations of both grow with n to the power {n:.2f} and with d to the power "
        "{d:.2f}; additive takes {low:.1f} to {high:.1f} times as long written out, and "
        "{fused_low:.1f} to {fused_high:.1f} times fused, because it evaluates d tanh per pair "
        "and uses no matrix product",
        "两者的运算量都随 n 的 {n:.2f} 次方、d 的 {d:.2f} 次方增长；加性注意力逐步写出时耗时是点"
        "积的 {low:.1f} 到 {high:.1f} 倍，融合时 {fused_low:.1f} 到 {fused_high:.1f} 倍，"
        "因为每一对要算 d 个 tanh，且用不上矩阵乘法",
        n=powers["additive_n"],
        d=powers["additive_d"],
        low=min(taught),
        high=max(taught),
        fused_low=min(fused),
        fused_high=max(fused),
    )
    if not same or max(taught + fused) < 1:
        return does_not_hold(because)
    if min(taught + fused) > 1.5:
        return holds(because)
    if min(taught + fused) <= 1:
        return undecided(because)
    condition = both(
        "the work takes longer than its launch; of calls that take a fraction of a millisecond, "
        "as on a GPU, the ratio says little",
        "计算本身比启动费时；像在 GPU 上那样只需零点几毫秒的调用，比值说明不了什么",
    )
    return holds_when(condition, because)


def ladder(rows: list[dict[str, float]], along: str, fixed: str) -> list[dict[str, float]]:
    """The rows in which `fixed` has its most frequent value, in the order of `along`."""
    values = [row[fixed] for row in rows]
    common = max(set(values), key=values.count)
    return sorted((row for row in rows if row[fixed] == common), key=lambda row: row[along])


def show_cost(figures: Figures) -> tuple[Chart | Listing, ...]:
    """Seconds against length, and the counts."""
    along = ladder(figures["rows"], "n", "d")
    lengths = [row["n"] for row in along]
    curves = tuple(
        Series(both(*label), lengths, [row[f"{name}_seconds"] for row in along])
        for name, label in (
            ("dot", ("dot, written out", "点积，逐步写出")),
            ("additive", ("additive, written out", "加性，逐步写出")),
            ("dot_fused", ("dot, fused", "点积，融合")),
            ("additive_fused", ("additive, fused", "加性，融合")),
        )
    )
    headings = (
        *(both("n", "n"), both("d", "d")),
        *(both("dot, FLOPs", "点积，FLOPs"), both("additive, FLOPs", "加性，FLOPs")),
        *(
            both("dot, bytes kept", "点积，保留字节"),
            both("additive, bytes kept", "加性，保留字节"),
        ),
        both("additive fused, bytes kept", "加性融合，保留字节"),
    )
    names = (
        *("n", "d", "dot_flops", "additive_flops", "dot_bytes", "additive_bytes"),
        "additive_fused_bytes",
    )
    rows = tuple(tuple(row[name] for name in names) for row in figures["rows"])
    title = both("Seconds at d = {d}", "d = {d} 时的秒数", d=along[0]["d"])
    return (
        Chart(title, both("n", "n"), both("seconds", "秒"), curves, log_x=True, log_y=True),
        Listing(both("Counted", "计数"), headings, rows),
    )


def counts(lab: Lab) -> Figures:
    """The parameters of an additive score: beside a bare dot product, and inside a layer."""
    d, heads = 512, 8
    with torch.device("meta"):
        alone = AdditiveAttention(d, d, d)
        dot = MultiHeadAttention(d, heads, bias=False)
        additive_layer = MultiHeadAttention(d, heads, bias=False, score=Additive())
    return {
        "d": d,
        "heads": heads,
        "alone": parameters(alone),
        "dot_layer": parameters(dot),
        "additive_layer": parameters(additive_layer),
    }


def judge_parameters(figures: Figures) -> Verdict:
    """W_q, W_k and v, if the dot product has no projections; v alone, if it has."""
    d, alone = figures["d"], figures["alone"]
    more = figures["additive_layer"] - figures["dot_layer"]
    because = both(
        "at width {d} Bahdanau's score has {alone:,} parameters (W_q, W_k and v) where a bare "
        "dot product has none; in a multi-head layer, which has W_q and W_k for the dot product "
        "too, it adds {more:,} ({share:.2%})",
        "宽 {d} 时，Bahdanau 的打分有 {alone:,} 个参数（W_q、W_k 与 v），裸点积没有参数；"
        "而在多头层里，点积也有 W_q 与 W_k，加性打分只多 {more:,} 个（{share:.2%}）",
        d=d,
        alone=alone,
        more=more,
        share=more / figures["dot_layer"],
    )
    if more >= 2 * d**2:
        return holds(because)
    if alone >= 2 * d**2:
        condition = both(
            "it is compared with a dot product without projections; multi-head attention has W_q "
            "and W_k for the dot product too, and only v is additional",
            "与不带投影的点积相比；多头注意力的点积同样有 W_q 与 W_k，多出的只有 v",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_parameters(figures: Figures) -> tuple[Listing, ...]:
    """The counts."""
    rows = (
        (both("a bare dot product", "裸点积"), 0),
        (both("Bahdanau's score: W_q, W_k, v", "Bahdanau 打分：W_q、W_k、v"), figures["alone"]),
        (both("multi-head layer, dot", "多头层，点积"), figures["dot_layer"]),
        (both("multi-head layer, additive", "多头层，加性"), figures["additive_layer"]),
    )
    headings = both("score", "打分"), both("parameters", "参数量")
    title = both("Parameters at width {d}", "宽 {d} 的参数量", d=figures["d"])
    return (Listing(title, headings, rows),)


CLAIMS = (
    Claim(
        id="dot-cost",
        sentence=both(
            "Dot product and additive attention are both O(n²·d), and additive is slower in "
            "practice.",
            "点积与加性注意力的复杂度都是 O(n²·d)，但加性在实际中更慢。",
        ),
        notes="C",
        experiment=costs,
        rule=judge_cost,
        shows=show_cost,
        moves=(
            Move("n", both("n"), "n", needs=2),
            Move("width", both("d"), "d", needs=2),
        ),
        gpu=True,
        derivation=both(
            "q·k is d multiply-adds, and n² of them are one matrix product. vᵀtanh(q + k) is d "
            "additions, d tanh and d multiply-adds per pair; the tanh stands between, so no "
            "matrix product does it, and written out it stores n²·d numbers.",
            "q·k 是 d 次乘加，n² 个合起来是一次矩阵乘法。vᵀtanh(q + k) 每对要 d 次加法、d 个 "
            "tanh 与 d 次乘加；中间隔着 tanh，不能用矩阵乘法完成，逐步写出还要存 n²·d 个数。",
        ),
    ),
    Claim(
        id="dot-parameters",
        kind="derived",
        sentence=both(
            "Additive attention has to store W_q, W_k and v in addition.",
            "加性注意力需额外存储 W_q、W_k、v。",
        ),
        notes="C",
        experiment=counts,
        rule=judge_parameters,
        shows=show_parameters,
    ),
)
