"""Triton kernels for stacks of small models on a GPU: short attention, and layer norm.

A sentence of at most 32 tokens fits into one program, which reads q, k and v where the linear
layers have left them and keeps the weights in registers. As PyTorch's operators the same takes ten
times as many launches, each over all of memory, and they would be half of a training step.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs, disable-error-code="annotation-unchecked"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 8
"""Rows of a norm that a program takes at a time."""
PARTS = 64
"""Programs for each model that sum the gradients of a norm's parameters."""
COUNTS = ["N", "M", "each"]
"""Arguments that differ from batch to batch and are not compiled for."""


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _tile(x, b, h, rows, columns, size, heads, width):
    """The rows of head h of sentence b in x (B, size, heads · width)."""
    place = (b * size + rows[:, None]) * heads * width + h * width + columns[None, :]
    return x + place, (rows[:, None] < size) & (columns[None, :] < width)


@triton.jit
def _weights(
    q, K, W, lengths, b, h, n, m, d, scale, N, M, H, D, each,
    ADDITIVE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Softmax of the logits of q (n, d): (n, m)."""
    if ADDITIVE:
        w = tl.load(W + (b // each * H + h) * D + d, mask=d < D, other=0.0).to(tl.float32)
        s = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
        for j in range(M):
            k = tl.load(K + ((b * M + j) * H + h) * D + d, mask=d < D, other=0.0).to(tl.float32)
            one = tl.sum(_tanh(q.to(tl.float32) + k[None, :]) * w[None, :], 1)
            s += tl.where(m[None, :] == j, one[:, None], 0.0)
    else:
        place, there = _tile(K, b, h, m, d, M, H, D)
        k = tl.load(place, mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    last = M
    if MASKED:
        last = tl.load(lengths + b).to(tl.int32)
    seen = (m[None, :] < last) & (n[:, None] >= 0)
    if CAUSAL:
        seen = seen & (m[None, :] <= n[:, None])
    s = tl.where(seen, s, float("-inf"))
    p = tl.exp(s - tl.max(s, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit(do_not_specialize=COUNTS)
def _forward(
    Q, K, V, W, OUT, lengths, scale, N, M, H, D, DV, each,
    NP: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    ADDITIVE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, m, d, e = tl.arange(0, NP), tl.arange(0, MP), tl.arange(0, DP), tl.arange(0, DVP)
    place, there = _tile(Q, b, h, n, d, N, H, D)
    q = tl.load(place, mask=there, other=0.0)
    p = _weights(q, K, W, lengths, b, h, n, m, d, scale, N, M, H, D, each, ADDITIVE, CAUSAL, MASKED)
    place, there = _tile(V, b, h, m, e, M, H, DV)
    v = tl.load(place, mask=there, other=0.0)
    out = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    place, there = _tile(OUT, b, h, n, e, N, H, DV)
    tl.store(place, out.to(OUT.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=COUNTS)
def _backward(
    Q, K, V, W, G, DQ, DK, DVALUES, DW, lengths, scale, N, M, H, D, DV, each,
    NP: tl.constexpr, MP: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    ADDITIVE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    b, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n, m, d, e = tl.arange(0, NP), tl.arange(0, MP), tl.arange(0, DP), tl.arange(0, DVP)
    place, there = _tile(Q, b, h, n, d, N, H, D)
    q = tl.load(place, mask=there, other=0.0)
    p = _weights(q, K, W, lengths, b, h, n, m, d, scale, N, M, H, D, each, ADDITIVE, CAUSAL, MASKED)
    place, there = _tile(V, b, h, m, e, M, H, DV)
    v = tl.load(place, mask=there, other=0.0)
    place, outside = _tile(G, b, h, n, e, N, H, DV)
    g = tl.load(place, mask=outside, other=0.0)  # rows beyond the sentence give no gradient
    place, there = _tile(DVALUES, b, h, m, e, M, H, DV)
    dv = tl.dot(tl.trans(p.to(g.dtype)), g, input_precision="ieee")
    tl.store(place, dv.to(DVALUES.dtype.element_ty), mask=there)
    dp = tl.dot(g, tl.trans(v), input_precision="ieee")
    ds = p * (dp - tl.sum(p * dp, 1)[:, None])
    if ADDITIVE:
        w = tl.load(W + (b // each * H + h) * D + d, mask=d < D, other=0.0).to(tl.float32)
        dq = tl.zeros((NP, DP), tl.float32)
        dw = tl.zeros((DP,), tl.float32)
        for j in range(M):
            k = tl.load(K + ((b * M + j) * H + h) * D + d, mask=d < D, other=0.0).to(tl.float32)
            t = _tanh(q.to(tl.float32) + k[None, :])
            one = tl.sum(tl.where(m[None, :] == j, ds, 0.0), 1)[:, None]  # (n, 1)
            dw += tl.sum(one * t, 0)
            inner = one * w[None, :] * (1.0 - t * t)
            dq += inner
            dk = tl.sum(inner, 0).to(DK.dtype.element_ty)
            tl.store(DK + ((b * M + j) * H + h) * D + d, dk, mask=d < D)
        tl.store(DW + (b * H + h) * D + d, dw, mask=d < D)
    else:
        ds = (ds * scale).to(q.dtype)
        place, there = _tile(K, b, h, m, d, M, H, D)
        k = tl.load(place, mask=there, other=0.0)
        dq = tl.dot(ds, k, input_precision="ieee")
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee")
        place, there = _tile(DK, b, h, m, d, M, H, D)
        tl.store(place, dk.to(DK.dtype.element_ty), mask=there)
    place, there = _tile(DQ, b, h, n, d, N, H, D)
    tl.store(place, dq.to(DQ.dtype.element_ty), mask=there)


class ShortAttention(torch.autograd.Function):
    """q (B, N, H · D), k (B, M, H · D), v (B, M, H · D_v) -> (B, N, H · D_v).

    `weight` (R, H, D) makes the score additive, for the model of each sentence; `lengths` (B,) are
    those of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor | None,
        lengths: Tensor | None,
        heads: int,
        scale: float,
        causal: bool,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out = v.new_empty(*q.shape[:2], v.shape[2])
        ctx.given = (heads, scale, causal)
        ctx.save_for_backward(q, k, v, weight, lengths)
        _launch(_forward, (q, k, v, weight, out), lengths, heads, scale, causal)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, weight, lengths = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        dw = None
        if weight is not None:
            dw = torch.empty(len(q), *weight.shape[1:], device=q.device, dtype=torch.float32)
        tensors = (q, k, v, weight, gradient.contiguous(), dq, dk, dv, dw)
        _launch(_backward, tensors, lengths, *ctx.given)
        if dw is not None:
            dw = dw.unflatten(0, (len(weight), -1)).sum(1).to(weight.dtype)
        return dq, dk, dv, dw, None, None, None, None


def _launch(
    kernel: Any,
    tensors: tuple[Tensor | None, ...],
    lengths: Tensor | None,
    heads: int,
    scale: float,
    causal: bool,
) -> None:
    """Launch one program for each sentence and head."""
    q, k, v, weight, *_ = tensors
    assert q is not None and k is not None and v is not None
    width, wide = q.shape[2] // heads, v.shape[2] // heads
    padded = [max(16, triton.next_power_of_2(x)) for x in (q.shape[1], k.shape[1], width, wide)]
    kernel[(len(q), heads)](
        *(q if x is None else x for x in tensors),
        q if lengths is None else lengths,
        scale,
        q.shape[1],
        k.shape[1],
        heads,
        width,
        wide,
        1 if weight is None else len(q) // len(weight),
        *padded,
        ADDITIVE=weight is not None,
        CAUSAL=causal,
        MASKED=lengths is not None,
        num_warps=1 if max(padded) <= 32 else 4,
    )


@triton.jit
def _norm(X, W, B, Y, size, width, eps, P: tl.constexpr, ROWS: tl.constexpr):
    run = tl.program_id(1).to(tl.int64)
    rows, columns = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, P)
    there = (rows[:, None] < size) & (columns[None, :] < width)
    place = (run * size + rows[:, None]) * width + columns[None, :]
    x = tl.load(X + place, mask=there, other=0.0).to(tl.float32)
    x = tl.where(there, x - tl.sum(x, 1)[:, None] / width, 0.0)
    even = x * tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
    w = tl.load(W + run * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    b = tl.load(B + run * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    tl.store(Y + place, (even * w[None, :] + b[None, :]).to(Y.dtype.element_ty), mask=there)


@triton.jit
def _norm_backward(
    X, W, G, DX, DW, DB, size, width, eps, each, P: tl.constexpr, ROWS: tl.constexpr
):
    part, run = tl.program_id(0), tl.program_id(1).to(tl.int64)
    columns = tl.arange(0, P)
    w = tl.load(W + run * width + columns, mask=columns < width, other=0.0).to(tl.float32)
    dw, db = tl.zeros((P,), tl.float32), tl.zeros((P,), tl.float32)
    for first in range(part * each, part * each + each, ROWS):
        rows = first + tl.arange(0, ROWS)
        there = (rows[:, None] < size) & (columns[None, :] < width)
        place = (run * size + rows[:, None]) * width + columns[None, :]
        x = tl.load(X + place, mask=there, other=0.0).to(tl.float32)
        g = tl.load(G + place, mask=there, other=0.0).to(tl.float32)
        x = tl.where(there, x - tl.sum(x, 1)[:, None] / width, 0.0)
        scale = tl.rsqrt(tl.sum(x * x, 1) / width + eps)[:, None]
        even = x * scale
        dw += tl.sum(g * even, 0)
        db += tl.sum(g, 0)
        inner = g * w[None, :]
        level, slope = tl.sum(inner, 1)[:, None] / width, tl.sum(inner * even, 1)[:, None] / width
        dx = scale * (inner - level - even * slope)
        tl.store(DX + place, dx.to(DX.dtype.element_ty), mask=there)
    place = (run * tl.num_programs(0) + part) * width + columns
    tl.store(DW + place, dw, mask=columns < width)
    tl.store(DB + place, db, mask=columns < width)


class ShortNorm(torch.autograd.Function):
    """Layer norm of x (R, rows, width) with the weight and bias (R, width) of each model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
        runs, size, width = x.shape
        out, ctx.eps = torch.empty_like(x), eps
        ctx.save_for_backward(x, weight)
        grid = (triton.cdiv(size, ROWS), runs)
        _norm[grid](x, weight, bias, out, size, width, eps, triton.next_power_of_2(width), ROWS)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        runs, size, width = x.shape
        each = triton.cdiv(triton.cdiv(size, PARTS), ROWS) * ROWS
        parts = triton.cdiv(size, each)
        dx, sums = torch.empty_like(x), x.new_empty(2, runs, parts, width, dtype=torch.float32)
        _norm_backward[(parts, runs)](
            x, weight, gradient.contiguous(), dx, sums[0], sums[1], size, width, ctx.eps, each,
            triton.next_power_of_2(width), ROWS,
        )  # fmt: skip
        dw, db = sums.sum(2).to(weight.dtype)
        return dx, dw, db, None
