"""Heads counted: heads-parameters, heads-full-width, heads-concat, heads-compute."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headwise import attention
from headwise.apps.lab.charts import Chart, Listing, Series, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.counting import flops, in_turns, parameters
from headwise.apps.lab.estimates import slope
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.nn import MultiHeadAttention

WIDTH = 512
HEADS = (1, 2, 4, 8, 16, 32, 64)


def layer(heads: int, head_dim: int | None = None, bias: bool = False) -> MultiHeadAttention:
    """A real attention layer of width 512; on the meta device, where it takes no memory."""
    with torch.device("meta"):
        return MultiHeadAttention(WIDTH, heads, head_dim=head_dim, bias=bias)


def counts(lab: Lab) -> Figures:
    """The parameters of layers with 1 to 64 heads: narrow or full-width, with bias or without."""
    return {
        "width": WIDTH,
        "rows": [
            {
                "heads": heads,
                "narrow": parameters(layer(heads)),
                "narrow_bias": parameters(layer(heads, bias=True)),
                "formula": 3 * heads * (WIDTH * (WIDTH // heads)) + WIDTH**2,
                "full": parameters(layer(heads, head_dim=WIDTH)),
                "full_bias": parameters(layer(heads, head_dim=WIDTH, bias=True)),
            }
            for heads in lab.each(HEADS, "heads")
        ],
    }


def judge_parameters(figures: Figures) -> Verdict:
    """The counts must equal the formula, and each other."""
    rows, d = figures["rows"], figures["width"]
    right = all(row["narrow"] == row["formula"] == 4 * d**2 for row in rows)
    right &= len({row["narrow_bias"] for row in rows}) == 1
    because = both(
        "counted at d_model = {d}: {counted} parameters for 1 to {heads} heads (4d² = "
        "{formula:,}), with biases {biased:,}",
        "d_model = {d} 时实际计数：1 到 {heads} 个头有 {counted} 个参数（4d² = {formula:,}），"
        "带偏置为 {biased:,}",
        d=d,
        counted=" / ".join(f"{x:,}" for x in sorted({row["narrow"] for row in rows})),
        heads=rows[-1]["heads"],
        formula=4 * d**2,
        biased=rows[0]["narrow_bias"],
    )
    return holds(because) if right else does_not_hold(because)


def judge_full_width(figures: Figures) -> Verdict:
    """Each count of full-width heads must be h times that of one head."""
    rows = figures["rows"]
    ratios = [row["full"] / (row["heads"] * rows[0]["full"]) for row in rows]
    last = rows[-1]
    because = both(
        "{heads} heads of full width have {full:,} parameters, {ratio:.1f} times those of one "
        "head; narrow ones {narrow:,}",
        "{heads} 个不降维的头有 {full:,} 个参数，是单头的 {ratio:.1f} 倍；降维的头有 {narrow:,} 个",
        heads=last["heads"],
        full=last["full"],
        ratio=last["full"] / rows[0]["full"],
        narrow=last["narrow"],
    )
    exact = all(abs(ratio - 1) < 1e-3 for ratio in ratios)
    return holds(because) if exact else does_not_hold(because)


def show_counts(figures: Figures) -> tuple[Listing | Chart, ...]:
    """The counts, row by row."""
    headings = (
        both("heads", "头数"),
        both("narrow heads", "降维的头"),
        both("with bias", "带偏置"),
        both("3·h·(d·d_k) + d²", "3·h·(d·d_k) + d²"),
        both("full-width heads", "不降维的头"),
    )
    rows = tuple(
        (row["heads"], row["narrow"], row["narrow_bias"], row["formula"], row["full"])
        for row in figures["rows"]
    )
    title = both("Parameters at d_model = {d}", "d_model = {d} 的参数量", d=figures["width"])
    curves = series(figures["rows"], "heads", ("narrow", headings[1]), ("full", headings[4]))
    counted = both("parameters", "参数量")
    chart = Chart(title, both("heads", "头数"), counted, curves, log_x=True, log_y=True)
    return Listing(title, headings, rows), chart


def concatenations(lab: Lab) -> Figures:
    """Heads of any width, concatenated: the layer's output against the formula written out."""
    d, heads, tokens = 64, 4, 10
    rows = []
    for width in lab.each((1, 7, 16, 33, 64, 200), "head width"):
        torch.manual_seed(width)
        attn = MultiHeadAttention(d, heads, head_dim=width).double()
        x = lab.normal(2, tokens, d, stream=1).cpu()
        with torch.no_grad():
            out, by_hand = attn(x), written_out(attn, x)
        error = float((out - by_hand).abs().max())
        right_shape = list(out.shape) == list(x.shape)
        rows.append(
            {"width": width, "error": error, "fits": right_shape, "parameters": parameters(attn)}
        )
    return {"d": d, "heads": heads, "rows": rows}


