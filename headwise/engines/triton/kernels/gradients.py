"""What the backward kernels share: a tile's weights from lse, and the gradient of its logits.

Each program owns the rows it writes and reads what it needs again, so there are no atomics and
the result is the same every time.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import LN2, LOG2E, NOTHING, kept, load_tile, unit_of

WHOLE = tl.constexpr(128)  # rows of the largest tile


class Rows(NamedTuple):
    """What backward knows of each query row, (B, Hq, N) float32 each.

    Dot products' come in WHOLE blocks of rows, those past the end with weights of zero: without a
    mask, and aligned, they take the loop over rows half as many instructions.
    """

    lse: Tensor
    shared: Tensor  # subtracted from every dP of the row
    entropy: Tensor | None  # the entropy's gradient


@triton.jit
def weigh(
    s, bent, dp, t, z, rows, j, hashed, lse, shared, entropy,
    PLAIN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """From logits and dP: the weights that met the values, ∂ logits, ∂ raw scores / scale."""
    unit = unit_of(z, PLAIN, CAP)
    e = s * unit - lse * LOG2E
    if t.bias is not None:  # where it rules a row, rounding could make a weight of 1 larger
        e = tl.minimum(e, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(e)
    met = p
    if t.seed is not None:
        keep = kept(hashed, j + z.first_key, z.threshold)
        met = tl.where(keep, p * z.kept_share, 0.0)
        dp = tl.where(keep, dp * z.kept_share, 0.0)
    off = dp - shared
    if rows.entropy is not None:
        off -= entropy * (e * LN2)
    ds = p * off
    raw = ds
    if CAP:
        raw = ds * (1.0 - bent * bent)
    return met, ds, raw


@triton.jit
def row_numbers(rows, line, i, here):
    """lse, what a row shares, its entropy's gradient; a row that is not there weighs nothing."""
    lse = tl.load(rows.lse + line + i, mask=here, other=1e30)
    lse = tl.where(lse == NOTHING, 0.0, lse)  # such a row's weights are 0 all the same
    shared = tl.load(rows.shared + line + i, mask=here, other=0.0)
    entropy = shared
    if rows.entropy is not None:
        entropy = tl.load(rows.entropy + line + i, mask=here, other=0.0)
    return lse, shared, entropy


@triton.jit
def whole_rows(z, b, heads, h):
    """Where the numbers of a head's rows start, when they come in WHOLE blocks."""
    return (b * heads + h).to(tl.int64) * (tl.cdiv(z.queries, WHOLE) * WHOLE)


_STRIDES = ["left_batch", "left_head", "left_row", "right_batch", "right_head", "right_row"]


@triton.jit(do_not_specialize=[*_STRIDES, "queries"])
def fill_rows(
    left, right, left_batch, left_head, left_row, right_batch, right_head, right_row, lse, found,
    queries, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """lse and Σ left · right along the last axis, (2, B, H, N in WHOLE blocks) float32.

    left and right are (B, H, N, D). Strides count in UNITs, so that wide loads are known to be
    lawful.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    strides = (left_batch * UNIT, left_head * UNIT, left_row * UNIT)
    one = load_tile(left, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    strides = (right_batch * UNIT, right_head * UNIT, right_row * UNIT)
    two = load_tile(right, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    product = tl.sum(one.to(tl.float32) * two.to(tl.float32), 1)
    i = block * ROWS + tl.arange(0, ROWS)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    known = tl.load(lse + head * queries + i, mask=i < queries, other=1e30)
    known = tl.where(known == NOTHING, 0.0, known)  # such a row's weights are 0 all the same
    length = tl.num_programs(0) * ROWS
    heads = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64)
    tl.store(found + head * length + i, known)
    tl.store(found + (heads + head) * length + i, product)
