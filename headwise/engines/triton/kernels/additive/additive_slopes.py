"""Contributions of a tile's ∂ score to the gradients of q, k and the weight, in every dimension.

∂s/∂q_d = w_d (1 - tanh²) = 4 w_d r (1 - r) with r = 1 / (1 + e^{2q} e^{2k}). To compute ∂ score, a
thread held pairs of a row and a key. To sum slopes, a thread owns rows (or keys) in some
dimensions and loops over the others, so that nothing is summed across threads. For that, ∂ score is
written to memory and read back number by number. Two pairs share a reciprocal.

Owners and dimensions are spread over five axes: (dimensions per thread, owners per thread, warps,
lanes along the owners, lanes along the dimensions).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import reciprocal, tanh

FAR_APART = tl.constexpr(20.0)  # (1 + e^{2·20})² < 2^126
CLOSE = tl.constexpr(0.25)  # if no |q + k| is larger, tanh = 1 - 2r loses relative precision


class Side(NamedTuple):
    """A block of rows, or of keys, of one head."""

    powers: Tensor  # e^{2x} of the head, row by row
    sums: Tensor  # x of the head itself, for q + k
    step: int  # from one row of x to the next
    first: int  # first row of the block
    last: int  # last row of the head
    size: float  # the largest |x| of the block


@triton.jit
def close_tanh(x):
    """Return tanh x with a small relative error."""
    y = x * x
    series = 1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
    return tl.where(tl.abs(x) < CLOSE, x * series, tanh(x))


@triton.jit
def owners(COUNT: tl.constexpr, WARPS: tl.constexpr, PADDED: tl.constexpr):
    """Return the owners, spread: (1, owners per thread, warps, lanes, 1)."""
    LANES: tl.constexpr = 32 // min(PADDED, 32)
    EACH: tl.constexpr = COUNT // (WARPS * LANES)
    place = tl.arange(0, WARPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    rows = tl.arange(0, EACH)[:, None, None] + place[None, :, :] * EACH
    return rows[None, :, :, :, None]


@triton.jit
def dimensions(PADDED: tl.constexpr):
    """Return the dimensions, spread: (dimensions per thread, 1, 1, 1, lanes)."""
    LANES: tl.constexpr = min(PADDED, 32)
    found = tl.arange(0, PADDED // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    return found[:, None, None, None, :]


@triton.jit
def gathered(x, COUNT: tl.constexpr, PADDED: tl.constexpr):
    """Gather spread numbers into (COUNT, PADDED)."""
    return x.permute(2, 3, 1, 0, 4).reshape(COUNT, PADDED)


@triton.jit
def no_slopes(COUNT: tl.constexpr, WARPS: tl.constexpr, PADDED: tl.constexpr):
    """Return zeros for COUNT owners and PADDED dimensions, spread."""
    LANES: tl.constexpr = min(PADDED, 32)
    return tl.zeros(
        [PADDED // LANES, COUNT * LANES // (WARPS * 32), WARPS, 32 // LANES, LANES], tl.float32
    )


@triton.jit
def side_of_rows(powers, q, qs, z, b, h, heads, block, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the side of a block of rows of a head."""
    head = b * heads + h
    place = 2 * (head * tl.cdiv(z.queries, ROWS) + block) + 1
    return Side(
        powers.rows + head.to(tl.int64) * z.queries * WIDTH,
        q + b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1],
        qs[2], block * ROWS, z.queries - 1, tl.load(powers.row_reach + place),
    )  # fmt: skip


