"""What goes into the Hopper backward for each row and mask, and the gradients of queries.

Its sums of the gradients of queries lie in memory as its threads hold them (`in_threads` of
`hopper_backward`), so that they are written and added as whole blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import (
    LOG2E,
    LOOSE,
    NOTHING,
    Sizes,
    interval,
    load_tile,
)

STEP = tl.constexpr(8192)  # numbers of a block of rows: 128 rows of 64 or 64 rows of 128
PART = tl.constexpr(4096)  # and of the part of one warpgroup, 64 by 64
SIDE = tl.constexpr(64)
SCAN = tl.constexpr(128)  # row blocks that are scanned together
LARGE = tl.constexpr(4096.0)  # a base-2 lse beyond it, in float32, would make weights inexact

_STRIDES = ["grad_batch", "grad_head", "grad_row", "out_batch", "out_head", "out_row"]


@triton.jit(do_not_specialize=[*_STRIDES, "queries"])
def prepare_rows(
    grad, out, grad_batch, grad_head, grad_row, out_batch, out_head, out_row,
    base, log_total, numbers, careful, sums, counts, queries,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Write the numbers of a block of rows; set its sums and their count to 0.

    grad and out are (B, H, N, D), base and log_total (B, H, N), `numbers` (kinds, B, H, blocks ·
    ROWS): -lse in base 2, Σ grad · out, the base, and base - lse in base 2. A row without weights
    has an lse and a base of inf. `careful`: 1 if the block has an lse that is LARGE. Strides are in
    multiples of UNIT.
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    strides = (grad_batch * UNIT, grad_head * UNIT, grad_row * UNIT)
    one = load_tile(grad, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    strides = (out_batch * UNIT, out_head * UNIT, out_row * UNIT)
    two = load_tile(out, strides, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False)
    shared = tl.sum(one.to(tl.float32) * two.to(tl.float32), 1)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    largest = tl.load(base + head * queries + i, mask=here, other=NOTHING)
    rest = tl.load(log_total + head * queries + i, mask=here, other=0.0)
    some = largest != NOTHING
    lse = (largest + rest) * LOG2E
    line = head * (tl.num_programs(0) * ROWS) + i
    kind = tl.num_programs(2).to(tl.int64) * tl.num_programs(1) * tl.num_programs(0) * ROWS
    tl.store(numbers + line, tl.where(some, -lse, float("-inf")))
    tl.store(numbers + kind + line, shared)
    tl.store(numbers + 2 * kind + line, tl.where(some, largest, float("inf")))
    tl.store(numbers + 3 * kind + line, -rest * LOG2E)
    size = tl.maximum(tl.abs(lse), tl.abs(largest) * LOG2E)
    place = head * tl.num_programs(0) + block
    tl.store(careful + place, tl.max((some & (size > LARGE)).to(tl.int32), 0))
    tl.store(sums + place * STEP + tl.arange(0, STEP), tl.zeros([STEP], tl.float32))
    tl.store(counts + place, 0)


@triton.jit(do_not_specialize=[*LOOSE, "blocks"])
def row_bounds(
    t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    bounds, seen, blocks, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the keys [first, last) of a block of rows, and of the block: some row, all rows.

    bounds is (entries, heads, PIECES, 2, blocks · ROWS), `seen` (entries, heads, PIECES, 4, blocks)
    int32: some row sees [low, high), all rows see [all_low, all_high).
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * ROWS + tl.arange(0, ROWS)
    head = (b * tl.num_programs(1) + h).to(tl.int64) * PIECES
    for piece in tl.static_range(PIECES):
        first, last = interval(t, z, piece, b, h, i)
        empty = first >= last
        start = bounds + (head + piece) * 2 * blocks * ROWS + i
        tl.store(start, first)
        tl.store(start + blocks * ROWS, last)
        start = seen + (head + piece) * 4 * blocks + block
        tl.store(start, tl.min(tl.where(empty, z.keys, first), 0))
        tl.store(start + blocks, tl.max(tl.where(empty, 0, last), 0))
        tl.store(start + 2 * blocks, tl.max(first, 0))
        tl.store(start + 3 * blocks, tl.min(tl.where(empty, 0, last), 0))


@triton.jit(do_not_specialize=["keys", "blocks"])
def key_visits(
    bounds, seen, visits, unseen, keys, blocks,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the blocks of rows that see a block of keys, and the keys that no row sees.

    visits is (entries, heads, key blocks, PIECES, 4) int32: blocks outside of [begin, end) see
    none, `count` of those inside see some, and 1 if no row sees one of the keys. unseen is
    (entries, heads, key blocks · KEYS) int32, 1 for keys that no row sees.
    """
    number, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    j0 = number * KEYS
    j = j0 + tl.arange(0, KEYS)
    line = head * tl.num_programs(0) + number
    met = (j >= keys).to(tl.int32)  # there is no such key
    for piece in tl.static_range(PIECES):
        table = seen + (head * PIECES + piece) * 4 * blocks
        begin, end, count = blocks, 0, 0
        for start in tl.range(0, blocks, SCAN):
            n = start + tl.arange(0, SCAN)
            there = n < blocks
            low = tl.load(table + n, mask=there, other=0)
            high = tl.load(table + blocks + n, mask=there, other=0)
            all_low = tl.load(table + 2 * blocks + n, mask=there, other=0)
            all_high = tl.load(table + 3 * blocks + n, mask=there, other=0)
            touch = there & (low < j0 + KEYS) & (high > j0)
            begin = tl.minimum(begin, tl.min(tl.where(touch, n, blocks), 0))
            end = tl.maximum(end, tl.max(tl.where(touch, n + 1, 0), 0))
            count += tl.sum(touch.to(tl.int32), 0)
            whole = touch & (all_low <= j0) & (all_high >= tl.minimum(j0 + KEYS, keys))
            met = tl.maximum(met, tl.max(whole.to(tl.int32), 0))
        at = visits + (line * PIECES + piece) * 4
        tl.store(at, tl.minimum(begin, end))
        tl.store(at + 1, end)
        tl.store(at + 2, count)
    for piece in tl.static_range(PIECES):
        at = visits + (line * PIECES + piece) * 4
        begin, end = tl.load(at), tl.load(at + 1)
        rows = bounds + (head * PIECES + piece) * 2 * blocks * ROWS
        for block in tl.range(begin, end):
            if tl.min(met, 0) == 0:
                i = block * ROWS + tl.arange(0, ROWS)
                first, last = tl.load(rows + i), tl.load(rows + blocks * ROWS + i)
                sees = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
                met = tl.maximum(met, tl.max(sees.to(tl.int32), 0))
    for piece in tl.static_range(PIECES):
        tl.store(visits + (line * PIECES + piece) * 4 + 3, 1 - tl.min(met, 0))
    tl.store(unseen + head * tl.num_programs(0) * KEYS + j, 1 - met)


@triton.jit(do_not_specialize=["queries", "scale"])
def finish_queries(sums, grad_q, queries, scale, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write the gradients of 64 rows and 64 columns of queries from their sums.

    grad_q is (B, H, N, WIDTH), contiguous. A block of rows is ROWS · 64 or ROWS · 128.
    """
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = (b * tl.num_programs(1) + h).to(tl.int64)
    place = (head * tl.num_programs(0) + part) * PART
    x = tl.load(sums + place + tl.arange(0, PART)) * scale
    # Eight columns at a time: by warp, row in eight, pair of columns, which eight, and column.
    x = tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [SIDE, SIDE])
    first, column = part // 2 * ROWS, tl.arange(0, SIDE)
    if ROWS == SIDE:
        column += part % 2 * SIDE
    else:
        first += part % 2 * SIDE
    i = first + tl.arange(0, SIDE)
    tl.store(
        grad_q + (head * queries + i)[:, None] * WIDTH + column[None, :],
        x.to(grad_q.dtype.element_ty),
        mask=(i < queries)[:, None] & (column < WIDTH)[None, :],
    )
