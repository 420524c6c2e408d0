"""The cost formulas of a Transformer layer: cost-layer."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from headwise import attention, cost
from headwise import mask as masks
from headwise.apps.lab.charts import Bars, Listing, bars
from headwise.apps.lab.claim import Claim, Figures, Verdict, both, does_not_hold, holds, holds_when
from headwise.apps.lab.counting import flops, kept_bytes, parameters
from headwise.apps.lab.laboratory import Lab
from headwise.nn import GELU, Block, GrowingCache, MultiHeadAttention


class TextbookLayer(nn.Module):
    """A pre-norm layer with dropout, every step written out: x (b, s, h) -> (b, s, h).

    `fused` replaces softmax(QKᵀ)V by one call that keeps no weights.
    """

    def __init__(self, h: int, a: int, dropout: float, fused: bool = False) -> None:
        super().__init__()
        self.heads, self.dropout, self.fused = a, dropout, fused
        self.norms = nn.ModuleList(nn.LayerNorm(h) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(h, h) for _ in range(4))
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x)
        q, k, v = (  # (b, a, s, h/a)
            z.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for z in (self.q(y), self.k(y), self.v(y))
        )
        x = x + self.dropped(self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)))
        hidden = nn.functional.gelu(self.up(self.norms[1](x)))
        return x + self.dropped(self.down(hidden))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of (b, a, s, d): written out, or fused (without dropout of the weights)."""
        if self.fused:
            return attention(q, k, v, engine="streaming")
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)  # (b, a, s, s)
        return self.dropped(weights) @ v

    def dropped(self, x: Tensor) -> Tensor:
        """Dropout with a mask of one byte per number, as the formula counts it."""
        if self.dropout == 0:
            return x
        return x * (torch.rand_like(x) > self.dropout) / (1 - self.dropout)


SIZES = ((1, 64, 64, 4), (2, 128, 64, 8), (2, 64, 128, 4))
"""Batch b, tokens s, width h, heads a."""


def layer_costs(lab: Lab) -> Figures:
    """Parameters, operations, kept bytes and cache, counted on modules beside the formulas."""
    rows = []
    for b, s, h, a in lab.each(lab.pick(tiny=SIZES[:1], quick=SIZES), "b, s, h, a"):
        with torch.device("meta"):
            x = torch.empty(b, s, h)
            block = Block(h, MultiHeadAttention(h, a), GELU(4 * h).build(h))
        foretold = cost(block, batch=b, queries=s, dtype="bf16")
        rows.append(
            {
                **{"b": b, "s": s, "h": h, "a": a},
                "parameters": parameters(block),
                "parameters_formula": 12 * h**2 + 13 * h,
                "parameters_foretold": foretold.params,
                "flops": flops(partial(block, x)),
                "flops_foretold": foretold.flops,
                "flops_formula": 24 * b * s * h**2 + 4 * b * s**2 * h,
                "bytes": activations(b, s, h, a, dropout=0.1),
                "bytes_formula": 34 * b * s * h + 5 * b * s**2 * a,
                "bytes_without_dropout": activations(b, s, h, a, dropout=0.0),
                "bytes_fused": activations(b, s, h, a, dropout=0.0, fused=True),
                **cache_bytes(b, s, h, a),
            }
        )
    return {"rows": rows}


def activations(b: int, s: int, h: int, a: int, dropout: float, fused: bool = False) -> int:
    """The bytes kept for the backward pass of a layer in half precision, parameters apart."""
    with torch.device("meta"):
        layer = TextbookLayer(h, a, dropout, fused).bfloat16()
        x = torch.empty(b, s, h, dtype=torch.bfloat16, requires_grad=True)
    return kept_bytes(partial(layer, x), leave_out=list(layer.parameters()))