def written_out(attn: MultiHeadAttention, x: Tensor) -> Tensor:
    """Concat(head_1, …, head_h) W_o, one head at a time: x (B, N, d) -> (B, N, d)."""
    q, k, v = attn.prepare(x).q, attn.prepare(x).k, attn.prepare(x).v  # (B, H, N, width)
    outputs = [
        (q[:, h] @ k[:, h].mT / attn.head_dim**0.5).softmax(-1) @ v[:, h] for h in range(attn.heads)
    ]
    joined: Tensor = attn.out(torch.cat(outputs, -1))  # (B, N, H · width) -> (B, N, d)
    return joined


def judge_concat(figures: Figures) -> Verdict:
    """If wider heads can be concatenated too, they need not be narrow."""
    works = [row["width"] for row in figures["rows"] if row["fits"] and row["error"] < 1e-9]
    narrow = figures["d"] // figures["heads"]
    because = both(
        "{count} of {all} head widths from {low} to {high} work at d_model = {d} with {heads} "
        "heads, and agree with the formula; the output projection is as wide as all heads "
        "together. The price is parameters: {most:,} at width {high}, {least:,} at width {narrow}",
        "d_model = {d}、{heads} 个头时，{low} 到 {high} 的 {all} 种头宽有 {count} 种可用，"
        "且与公式一致；输出投影与所有头合起来一样宽。代价是参数量：宽 {high} 时 {most:,}，宽 "
        "{narrow} 时 {least:,}",
        count=len(works),
        all=len(figures["rows"]),
        low=figures["rows"][0]["width"],
        high=figures["rows"][-1]["width"],
        d=figures["d"],
        heads=figures["heads"],
        most=figures["rows"][-1]["parameters"],
        least=next(row["parameters"] for row in figures["rows"] if row["width"] == narrow),
        narrow=narrow,
    )
    needed = not any(width != narrow for width in works)
    return holds(because) if needed else does_not_hold(because)


def show_concat(figures: Figures) -> tuple[Listing, ...]:
    """Each width, whether it works, and its price."""
    headings = (
        both("head width", "头宽"),
        both("output fits", "输出可用"),
        both("error", "误差"),
        both("parameters", "参数量"),
    )
    rows = tuple((x["width"], x["fits"], x["error"], x["parameters"]) for x in figures["rows"])
    return (Listing(both("Heads of any width", "任意宽度的头"), headings, rows),)


