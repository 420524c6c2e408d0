"""Device functions of the backward kernels: a tile's weights and the gradient of its logits.

Each program owns the rows it writes and reads its inputs again, so there are no atomics and the
result is deterministic.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import LN2, LOG2E, NOTHING, kept, load_tile

UNWEIGHTED = tl.constexpr(float("inf"))  # the base of a row without weights

WHOLE = tl.constexpr(128)  # rows of the largest tile


class Rows(NamedTuple):
    """The constants of each query row in the backward, (B, Hq, N) float32 each.

    For dot scores N is padded to a multiple of WHOLE, and rows past the end have weights of zero:
    loads that are aligned and need no mask take half as many instructions.
    """

    base: Tensor  # the largest logit; UNWEIGHTED for a row without weights
    rest: Tensor  # lse - base before rounding, in base 2
    shared: Tensor  # subtracted from every dP of the row
    entropy: Tensor | None  # the entropy's gradient


@triton.jit
def weigh(
    s, bent, dp, t, z, rows, j, hashed, base, rest, shared, entropy, CAP: tl.constexpr
):  # fmt: skip
    """Return the weights after dropout, ∂ logits, and ∂ raw scores / scale, from logits and dP."""
    e = tl.fma(s - base, LOG2E, -rest)
    # Rounding of large logits may push a weight above 1.
    e = tl.minimum(e, 0.0, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(e)
    met = p
    if t.seed is not None:
        keep = kept(hashed, j + z.first_key, z.threshold)
        met = tl.where(keep, p * z.kept_share, 0.0)
        dp = tl.where(keep, dp * z.kept_share, 0.0)
    off = dp - shared
    if rows.entropy is not None:
        off -= entropy * (tl.where(p == 0.0, 0.0, e) * LN2)  # 0 · inf
    ds = p * off
    raw = ds
    if CAP:
        raw = ds * (1.0 - bent * bent)
    return met, ds, raw


@triton.jit
def row_numbers(rows, line, i):
    """Load the constants of rows i of a head, whose constants start at `line`."""
    base, rest = tl.load(rows.base + line + i), tl.load(rows.rest + line + i)
    shared = tl.load(rows.shared + line + i)
    entropy = shared
    if rows.entropy is not None:
        entropy = tl.load(rows.entropy + line + i)
    return base, rest, shared, entropy


@triton.jit
def whole_rows(z, b, heads, h):
    """Return the offset of a head's constants of rows, padded to WHOLE blocks."""
    return (b * heads + h).to(tl.int64) * (tl.cdiv(z.queries, WHOLE) * WHOLE)


_STRIDES = ["left_batch", "left_head", "left_row", "right_batch", "right_head", "right_row"]


@triton.jit(do_not_specialize=[*_STRIDES, "queries"])
def fill_rows(
    left, right, left_batch, left_head, left_row, right_batch, right_head, right_row,
    max_logit, log_total, rows, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the rows' base, rest and Σ left · right along the last axis, in WHOLE blocks of rows.

    left and right are (B, H, N, D), max_logit and log_total (B, H, N). Strides are in multiples of
    UNIT, so that the compiler can use wide loads.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    strides = (left_batch * UNIT, left_head * UNIT, left_row * UNIT)
    one = load_tile(left, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    strides = (right_batch * UNIT, right_head * UNIT, right_row * UNIT)
    two = load_tile(right, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    shared = tl.sum(one.to(tl.float32) * two.to(tl.float32), 1)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    base = tl.load(max_logit + head * queries + i, mask=here, other=UNWEIGHTED)
    rest = tl.load(log_total + head * queries + i, mask=here, other=0.0)
    line = head * (tl.num_programs(0) * ROWS) + i
    tl.store(rows.base + line, tl.where(base == NOTHING, UNWEIGHTED, base))
    tl.store(rows.rest + line, rest * LOG2E)
    tl.store(rows.shared + line, shared)