def cache_bytes(b: int, s: int, h: int, a: int, layers: int = 3, new: int = 5) -> dict[str, int]:
    """Bytes of the keys and values after s tokens of a prompt and `new` generated ones."""
    total = 0
    for _ in range(layers):
        attn = MultiHeadAttention(h, a, mask=masks.causal()).bfloat16()
        cache = GrowingCache()
        with torch.no_grad():
            attn(torch.zeros(b, s, h, dtype=torch.bfloat16), cache=cache)
            for _ in range(new):
                attn(torch.zeros(b, 1, h, dtype=torch.bfloat16), cache=cache)
        empty = torch.empty(b, a, 0, h // a, dtype=torch.bfloat16)
        total += sum(x.numel() * x.element_size() for x in cache.append(empty, empty))
    return {"cache": total, "cache_formula": 4 * b * layers * h * (s + new)}


def judge_cost(figures: Figures) -> Verdict:
    """Counts must equal the formulas; kept bytes within 2 %, for the norms' statistics."""
    rows = figures["rows"]
    exact = all(
        row[name] == row[f"{name}_formula"] == row.get(f"{name}_foretold", row[name])
        for row in rows
        for name in ("parameters", "flops", "cache")
    )
    ratios = [row["bytes"] / row["bytes_formula"] for row in rows]
    fused = [row["bytes_fused"] / row["bytes_formula"] for row in rows]
    close = all(abs(ratio - 1) < 0.02 for ratio in ratios)
    because = both(
        "parameters, FLOPs (counted, and by hw.cost) and KV cache equal the formulas {equal} in "
        "{count} sizes; bytes kept are {low:.3f} to {high:.3f} of theirs with dropout and "
        "attention written out, and {fused_low:.2f} to {fused_high:.2f} with fused attention and "
        "no dropout",
        "参数量、FLOPs（实际计数与 hw.cost）与 KV cache 在 {count} 种尺寸下{equal}等于公式；带 "
        "dropout、注意力逐步写出时，保留的字节是公式的 {low:.3f} 到 {high:.3f} 倍，"
        "融合注意力且无 dropout 时是 {fused_low:.2f} 到 {fused_high:.2f} 倍",
        equal=both("exactly", "完全") if exact else both("not", "并不"),
        count=len(rows),
        low=min(ratios),
        high=max(ratios),
        fused_low=min(fused),
        fused_high=max(fused),
    )
    if not exact:
        return does_not_hold(because)
    if not close:
        return does_not_hold(because)
    if min(fused) > 0.98:
        return holds(because)
    condition = both(
        "the layer is GPT-2's (GELU, biases, LayerNorm, dropout), in half precision, and "
        "attention is written out; fused attention keeps no weights and drops the 5bs²a",
        "该层是 GPT-2 的结构（GELU、偏置、LayerNorm、dropout）、半精度，且注意力逐步写出；"
        "融合注意力不保存权重，没有 5bs²a 这一项",
    )
    return holds_when(condition, because)


def show_cost(figures: Figures) -> tuple[Listing | Bars, ...]:
    """Counted beside the formulas."""
    names = (
        ("parameters", both("parameters: 12h² + 13h", "参数：12h² + 13h")),
        ("flops", both("FLOPs: 24bsh² + 4bs²h", "FLOPs：24bsh² + 4bs²h")),
        ("bytes", both("kept bytes: 34bsh + 5bs²a", "保留字节：34bsh + 5bs²a")),
        ("cache", both("cache bytes, 3 layers: 4blh(s + n)", "缓存字节，3 层：4blh(s + n)")),
    )
    sizes = [
        both("b {b}, s {s}, h {h}, a {a}", "b {b}, s {s}, h {h}, a {a}", **row)
        for row in figures["rows"]
    ]
    rows = [
        (label, size, row[name], row[f"{name}_formula"])
        for name, label in names
        for size, row in zip(sizes, figures["rows"], strict=True)
    ]
    rows += [
        (
            both("kept bytes, fused, no dropout", "保留字节，融合，无 dropout"),
            size,
            row["bytes_fused"],
            None,
        )
        for size, row in zip(sizes, figures["rows"], strict=True)
    ]
    headings = (
        both("quantity", "量"),
        both("size", "尺寸"),
        both("counted", "计数"),
        both("formula", "公式"),
    )
    kinds = (
        ("bytes", both("written out, dropout", "逐步写出，dropout")),
        ("bytes_without_dropout", both("written out", "逐步写出")),
        ("bytes_fused", both("fused", "融合")),
    )
    kept = bars(
        both("Bytes kept for the backward pass", "为反向传播保留的字节"),
        both("share of 34bsh + 5bs²a", "占 34bsh + 5bs²a 的比例"),
        sizes,
        *(
            (label, [row[name] / row["bytes_formula"] for row in figures["rows"]])
            for name, label in kinds
        ),
    )
    return Listing(both("One layer", "一层"), headings, tuple(rows)), kept


CLAIMS = (
    Claim(
        id="cost-layer",
        kind="derived",
        sentence=both(
            "A layer has 12h² + 13h parameters and takes 24bsh² + 4bs²h FLOPs, 34bsh + 5bs²a "
            "bytes of activations and, over l layers, 4blh(s + n) bytes of KV cache.",
            "一层有 12h² + 13h 个参数，需要 24bsh² + 4bs²h 次浮点运算、34bsh + 5bs²a "
            "字节的中间激活，l 层共需 4blh(s + n) 字节的 KV cache。",
        ),
        notes="B",
        experiment=layer_costs,
        rule=judge_cost,
        shows=show_cost,
        derivation=both(
            "Parameters: 4h² + 4h of attention, 8h² + 5h of the feed-forward layer, 4h of two "
            "norms. FLOPs: 8bsh² of projections, 4bs²h of scores and values, 16bsh² of the "
            "feed-forward layer. Bytes, two per number: 11bsh + 5bs²a of attention, 19bsh of the "
            "feed-forward layer, 4bsh of the norms' inputs. Cache: keys and values, 2 · 2 bytes "
            "· blh per token.",
            "参数：注意力 4h² + 4h，前馈层 8h² + 5h，两个归一化 4h。FLOPs：投影 8bsh²，"
            "分数与加权求和 4bs²h，前馈层 16bsh²。字节（每个数两字节）：注意力 11bsh + 5bs²a，"
            "前馈层 19bsh，归一化的输入 4bsh。缓存：每个词元的键与值，2 · 2 字节 · blh。",
        ),
    ),
)
