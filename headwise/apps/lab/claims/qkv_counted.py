"""Fixed weights against Q, K and V, counted: qkv-parameters, qkv-compute."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from headwise.apps.lab.charts import Chart, series
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.counting import flops, in_turns, parameters
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.moves import Move
from headwise.messages import Sentence
from headwise.nn import FixedAttention, MultiHeadAttention

WIDTH, HEADS = 256, 8


def layers(length: int, device: str = "meta") -> dict[str, nn.Module]:
    """A layer with Q, K and V, and one whose weights for up to `length` tokens are learnt."""
    with torch.device(device):
        return {
            "qkv": MultiHeadAttention(WIDTH, HEADS, bias=False),
            "fixed": FixedAttention(WIDTH, HEADS, length, bias=False),
        }


def counts(lab: Lab) -> Figures:
    """The parameters of both layers against the length, counted."""
    rows = []
    for length in lab.each((16, 32, 64, 128, 256, 512, 1024, 4096), "length"):
        rows.append({"length": length} | {k: parameters(x) for k, x in layers(length).items()})
    return {"width": WIDTH, "heads": HEADS, "rows": rows}


def judge_parameters(figures: Figures) -> Verdict:
    """Fixed weights have more parameters from some length on."""
    rows, d, h = figures["rows"], figures["width"], figures["heads"]
    more = [row["length"] for row in rows if row["fixed"] > row["qkv"]]
    last = rows[-1]
    crossing = d * math.sqrt(2 / h)
    because = both(
        "counted at d_model = {d} with {h} heads: {qkv:,} parameters with Q, K and V at every "
        "length; {first:,} fixed ones at {short} tokens, {fixed:,} at {length}; fixed weights "
        "have more from {crossing:.0f} tokens on",
        "d_model = {d}、{h} 个头时计数：QKV 在任何长度下都是 {qkv:,} 个参数；直接学习的权重在 "
        "{short} 个词元时 {first:,} 个，{length} 个时 {fixed:,} 个；从 {crossing:.0f} 个词元起更多",
        d=d,
        h=h,
        qkv=last["qkv"],
        first=rows[0]["fixed"],
        short=rows[0]["length"],
        fixed=last["fixed"],
        length=last["length"],
        crossing=crossing,
    )
    if len(more) == len(rows):
        return holds(because)
    if more:
        condition = both(
            "sequences are longer than d_model·√(2/h) tokens: h·n² logits against the 2·d_model² "
            "of W_q and W_k, as W_v and W_o are needed either way",
            "序列长于 d_model·√(2/h) 个词元：h·n² 个 logit 对 W_q 与 W_k 的 2·d_model²，W_v 与 "
            "W_o 两者都需要",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_parameters(figures: Figures) -> tuple[Chart, ...]:
    """Parameters against length."""
    return (_chart(figures["rows"], "", both("parameters", "参数量")),)


def operations(lab: Lab) -> Figures:
    """FLOPs and seconds of both layers against the length."""
    rows = []
    for length in lab.each(lab.pick("lengths", tiny=(32, 64), quick=(64, 256, 1024)), "length"):
        row: dict[str, float] = {"length": length}
        x = torch.empty(1, length, WIDTH, device="meta")
        for name, module in layers(length).items():
            row[f"{name}_flops"] = flops(partial(module, x))
        with torch.device("meta"):  # one matrix from all numbers of a sequence to all
            dense = nn.Linear(length * WIDTH, length * WIDTH, bias=False)
        row["dense_flops"] = flops(partial(dense, x.flatten(1)))
        real, given = layers(length, str(lab.device)), lab.normal(1, length, WIDTH).float()
        fixed = real["fixed"]
        assert isinstance(fixed, FixedAttention)
        known = fixed.logits.softmax(-1)  # the same for every input, so computed once
        calls = [partial(real["qkv"], given), partial(with_weights, fixed, known, given)]
        taken = in_turns(calls, lab.pick("repeats", tiny=1, quick=7), device=lab.device)
        row |= {f"{name}_seconds": each for name, each in zip(real, taken, strict=True)}
        rows.append(row)
    return {"width": WIDTH, "heads": HEADS, "rows": rows}


def with_weights(layer: FixedAttention, weights: Tensor, x: Tensor) -> Tensor:
    """The layer's output from its weights (H, N, N): x (B, N, d) -> (B, N, d)."""
    v = layer.value(x).unflatten(-1, (layer.heads, -1)).transpose(1, 2)  # (B, H, N, d/H)
    return layer.join(weights @ v)


