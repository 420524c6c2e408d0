"""The blocks of keys that a block of rows visits: masked edges and an unmasked middle."""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import LOOSE, Sizes, interval

FIELDS = tl.constexpr(8)  # numbers per piece of an entry of `item_blocks`


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


@triton.jit(do_not_specialize=[*LOOSE, "blocks"])
def item_blocks(
    t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    table, blocks,
    ROWS: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of keys that a block of rows visits, for the Hopper forward.

    table begins with FIELDS numbers, the first of them 0. Then comes an entry for each batch entry,
    head and block of rows: of each piece the first key of its blocks, `inner` and `outer` as
    `extent` returns them, the number of blocks, the first key of the last one, and 1 if masked
    blocks may contain a key that none of the rows sees. The last block begins early instead where
    that helps, and keys before the first and after the last are zero. PADDED: ROWS, or the next
    power of two.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, PADDED)
    i = block * ROWS + lane
    here = (lane < ROWS) & (i < z.queries)
    beside = (lane + 1 < ROWS) & (i + 1 < z.queries)
    line = (b * tl.num_programs(1) + h).to(tl.int64) * blocks + block
    start = table + FIELDS + line * (PIECES * FIELDS)
    total = 0
    for piece in tl.static_range(PIECES):
        first, last = interval(t, z, piece, b, h, i)
        next_first, next_last = interval(t, z, piece, b, h, i + 1)
        seen = here & (first < last)
        more = beside & (next_first < next_last)
        lowest = tl.min(tl.where(seen, first, z.keys), 0)
        highest = tl.max(tl.where(seen, last, 0), 0)
        all_low = tl.max(tl.where(here, first, 0), 0)
        all_high = tl.min(tl.where(here, tl.where(seen, last, 0), z.keys), 0)
        length = tl.maximum(highest - lowest, 0)
        count = tl.cdiv(length, KEYS)
        inner = tl.cdiv(tl.maximum(all_low - lowest, 0), KEYS)
        outer = tl.maximum(all_high - lowest, 0) // KEYS
        some = (outer > inner) & (count > 0)
        inner, outer = tl.where(some, inner, count), tl.where(some, outer, count)
        # Touching intervals of neighbours leave no gap.
        apart = seen & more & ((next_first > last) | (next_last < first))
        runs = tl.sum((seen & ~more).to(tl.int32), 0)
        gap = (tl.max(apart.to(tl.int32), 0) > 0) | (runs > 1)
        alone = (count == 1) & (lowest > 0) & (highest < z.keys) & (length < KEYS)
        early = (highest < z.keys) & ((count > 1) | (lowest == 0))
        final = tl.where(early, highest - KEYS, lowest + (count - 1) * KEYS)
        total += count
        if piece == PIECES - 1:  # rows that see nothing visit one block, before the first key
            nothing = total == 0
            count = tl.where(nothing, 1, count)
            inner, outer = tl.where(nothing, 1, inner), tl.where(nothing, 1, outer)
            lowest, final = tl.where(nothing, -KEYS, lowest), tl.where(nothing, -KEYS, final)
        at = start + piece * FIELDS
        tl.store(at, lowest)
        tl.store(at + 1, inner)
        tl.store(at + 2, outer)
        tl.store(at + 3, count)
        tl.store(at + 4, final)
        tl.store(at + 5, (gap | alone).to(tl.int32))
    if block + h + b == 0:
        tl.store(table, 0)
