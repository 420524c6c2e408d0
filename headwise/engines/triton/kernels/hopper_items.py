"""The items of the Hopper forward, blocks of rows, and the blocks of keys that each visits.

First come the `edges`, which need a mask. For a band, producer and consumers compute the blocks.
For other masks `item_blocks` has written them to a table, and the producer sends each item's entry
to the consumers through shared memory.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

SENT = gl.constexpr(5)  # numbers per piece of an entry of the table that are sent
SLOTS = gl.constexpr(2)  # entries that may be on their way
TOGETHER = gl.constexpr(8)  # heads whose items are taken in turns


class HopperSizes(NamedTuple):
    """The numbers of a call, as device functions take them."""

    queries: int
    keys: int
    heads: int
    group: int  # query heads per key head
    value_width: int
    low: int  # row i sees at most the keys [i + low, i + high)
    high: int
    shift: int  # and is at position i + shift
    items: int  # blocks of rows, of all heads and batch entries
    table_batch: int  # strides of the table, in blocks of rows
    table_head: int
    interval_step: int  # stride from `first` to `last`, and on to the next piece
    interval_batch: int
    interval_head: int
    position_batch: int
    value_batch: int  # and of the values, in EIGHTs
    value_head: int
    value_row: int
    factor: float  # turns a score, or its tanh, into a logit
    unit: float  # and into a base-2 logit
    cap: tuple[float, ...] | None  # the constants of `capped`; None without a cap


class HopperMask(NamedTuple):
    """What a mask that is no band is read from; None each for a band."""

    intervals: Tensor | None = None  # (P, 2, B|1, Hq|1, N) int32
    position: Tensor | None = None  # (B|1, N) int32; if None, row i is at i + shift
    table: Tensor | None = None  # int32, as `item_blocks` writes it
    v: Tensor | None = None  # of which blocks may need cleaning; None if none does


@gluon.jit
def work(item, z, ROWS: gl.constexpr, KEYS: gl.constexpr, BANDED: gl.constexpr):
    """Return an item's batch entry, head, first row and blocks of keys, for a band.

    Blocks are counted from the first key that any row sees; [inner, outer) of them need no mask,
    and the `edges` others are visited first.
    """
    blocks_of_rows = gl.cdiv(z.queries, ROWS)
    line, block = item // blocks_of_rows, item % blocks_of_rows
    if BANDED and line % 2 == 0:  # balances the load: a short block follows a long one
        block = blocks_of_rows - 1 - block
    i0 = block * ROWS
    begin, end, all_begin, all_end = 0, z.keys, 0, z.keys
    if BANDED:
        i1 = gl.minimum(i0 + ROWS, z.queries) - 1
        begin = gl.minimum(gl.maximum(i0 + z.low, 0), z.keys)
        end = gl.minimum(gl.maximum(i1 + z.high, 0), z.keys)
        all_begin = gl.minimum(gl.maximum(i1 + z.low, 0), z.keys)
        all_end = gl.minimum(gl.maximum(i0 + z.high, 0), z.keys)
    blocks = gl.maximum(gl.cdiv(end - begin, KEYS), 1)
    inner = gl.cdiv(all_begin - begin, KEYS)
    outer = gl.maximum(all_end - begin, 0) // KEYS
    some = outer > inner
    inner, outer = gl.where(some, inner, blocks), gl.where(some, outer, blocks)
    extent = (begin, inner, outer, inner + blocks - outer, blocks)
    return line // z.heads, line % z.heads, i0, extent


@gluon.jit
def place_of(item, z, ROWS: gl.constexpr):
    """Return an item's batch entry, head and block of rows, for a mask with a table.

    A few heads at a time, so that programs share their keys, and late rows first: they tend to see
    more keys, and what runs last should be short.
    """
    blocks = gl.cdiv(z.queries, ROWS)
    part = item // (blocks * TOGETHER)
    n = item - part * (blocks * TOGETHER)
    count = gl.minimum(z.items // blocks - part * TOGETHER, TOGETHER)
    line = part * TOGETHER + n % count
    return line // z.heads, line % z.heads, blocks - 1 - n // count


@gluon.jit
def of_pieces(one, two, PIECES: gl.constexpr):
    """Return an item's blocks of keys from those of the pieces of its mask."""
    edges, blocks = one[1] + one[3] - one[2], one[3]
    if PIECES == 2:
        edges, blocks = edges + two[1] + two[3] - two[2], blocks + two[3]
    return one, two, blocks, edges, blocks