def operations(lab: Lab) -> Figures:
    """FLOPs of one head's share of a layer, counted, and the time of one head's scores."""
    rows = []
    for heads in (1, 4, 16):
        for tokens in (128, 512, 2048):
            attn, x = layer(heads), torch.empty(1, tokens, WIDTH, device="meta")
            d_k = WIDTH // heads
            rows.append(
                {
                    "heads": heads,
                    "tokens": tokens,
                    "d_k": d_k,
                    "flops": flops(partial(attn, x)) // heads,
                    "said": 4 * tokens**2 * d_k + 8 * tokens * d_k**2,
                    "right": 4 * tokens**2 * d_k + 8 * tokens * WIDTH * d_k,
                }
            )
    lengths = lab.pick("lengths", tiny=(64, 128), quick=(512, 1024, 2048), full=(4096, 8192, 16384))
    times = [seconds(lab, tokens, 64) for tokens in lab.each(lengths, "tokens")]
    return {
        "width": WIDTH,
        "rows": rows,
        "lengths": lengths,
        "seconds": times,
        "time_power": slope(lengths, times),
    }


def seconds(lab: Lab, tokens: int, d: int) -> float:
    """The fewest seconds of attention in one head."""
    q, k, v = lab.normal(3, 1, 1, tokens, d).float()
    repeats = lab.pick("repeats", tiny=1, quick=5, full=20)
    return in_turns([partial(attention, q, k, v)], repeats, device=lab.device)[0]