@triton.jit
def side_of_keys(powers, k, ks, z, b, h, heads, block, KEYS: tl.constexpr, WIDTH: tl.constexpr):
    """Return the side of a block of keys of a head's key head."""
    kh = h // z.group
    head = b * (heads // z.group) + kh
    place = 2 * (head * tl.cdiv(z.keys, KEYS) + block) + 1
    return Side(
        powers.keys + head.to(tl.int64) * z.keys * WIDTH,
        k + b.to(tl.int64) * ks[0] + kh.to(tl.int64) * ks[1],
        ks[2], block * KEYS, z.keys - 1, tl.load(powers.key_reach + place),
    )  # fmt: skip


@triton.jit
def own(
    start, step, side, COUNT: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Load the owners' numbers from `start` on, `step` apart, in float32, spread; zeros outside."""
    row, column = side.first + tl.arange(0, COUNT)[:, None], tl.arange(0, PADDED)[None, :]
    inside = (row <= side.last) & (column < WIDTH)
    x = tl.load(start + row.to(tl.int64) * step + column, mask=inside, other=0.0).to(tl.float32)
    LANES: tl.constexpr = min(PADDED, 32)
    x = x.reshape(WARPS, 32 // LANES, COUNT * LANES // (WARPS * 32), PADDED // LANES, LANES)
    return x.permute(3, 2, 0, 1, 4)


@triton.jit
def near_slopes(
    total, turned, room, mine, theirs, COUNT: tl.constexpr, OTHERS: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Compute `slopes` from powers."""
    a = own(mine.powers, WIDTH, mine, COUNT, WARPS, WIDTH, PADDED)
    others = theirs.powers + tl.minimum(dimensions(PADDED), WIDTH - 1)
    for n in tl.range(0, OTHERS, 2):
        x = 1.0 + a * tl.load(others + tl.minimum(theirs.first + n, theirs.last) * WIDTH)
        y = 1.0 + a * tl.load(others + tl.minimum(theirs.first + n + 1, theirs.last) * WIDTH)
        shared = reciprocal(x * y)
        x, y = shared * y, shared * x
        one, two = tl.load(room + n * COUNT), tl.load(room + (n + 1) * COUNT)
        total += one * (x - x * x)
        total += two * (y - y * y)
        if TURN:
            turned += one * (1.0 - 2.0 * x)
            turned += two * (1.0 - 2.0 * y)
    return total, turned


@triton.jit
def far_slopes(
    total, turned, room, mine, theirs, COUNT: tl.constexpr, OTHERS: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Compute `slopes` from the sums q + k themselves."""
    x = own(mine.sums, mine.step, mine, COUNT, WARPS, WIDTH, PADDED)
    others = theirs.sums + tl.minimum(dimensions(PADDED), WIDTH - 1)
    for n in tl.range(0, OTHERS):
        at = tl.minimum(theirs.first + n, theirs.last).to(tl.int64) * theirs.step
        each = tl.load(room + n * COUNT)
        bent = close_tanh(x + tl.load(others + at).to(tl.float32))
        bent = tl.where(each == 0.0, 0.0, bent)  # a hidden key may hold NaN
        total += each * (0.25 - 0.25 * bent * bent)
        if TURN:
            turned += each * bent
    return total, turned


@triton.jit
def slopes(
    total, turned, raw, room, mine, theirs, COUNT: tl.constexpr, OTHERS: tl.constexpr,
    WARPS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """Add Σ raw (1 - tanh²) / 4 over the others to `total`, for each owner and dimension, and if
    TURN, Σ raw tanh to `turned`.

    raw is (OTHERS, COUNT), 0 for hidden keys; `room` is scratch memory of that size.
    """
    at = room + tl.arange(0, OTHERS)[:, None] * COUNT + tl.arange(0, COUNT)[None, :]
    tl.debug_barrier()  # until every thread has read the previous tile
    tl.store(at, raw)
    tl.debug_barrier()
    room += owners(COUNT, WARPS, PADDED)
    size = mine.size + theirs.size
    if (size > CLOSE) & (size < FAR_APART):
        total, turned = near_slopes(
            total, turned, room, mine, theirs, COUNT, OTHERS, WARPS, WIDTH, PADDED, TURN,
        )  # fmt: skip
    else:
        total, turned = far_slopes(
            total, turned, room, mine, theirs, COUNT, OTHERS, WARPS, WIDTH, PADDED, TURN,
        )  # fmt: skip
    return total, turned