@gluon.jit
def block_of(n, extent, KEYS: gl.constexpr, PIECES: gl.constexpr):
    """Return the first key of the n-th block, the first that no block before it has, its piece.

    For a mask with a table. Edges of the first piece come first, then those of the second, then the
    blocks without a mask of the second, and of the first, each from last to first. The last block
    of a piece may begin early, so that it ends with the last key that is seen.
    """
    one, two, _, edges, _ = extent
    begin, inner, outer, count, last = one
    m = gl.where(n < edges, n, n - edges)
    second = n < 0
    if PIECES == 2:
        begin2, inner2, outer2, count2, last2 = two
        own, others = inner + count - outer, outer2 - inner2
        second = gl.where(n < edges, m >= own, m < others)
        m = gl.where(n < edges, gl.where(second, m - own, m), gl.where(second, m, m - others))
        begin, inner = gl.where(second, begin2, begin), gl.where(second, inner2, inner)
        outer, count = gl.where(second, outer2, outer), gl.where(second, count2, count)
        last = gl.where(second, last2, last)
    number = gl.where(m < inner, m, m - inner + outer)
    number = gl.where(n < edges, number, outer - 1 - m)
    new = begin + number * KEYS
    return gl.where(number == count - 1, last, new), new, second


@gluon.jit
def bounds_of(b, h, i, z, mask, BANDED: gl.constexpr, PIECES: gl.constexpr):
    """Return the keys [first, last) that rows i see in each piece, and the rows' positions."""
    row = gl.minimum(i, z.queries - 1)
    first = row * 0
    last = first + z.keys
    if BANDED:
        first = gl.minimum(gl.maximum(row + z.low, 0), z.keys)
        last = gl.minimum(gl.maximum(row + z.high, 0), z.keys)
    first2, last2, position = first, last, row + z.shift
    if mask.intervals is not None:
        start = mask.intervals + b.to(gl.int64) * z.interval_batch
        start = start + h.to(gl.int64) * z.interval_head + row
        if PIECES == 2:
            more = start + 2 * z.interval_step
            first2 = gl.maximum(first, gl.load(more))
            last2 = gl.minimum(last, gl.load(more + z.interval_step))
        first = gl.maximum(first, gl.load(start))
        last = gl.minimum(last, gl.load(start + z.interval_step))
    if mask.position is not None:
        position = gl.load(mask.position + b.to(gl.int64) * z.position_batch + row)
    return first, last, first2, last2, position


@gluon.jit
def first_key(n, extent, KEYS: gl.constexpr, PIECES: gl.constexpr):
    """Return the first key of the n-th block: edges, then the others from last to first."""
    if PIECES > 0:
        start = block_of(n, extent, KEYS, PIECES)[0]
    else:
        begin, inner, outer, edges, _ = extent
        edge = gl.where(n < inner, n, n - inner + outer)
        start = begin + gl.where(n < edges, edge, outer - 1 - (n - edges)) * KEYS
    return start


@gluon.jit
def met_by(n, extent, bounds, KEYS: gl.constexpr, PIECES: gl.constexpr):
    """Return the first key of the n-th block, an edge, and what `soften` takes as bounds in it."""
    first, last, first2, last2, position = bounds
    start = first_key(n, extent, KEYS, PIECES)
    if PIECES > 0:
        _, new, second = block_of(n, extent, KEYS, PIECES)
        if PIECES == 2:
            first, last = gl.where(second, first2, first), gl.where(second, last2, last)
        first = gl.maximum(first, new)
    return start, (first, last, position)


@gluon.jit
def blocks_with_rest(extent, KEYS: gl.constexpr, BLOCK: gl.constexpr, PIECES: gl.constexpr):
    """Return the number of blocks before those whose moments `row_moments` takes, in BLOCKs."""
    if PIECES == 0:
        _, inner, outer, _, _ = extent
    else:
        _, inner, outer, _, _ = extent[0]
    edges = extent[3]
    whole = gl.minimum(outer * KEYS // BLOCK * (BLOCK // KEYS), outer - inner)
    return edges + outer - inner - whole
