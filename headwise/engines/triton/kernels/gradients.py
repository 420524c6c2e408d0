"""Device functions of the backward kernels: a tile's weights from lse, the gradient of its logits.

Each program owns the rows it writes and reads its inputs again, so there are no atomics and the
result is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import LN2, LOG2E, NOTHING, kept, load_tile, unit_of

WHOLE = tl.constexpr(128)  # rows of the largest tile


class Rows(NamedTuple):
    """The constants of each query row in the backward, (B, Hq, N) float32 each.

    For dot scores N is padded to a multiple of WHOLE, and rows past the end have weights of zero:
    loads that are aligned and need no mask take half as many instructions.
    """

    lse: Tensor
    shared: Tensor  # subtracted from every dP of the row
    entropy: Tensor | None  # the entropy's gradient


@triton.jit
def within_reach(lse):
    """Return lse of rows that have weights; a sink's may be too large to multiply by LOG2E.

    Rows that see no key have weights of 0 whatever it is, and so have all keys beside such a sink.
    """
    lse = tl.where(lse == NOTHING, 0.0, lse)
    return tl.where(lse > 2.3e38, 2.3e38, lse)


@triton.jit
def weigh(
    s, bent, dp, t, z, rows, j, hashed, lse, shared, entropy,
    PLAIN: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return the weights after dropout, ∂ logits, and ∂ raw scores / scale, from logits and dP."""
    unit = unit_of(z, PLAIN, CAP)
    e = s * unit - lse * LOG2E
    if t.bias is not None:  # a large one may push a weight above 1 by rounding
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
    """Load lse, `shared` and the entropy's gradient; rows past the end have no weight."""
    lse = tl.load(rows.lse + line + i, mask=here, other=1e30)
    lse = within_reach(lse)
    shared = tl.load(rows.shared + line + i, mask=here, other=0.0)
    entropy = shared
    if rows.entropy is not None:
        entropy = tl.load(rows.entropy + line + i, mask=here, other=0.0)
    return lse, shared, entropy


@triton.jit
def whole_rows(z, b, heads, h):
    """Return the offset of a head's constants of rows, padded to WHOLE blocks."""
    return (b * heads + h).to(tl.int64) * (tl.cdiv(z.queries, WHOLE) * WHOLE)


_STRIDES = ["left_batch", "left_head", "left_row", "right_batch", "right_head", "right_row"]


@triton.jit(do_not_specialize=[*_STRIDES, "queries"])
def fill_rows(
    left, right, left_batch, left_head, left_row, right_batch, right_head, right_row, lse, found,
    queries, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write lse and Σ left · right along the last axis, (2, B, H, N in WHOLE blocks) float32.

    left and right are (B, H, N, D). Strides are in multiples of UNIT, so that the compiler can use
    wide loads.
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
    known = within_reach(known)
    length = tl.num_programs(0) * ROWS
    heads = (tl.num_programs(1) * tl.num_programs(2)).to(tl.int64)
    tl.store(found + head * length + i, known)
    tl.store(found + (heads + head) * length + i, product)