def judge_compute(figures: Figures) -> Verdict:
    """Cheap beside n×n learnt weights, and beside a dense layer, which is what the note means."""
    rows = figures["rows"]
    ratios = [row["qkv_flops"] / row["fixed_flops"] for row in rows]
    dense = [row["dense_flops"] / row["qkv_flops"] for row in rows]
    times = [row["qkv_seconds"] / row["fixed_seconds"] for row in rows]
    because = both(
        "a dense layer over a sequence of {short} to {long} tokens takes {little:,.0f} to "
        "{much:,.0f} times the FLOPs of a layer with Q, K and V; that takes {low:.2f} to "
        "{high:.2f} times the FLOPs of a layer with one learnt weight per head and pair of "
        "tokens, which needs no queries, keys and scores, and {fast:.1f} to {slow:.1f} times "
        "the time",
        "在 {short} 到 {long} 个词元的序列上，全连接层的 FLOPs 是 QKV 层的 {little:,.0f} 到 "
        "{much:,.0f} 倍；而 QKV 层的 FLOPs 是每个头、每对词元只学一个权重的层的 {low:.2f} 到 "
        "{high:.2f} 倍，后者不需要查询、键和分数；时间是 {fast:.1f} 到 {slow:.1f} 倍",
        short=rows[0]["length"],
        long=rows[-1]["length"],
        little=min(dense),
        much=max(dense),
        low=min(ratios),
        high=max(ratios),
        fast=min(times),
        slow=max(times),
    )
    if max(ratios) < 1:
        return holds(because)
    if min(dense) > 1:
        condition = both(
            "“weights learnt directly” means a dense layer over the whole sequence; beside one "
            "weight per pair of tokens Q, K and V cost more",
            "“直接学习权重”指的是整个序列上的全连接层；与每对词元一个权重相比，QKV 更贵",
        )
        return holds_when(condition, because)
    return does_not_hold(because)


def show_compute(figures: Figures) -> tuple[Chart, ...]:
    """FLOPs and seconds against length."""
    return (
        _chart(figures["rows"], "_flops", both("FLOPs", "FLOPs")),
        _chart(figures["rows"], "_seconds", both("seconds", "秒")),
    )


def _chart(rows: list[dict[str, float]], ending: str, y: Sentence) -> Chart:
    curves = series(
        rows,
        "length",
        (f"qkv{ending}", both("Q, K and V", "QKV")),
        (f"fixed{ending}", both("fixed weights", "直接学习的权重")),
        *([("dense_flops", both("dense layer", "全连接层"))] if ending == "_flops" else []),
    )
    title = both(
        "One layer, d_model {d}, {h} heads", "一层，d_model {d}，{h} 个头", d=WIDTH, h=HEADS
    )
    return Chart(title, both("tokens", "词元数"), y, curves, log_x=True, log_y=True)


CLAIMS = (
    Claim(
        id="qkv-parameters",
        kind="derived",
        sentence=both(
            "Weights learnt directly take more parameters: n² per head against 3·d².",
            "直接学习注意力权重的参数量更大：每个头 n²，而 QKV 只需 3·d²。",
        ),
        notes="B",
        experiment=counts,
        rule=judge_parameters,
        shows=show_parameters,
        moves=(
            Move("from", both("tokens", "词元数"), "length", how="from"),
            Move("to", both("tokens", "词元数"), "length"),
        ),
        derivation=both(
            "Both layers need W_v and W_o. Fixed weights have h·n² logits instead of the 2·d² "
            "entries of W_q and W_k: more if n > d·√(2/h).",
            "两种层都需要 W_v 与 W_o。直接学习的权重以 h·n² 个 logit 代替 W_q 与 W_k 的 2·d² "
            "个数：n > d·√(2/h) 时更多。",
        ),
    ),
    Claim(
        id="qkv-compute",
        kind="derived",
        sentence=both(
            "Q, K and V are efficient to compute, compared with weights learnt directly.",
            "与直接学习权重相比，QKV 的计算效率高。",
        ),
        notes="B",
        experiment=operations,
        rule=judge_compute,
        shows=show_compute,
        moves=(
            Move("from", both("tokens", "词元数"), "length", how="from"),
            Move("to", both("tokens", "词元数"), "length"),
        ),
        gpu=True,
        derivation=both(
            "Q, K and V: 8·n·d² for four projections and 4·n²·d for scores and values. Fixed "
            "weights: 4·n·d² for two projections and 2·n²·d for the values. A dense layer over the "
            "sequence: 2·n²·d².",
            "QKV：四个投影 8·n·d²，分数与加权求和 4·n²·d。直接学习的权重：两个投影 4·n·d²，"
            "加权求和 2·n²·d。整个序列上的全连接层：2·n²·d²。",
        ),
    ),
)
