"""One tile of the score matrix, inside a kernel: loads, what bends a logit, masks, dropout.

Kernels are written for tiles of (rows, keys), and for their transposes where the backward wants
keys first: every function here takes positions that broadcast, so one text serves both.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.cap import capped
from headwise.engines.triton.cards import INTERPRETING

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GOLDEN = tl.constexpr(0x9E3779B9)
NOTHING = tl.constexpr(float("-inf"))
INTERPRETED = tl.constexpr(INTERPRETING)
FAR = tl.constexpr(-1e30)  # the score of a key that is not seen: finite, so 0 · FAR is 0


class Given(NamedTuple):
    """What bends the logits, as a kernel takes it. None costs a kernel nothing."""

    intervals: Tensor | None  # (P, 2, B|1, Hq|1, N) int32, contiguous
    dense: Tensor | None  # (B|1, Hq|1, N|1, M|1) as int8
    dense_strides: tuple[int, ...] | None
    bias: Tensor | None
    bias_strides: tuple[int, ...] | None
    position: Tensor | None  # (B|1, N) int32; None: row i stands beside i + shift
    slopes: Tensor | None  # (Hq,)
    relative: Tensor | None  # (Hq, 2R + 1)
    sinks: Tensor | None  # (Hq,)
    seed: Tensor | None  # () int64


class Sizes(NamedTuple):
    """The numbers of a call, as its functions take them.

    A kernel takes them one by one, because only so can it be told (by LOOSE) not to be compiled
    again when one of them becomes 1 or a multiple of 16.
    """

    queries: int
    keys: int
    group: int  # query heads a key head
    first_key: int
    reach: int  # R of the relative table
    shift: int  # where there are no positions
    low: int  # row i sees no more than [i + low, i + high)
    high: int
    interval_step: int  # from `first` to `last`, and on to the next piece
    interval_batch: int
    interval_head: int
    position_batch: int
    threshold: int  # the smallest hash that dropout keeps
    scale: float
    softcap: float
    kept_share: float  # 1 / (1 - dropout)


LOOSE = [*Sizes._fields]


@triton.jit
def load_tile(
    x, strides, b, h, first, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows [first, first + ROWS) of x[b, h], (ROWS, PADDED); zeros outside of (limit, WIDTH)."""
    if TMA:
        tile = x.load([b, h, first, 0]).reshape(ROWS, PADDED)
    else:
        start = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        start += first.to(tl.int64) * strides[2]
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, PADDED)[None, :]
        inside = (row < limit - first) & (column < WIDTH)
        tile = tl.load(start + row * strides[2] + column, mask=inside, other=0.0)
    return tile


@triton.jit
def tanh(x):
    """From one exponential and one reciprocal; the absolute error is 2e-7."""
    return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def reciprocal(x):
    """1 / x to the last bit but one, of which a division would make six instructions."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def bend(s, t, z, b, h, i, j, position, CAP: tl.constexpr):
    """cap(scale · s) + bias for rows i and keys j of the call, and tanh where there is a cap."""
    bent = s
    if CAP:
        bent = capped(s, z.scale / z.softcap)
        s = z.softcap * bent
    else:
        s = s * z.scale
    if t.bias is not None:
        inside = (i < z.queries) & (j < z.keys)
        s += tl.load(_entry(t.bias, t.bias_strides, b, h, i, j), mask=inside, other=0.0).to(
            tl.float32
        )
    if t.slopes is not None:
        away = tl.abs(position - (j + z.first_key)).to(tl.float32)
        s -= tl.load(t.slopes + h).to(tl.float32) * away
    if t.relative is not None:
        index = tl.minimum(tl.maximum(position - (j + z.first_key), -z.reach), z.reach) + z.reach
        s += tl.load(t.relative + h * (2 * z.reach + 1) + index).to(tl.float32)
    return s, bent


@triton.jit
def unit_of(z, PLAIN: tl.constexpr, CAP: tl.constexpr):
    """What makes a power of two of a score that `scores` returned."""
    unit = LOG2E
    if PLAIN:
        unit = (z.softcap if CAP else z.scale) * LOG2E
    return unit


@triton.jit
def scores(s, t, z, b, h, i, j, position, PLAIN: tl.constexpr, CAP: tl.constexpr):
    """From raw scores to logits, and tanh where there is a cap.

    PLAIN scores, to which nothing is added, stay as they are, or tanh: `unit_of` says of what.
    """
    bent = s
    if not PLAIN:
        s, bent = bend(s, t, z, b, h, i, j, position, CAP)
    elif CAP:
        bent = capped(s, z.scale / z.softcap)
        s = bent
    return s, bent


@triton.jit
def logits(
    s, t, z, b, h, i, j, position, first, last,
    PLAIN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """As `scores`, and FAR where a row does not see a key.

    MASKED: some rows do not see some keys of the tile.
    """
    s, bent = scores(s, t, z, b, h, i, j, position, PLAIN, CAP)
    if t.bias is not None:
        s = tl.where(s == NOTHING, FAR, s)  # a bias may hide a key
    if MASKED:
        if t.dense is not None:
            s = tl.where(dense_seen(t, z, b, h, i, j), s, FAR)
        else:
            # one comparison instead of two: a key before the first is far after it, unsigned
            length = tl.maximum(last - first, 0).to(tl.uint32)
            s = tl.where((j - first).to(tl.uint32) < length, s, FAR)
    return s, bent


@triton.jit
def row_max(s, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """The largest score of each row, quarter beside quarter first.

    Along a row it would be one chain of comparisons, each of which waits for the one before.
    """
    return tl.max(tl.max(tl.reshape(s, [ROWS, 4, KEYS // 4]), 1), 1)


@triton.jit
def _entry(x, strides, b, h, i, j):
    """Where x[b, h, i, j] is; broadcast axes have stride 0."""
    start = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return start + i.to(tl.int64) * strides[2] + j * strides[3]


@triton.jit
def dense_seen(t, z, b, h, i, j):
    """The dense mask's part for rows i and keys j."""
    inside = (i < z.queries) & (j < z.keys)
    return tl.load(_entry(t.dense, t.dense_strides, b, h, i, j), mask=inside, other=0) != 0


