"""The blocks of keys that a block of rows visits: masked edges and an unmasked middle."""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import interval


@triton.jit
def extent(t, z, piece: tl.constexpr, b, h, i, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Return the blocks of keys that rows i see in one piece of the mask; only bounds are per row.

    Blocks are counted from `low`, the first key that any row sees. Blocks [inner, outer) are fully
    visible to all rows and need no mask. `dirty`: the blocks may contain a key that none of these
    rows sees, perhaps no row at all, and that may hold anything.
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
    dirty = blocks < 0  # False: without a mask every key is visible
    if PIECES > 0:
        # Touching intervals of neighbours leave no gap; a single block may pass the last key.
        next_first, next_last = interval(t, z, piece, b, h, i + 1)
        gap = empty | (next_first > last) | (next_last < first)
        dirty = (tl.max(gap.to(tl.int32), 0) > 0) | (blocks < 2)
    if t.dense is not None:
        inner, outer = blocks, blocks
        dirty = blocks >= 0
    return first, last, low, high, blocks, inner, outer, dirty


@triton.jit
def edge(n, extent, BLOCK: tl.constexpr):
    """Return the n-th masked block of an extent: its first key, and the rows' bounds in it."""
    first, last, low, high, blocks, inner, outer, dirty = extent
    number = tl.where(n < inner, n, n - inner + outer)
    start = low + number * BLOCK
    # A last block that is not dirty moves back to end at the last visible key; keys that it
    # repeats are masked by the new bound.
    back = (number == blocks - 1) & (blocks > 1) & (dirty == 0)
    return tl.where(back, high - BLOCK, start), tl.maximum(first, start), last


@triton.jit
def met(t, z, b, h, i, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Return the extents of rows i in both pieces, whether one is dirty, and the block counts.

    The counts: edges of the first piece, of both; middle blocks of the first piece, of both.
    """
    one = extent(t, z, 0, b, h, i, BLOCK, PIECES)
    two = one
    _, _, _, _, blocks, inner, outer, dirty = one
    edges = inner + blocks - outer
    middle = outer - inner
    more_edges, more_middle = 0, 0
    if PIECES == 2:
        two = extent(t, z, 1, b, h, i, BLOCK, PIECES)
        _, _, _, _, blocks2, inner2, outer2, dirty2 = two
        dirty = dirty | dirty2
        more_edges = inner2 + blocks2 - outer2
        more_middle = outer2 - inner2
    return one, two, dirty, (edges, edges + more_edges, middle, middle + more_middle)


@triton.jit
def edge_of(n, one, two, edges, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Return the n-th masked block of both pieces; the first piece has `edges` of them."""
    start, first, last = edge(n, one, BLOCK)
    if PIECES == 2:
        other, more_first, more_last = edge(n - edges, two, BLOCK)
        start = tl.where(n < edges, start, other)
        first = tl.where(n < edges, first, more_first)
        last = tl.where(n < edges, last, more_last)
    return start, first, last


@triton.jit
def middle_of(n, one, two, middle, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Return the first key of the n-th unmasked block; the first piece has `middle` of them."""
    _, _, low, _, _, inner, _, _ = one
    start = low + (inner + n) * BLOCK
    if PIECES == 2:
        _, _, low2, _, _, inner2, _, _ = two
        start = tl.where(n < middle, start, low2 + (inner2 + n - middle) * BLOCK)
    return start