def judge_compute(figures: Figures) -> Verdict:
    """FLOPs of one head, counted, beside n²·d_k + n·d_k² and n²·d_k + n·d_model·d_k."""
    rows = figures["rows"]
    worst = max(rows, key=lambda row: row["flops"] / row["said"])
    exact = all(row["flops"] == row["right"] for row in rows)
    said = all(0.9 < row["flops"] / row["said"] < 1.1 for row in rows)
    because = both(
        "with {heads} heads and {tokens} tokens one head takes {ratio:.1f} times the FLOPs of "
        "4n²·d_k + 8n·d_k²; 4n²·d_k + 8n·d_model·d_k counts {exact}; the time of one head's "
        "attention grows with n to the power {power:.1f}",
        "{heads} 个头、{tokens} 个词元时，一个头的 FLOPs 是 4n²·d_k + 8n·d_k² 的 {ratio:.1f} 倍；"
        "4n²·d_k + 8n·d_model·d_k {exact}；单头注意力的时间随 n 的 {power:.1f} 次方增长",
        heads=worst["heads"],
        tokens=worst["tokens"],
        ratio=worst["flops"] / worst["said"],
        exact=both("exactly", "完全相符") if exact else both("wrongly", "不符"),
        power=figures["time_power"],
    )
    if said:
        return holds(because)
    most = max(row["heads"] for row in rows)
    ratios = {row["tokens"]: row["flops"] / row["said"] for row in rows if row["heads"] == most}
    short, long = min(ratios), max(ratios)
    if ratios[long] < ratios[short] and exact:
        condition = both(
            "n is far larger than d_model, {d} here, so that n²·d_k outweighs the rest: a head of "
            "many projects from d_model to d_k, which costs n·d_model·d_k and not n·d_k²; with "
            "{most} heads the ratio falls from {first:.1f} at {short} tokens to {last:.1f} at "
            "{long}",
            "n 远大于 d_model（这里是 {d}），n²·d_k 才占主导：多头时每个头要从 d_model 投影到 "
            "d_k，代价是 "
            "n·d_model·d_k 而不是 n·d_k²；{most} 个头时，比值从 {short} 个词元的 {first:.1f} 降到 "
            "{long} 个的 {last:.1f}",
            d=figures["width"],
            most=most,
            first=ratios[short],
            short=short,
            last=ratios[long],
            long=long,
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_compute(figures: Figures) -> tuple[Listing | Chart, ...]:
    """FLOPs of a head, counted and by both formulas; time against length."""
    headings = (
        both("heads", "头数"),
        both("tokens", "词元数"),
        both("counted", "计数"),
        both("n²·d_k + n·d_k²", "n²·d_k + n·d_k²"),
        both("n²·d_k + n·d_model·d_k", "n²·d_k + n·d_model·d_k"),
    )
    rows = tuple(
        (row["heads"], row["tokens"], row["flops"], row["said"], row["right"])
        for row in figures["rows"]
    )
    measured = Series(both("one head", "一个头"), figures["lengths"], figures["seconds"])
    title = both("Seconds of one head's attention", "单头注意力的秒数")
    return (
        Listing(both("FLOPs of one head", "一个头的 FLOPs"), headings, rows),
        Chart(title, both("tokens", "词元数"), both("seconds", "秒"), (measured,), True, True),
    )


CLAIMS = (
    Claim(
        id="heads-parameters",
        kind="derived",
        sentence=both(
            "Many heads cost as many parameters as one: 3·h·(d_model·d_k) + d_model² = 4·d_model².",
            "多头与单头参数量相同：3·h·(d_model·d_k) + d_model² = 4·d_model²。",
        ),
        notes="AE",
        experiment=counts,
        rule=judge_parameters,
        shows=show_counts,
        moves=(Move("heads", both("heads", "头数"), "heads"),),
        derivation=both(
            "h·d_k = d_model, so the h matrices d_model × d_k of the queries are one matrix "
            "d_model × d_model cut into columns; the same for keys and values; W_o is the fourth.",
            "h·d_k = d_model，所以 h 个 d_model × d_k 的查询矩阵就是一个 d_model × d_model "
            "矩阵按列切开；键、值同理；W_o 是第四个。",
        ),
    ),
    Claim(
        id="heads-full-width",
        kind="derived",
        sentence=both(
            "If heads were not narrowed, parameters would grow h times.",
            "若不降维，参数量会增加到 h 倍。",
        ),
        notes="E",
        experiment=counts,
        rule=judge_full_width,
        shows=show_counts,
        moves=(Move("heads", both("heads", "头数"), "heads"),),
        derivation=both(
            "With d_k = d_model each head has three d_model² matrices, and W_o has h·d_model "
            "rows: 4·h·d_model².",
            "d_k = d_model 时每个头有三个 d_model² 的矩阵，W_o 有 h·d_model 行：共 4·h·d_model²。",
        ),
    ),
    Claim(
        id="heads-concat",
        kind="derived",
        sentence=both(
            "Heads must be narrowed to d_model/h so that they can be concatenated.",
            "每个头必须降到 d_model/h 维，才能拼接。",
        ),
        notes="E",
        experiment=concatenations,
        rule=judge_concat,
        shows=show_concat,
        derivation=both(
            "Concatenation gives h·d_v numbers per token, and W_o maps h·d_v to d_model for every "
            "d_v. d_v = d_model/h is the choice that keeps the layer at 4·d_model² parameters.",
            "拼接后每个词元有 h·d_v 个数，W_o 对任何 d_v 都能把 h·d_v 映射到 d_model。d_v = "
            "d_model/h 只是使该层保持 4·d_model² 个参数的选择。",
        ),
    ),
    Claim(
        id="heads-compute",
        kind="derived",
        sentence=both(
            "One head costs O(n²·d_k + n·d_k²).",
            "一个头的计算复杂度是 O(n²·d_k + n·d_k²)。",
        ),
        notes="E",
        experiment=operations,
        rule=judge_compute,
        shows=show_compute,
        moves=(
            Move("heads", both("heads", "头数"), "heads"),
            Move("tokens", both("tokens", "词元数"), "tokens", how="from"),
        ),
        gpu=True,
        derivation=both(
            "Scores and weighted values: 2·2·n²·d_k. Projecting n tokens of width d_model to q, "
            "k and v of width d_k, and back through d_k rows of W_o: 4·2·n·d_model·d_k, which is "
            "h times 8·n·d_k².",
            "分数与加权求和：2·2·n²·d_k。把 n 个宽 d_model 的词元投影成宽 d_k 的 q、k、v，再经 "
            "W_o 的 d_k 行投影回去：4·2·n·d_model·d_k，是 8·n·d_k² 的 h 倍。",
        ),
    ),
)