@triton.jit
def interval(t, z, piece: tl.constexpr, b, h, i):
    """[first, last) of each row i in one piece; rows past the end repeat the last one."""
    row = tl.minimum(i, z.queries - 1)
    first, last = row + z.low, row + z.high
    if t.intervals is not None:
        start = t.intervals + b.to(tl.int64) * z.interval_batch + h.to(tl.int64) * z.interval_head
        start += row + 2 * piece * z.interval_step
        first = tl.maximum(first, tl.load(start))
        last = tl.minimum(last, tl.load(start + z.interval_step))
    first = tl.minimum(tl.maximum(first, 0), z.keys)
    last = tl.minimum(tl.maximum(last, 0), z.keys)
    return first, last


@triton.jit
def positions(t, z, b, i):
    """The key position beside which each row i stands."""
    row = tl.minimum(i, z.queries - 1)
    if t.position is not None:
        position = tl.load(t.position + b.to(tl.int64) * z.position_batch + row)
    else:
        position = row + z.shift
    return position


@triton.jit
def extent(t, z, piece: tl.constexpr, b, h, i, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """The key blocks that rows i see in one piece of the mask, as an `Extent` of scalars.

    Blocks are counted from `low`, the first key that any row sees; [inner, outer) of them are seen
    whole by all rows and need no mask. `dirty`: some key inside the blocks may be seen by none of
    these rows, perhaps by no row at all, and may hold anything.
    """
    first, last = tl.zeros(i.shape, tl.int32), tl.zeros(i.shape, tl.int32) + z.keys
    if PIECES > 0:
        first, last = interval(t, z, piece, b, h, i)
    empty = first >= last
    low = tl.min(tl.where(empty, z.keys, first), 0)
    high = tl.max(tl.where(empty, 0, last), 0)
    blocks = tl.maximum(tl.cdiv(high - low, BLOCK), 0)
    all_low = tl.max(first, 0)
    all_high = tl.min(tl.where(empty, 0, last), 0)
    inner = tl.cdiv(tl.maximum(all_low - low, 0), BLOCK)
    outer = tl.maximum(all_high - low, 0) // BLOCK
    some = (outer > inner) & (blocks > 0)
    inner, outer = tl.where(some, inner, blocks), tl.where(some, outer, blocks)
    dirty = blocks < 0  # without a mask every key is seen, and there is none past the last
    if PIECES > 0:
        # Neighbours whose intervals touch leave no gap; a single block reaches past its last key.
        next_first, next_last = interval(t, z, piece, b, h, i + 1)
        gap = empty | (next_first > last) | (next_last < first)
        dirty = (tl.max(gap.to(tl.int32), 0) > 0) | (blocks < 2)
    if t.dense is not None:
        inner, outer = blocks, blocks
        dirty = blocks >= 0
    return first, last, low, high, blocks, inner, outer, dirty


@triton.jit
def edge(n, extent, BLOCK: tl.constexpr):
    """The n-th block of an extent that needs a mask: its first key, and the rows' bounds in it."""
    first, last, low, high, blocks, inner, outer, dirty = extent
    number = tl.where(n < inner, n, n - inner + outer)
    start = low + number * BLOCK
    # A clean last block moves back to end at the last key that is seen; what it meets again is
    # masked by the new bound.
    back = (number == blocks - 1) & (blocks > 1) & (dirty == 0)
    return tl.where(back, high - BLOCK, start), tl.maximum(first, start), last


@triton.jit
def edge_of(n, one, two, edges, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """The n-th block that needs a mask, of both pieces; the first of them has `edges`."""
    start, first, last = edge(n, one, BLOCK)
    if PIECES == 2:
        other, more_first, more_last = edge(n - edges, two, BLOCK)
        start = tl.where(n < edges, start, other)
        first = tl.where(n < edges, first, more_first)
        last = tl.where(n < edges, last, more_last)
    return start, first, last


@triton.jit
def mix(x):
    """The mixer of headwise.dropout, on 32-bit words."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def row_hash(seed, b, h, position):
    """headwise.dropout.row_hash for the rows at these positions."""
    golden = tl.full([], GOLDEN, tl.uint32)
    word = mix(tl.load(seed).to(tl.uint32))
    place = mix(word ^ (mix(b.to(tl.uint32) * golden) + h.to(tl.uint32)))
    return mix(place + position.to(tl.uint32) * golden)


@triton.jit
def kept(rows, j, threshold):
    """headwise.dropout.keep for hashed rows and key positions j."""
    return mix(rows ^ (j.to(tl.uint32) * tl.full([], GOLDEN, tl.uint32))) >= threshold
