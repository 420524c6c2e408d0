"""The backward kernel of keys and values: a block of keys, and every row of its heads that sees it.

Tiles are keys by rows, so that weights and their gradients are the left operands of the next
products and stay in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.gradients import row_numbers, weigh, whole_rows
from headwise.engines.triton.kernels.tile import (
    LOOSE,
    NOTHING,
    Sizes,
    interval,
    load_tile,
    logits,
    positions,
    row_hash,
)

SCAN = tl.constexpr(128)  # row blocks that are scanned together


@triton.jit(do_not_specialize=[*LOOSE, "blocks"])
def row_blocks(
    t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    table, blocks, ROWS: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Write the keys that each block of rows sees: some row [low, high), all [all_low, all_high).

    table is (entries, heads, PIECES, 4, blocks) int32.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * ROWS + tl.arange(0, ROWS)
    line = (b * tl.num_programs(1) + h).to(tl.int64) * PIECES * 4 * blocks + block
    for piece in tl.static_range(PIECES):
        first, last = interval(t, z, piece, b, h, i)
        empty = first >= last
        start = table + line + piece * 4 * blocks
        tl.store(start, tl.min(tl.where(empty, z.keys, first), 0))
        tl.store(start + blocks, tl.max(tl.where(empty, 0, last), 0))
        tl.store(start + 2 * blocks, tl.max(first, 0))
        tl.store(start + 3 * blocks, tl.min(tl.where(empty, 0, last), 0))


@triton.jit
def seen_by(table, blocks, j0, KEYS: tl.constexpr):
    """Return the row blocks [begin, end) that may see the keys, and [inner, outer) that see all.

    Blocks in between that see no key are visited too; there are none if the rows' bounds increase
    along the sequence.
    """
    j1 = j0 + KEYS
    begin, end, inner = blocks, 0, blocks
    for start in tl.range(0, blocks, SCAN):
        n = start + tl.arange(0, SCAN)
        there = n < blocks
        low = tl.load(table + n, mask=there, other=0)
        high = tl.load(table + blocks + n, mask=there, other=0)
        all_low = tl.load(table + 2 * blocks + n, mask=there, other=0)
        all_high = tl.load(table + 3 * blocks + n, mask=there, other=0)
        touch = there & (low < j1) & (high > j0)
        whole = there & (all_low <= j0) & (all_high >= j1)
        begin = tl.minimum(begin, tl.min(tl.where(touch, n, blocks), 0))
        end = tl.maximum(end, tl.max(tl.where(touch, n + 1, 0), 0))
        inner = tl.minimum(inner, tl.min(tl.where(whole, n, blocks), 0))
    begin = tl.minimum(begin, end)
    inner = tl.minimum(inner, end)
    outer = end
    for start in tl.range(0, blocks, SCAN):  # the first block after `inner` that does not see all
        n = start + tl.arange(0, SCAN)
        there = (n < end) & (n >= inner)
        all_low = tl.load(table + 2 * blocks + n, mask=there, other=0)
        all_high = tl.load(table + 3 * blocks + n, mask=there, other=0)
        broken = there & ((all_low > j0) | (all_high < j1))
        outer = tl.minimum(outer, tl.min(tl.where(broken, n, blocks), 0))
    return begin, end, inner, tl.maximum(outer, inner)


@triton.jit
def seen_by_band(z, j0, KEYS: tl.constexpr, ROWS: tl.constexpr):
    """Return what `seen_by` does, for a band, without a table. Rows past the end have no weight."""
    blocks = tl.cdiv(z.queries, ROWS)
    begin = tl.maximum(j0 - z.high + 1, 0) // ROWS
    end = tl.minimum(tl.cdiv(tl.maximum(j0 + KEYS - z.low, 0), ROWS), blocks)
    begin = tl.minimum(begin, end)
    inner = tl.cdiv(tl.maximum(tl.minimum(j0 + KEYS, z.keys) - z.high, 0), ROWS)
    last = tl.maximum(j0 - z.low + 1, 0)  # rows before it see the first of the keys
    outer = tl.where(last >= z.queries, blocks, last // ROWS)
    inner = tl.minimum(tl.maximum(inner, begin), end)
    return begin, end, inner, tl.minimum(tl.maximum(outer, inner), end)


@triton.jit
def step(
    grad_k, grad_v, keys, values, tensors, t, z, rows, b, h, heads, block, hidden, j0,
    piece: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Add one block of rows to the gradients of keys and values."""
    q, do, qs, dos, bias, dense = tensors
    i0 = block * ROWS
    i, j = i0 + tl.arange(0, ROWS), j0 + tl.arange(0, keys.shape[0])
    queries = load_tile(q, qs, b, h, i0, z.queries, ROWS, WIDTH, PADDED, TMA)
    grads = load_tile(do, dos, b, h, i0, z.queries, ROWS, VALUES, PADDED_VALUES, TMA)
    base, rest, shared, entropy = row_numbers(rows, whole_rows(z, b, heads, h), i)
    s = tl.dot(keys, queries.T, input_precision=PRECISION)  # (KEYS, ROWS)
    dp = tl.dot(values, grads.T, input_precision=PRECISION)
    position, hashed = i, i
    if t.slopes is not None or t.relative is not None or t.seed is not None:
        position = positions(t, z, b, i)
    if t.seed is not None:
        hashed = row_hash(t, b, h, position)
    s, bent = logits(
        s, t, z, b, h, i[None, :], j[:, None], position[None, :], j[:, None], j[:, None],
        False, CAP, t.dense is not None, i0, j0, bias, dense, True,
    )  # fmt: skip
    if t.dense is not None:
        dp = tl.where(s != NOTHING, dp, 0.0)  # hidden keys have no gradient
    met, _, raw = weigh(
        s, bent, dp, t, z, rows, j[:, None], hashed[None, :], base[None, :], rest[None, :],
        shared[None, :], entropy[None, :], CAP,
    )  # fmt: skip
    if PIECES > 0 and hidden:  # here, because the gradient of a cap needs unmasked scores
        first, last = interval(t, z, piece, b, h, i)
        seen = (j[:, None] >= first[None, :]) & (j[:, None] < last[None, :])
        met, raw = tl.where(seen, met, 0.0), tl.where(seen, raw, 0.0)
    grad_v = tl.dot(met.to(grads.dtype), grads, grad_v, input_precision=PRECISION)
    grad_k = tl.dot(raw.to(queries.dtype), queries, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit(do_not_specialize=[*LOOSE, "blocks", "table_batch", "table_head"])
def grad_keys(
    q, do, k, v, qs, dos, ks, vs, bias, dense, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad_k, grad_v, table, blocks, table_batch, table_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of KEYS keys of one key head of one batch entry."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    number, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    j0 = number * KEYS
    j = j0 + tl.arange(0, KEYS)
    heads = tl.num_programs(1) * z.group
    tensors = (q, do, qs, dos, bias, dense)
    tile = load_tile(k, ks, b, kh, j0, z.keys, KEYS, WIDTH, PADDED, TMA)
    values = load_tile(v, vs, b, kh, j0, z.keys, KEYS, VALUES, PADDED_VALUES, TMA)
    sum_k = tl.zeros([KEYS, PADDED], tl.float32)
    sum_v = tl.zeros([KEYS, PADDED_VALUES], tl.float32)
    for member in tl.range(0, z.group):
        h = kh * z.group + member
        for piece in tl.static_range(PIECES if PIECES > 0 else 1):
            begin, end, inner, outer = 0, tl.cdiv(z.queries, ROWS), 0, tl.cdiv(z.queries, ROWS)
            if PIECES > 0 and t.intervals is None:
                begin, end, inner, outer = seen_by_band(z, j0, KEYS, ROWS)
            elif PIECES > 0:
                start = table + b.to(tl.int64) * table_batch + h.to(tl.int64) * table_head
                begin, end, inner, outer = seen_by(start + piece * 4 * blocks, blocks, j0, KEYS)
            # Blocks whose rows see part of the keys, then those that see all, in one pipeline.
            edges = end - begin - (outer - inner)
            for n in tl.range(0, end - begin):
                block = tl.where(begin + n < inner, begin + n, begin + n - inner + outer)
                block = tl.where(n < edges, block, inner + n - edges)
                sum_k, sum_v = step(
                    sum_k, sum_v, tile, values, tensors, t, z, rows, b, h, heads, block,
                    n < edges, j0, piece, ROWS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA,
                    PRECISION, PIECES, CAP,
                )  # fmt: skip

    line = (b * tl.num_programs(1) + kh).to(tl.int64) * z.keys
    here = (j < z.keys)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    tl.store(
        grad_k + (line + j)[:, None] * WIDTH + column,
        (sum_k * z.scale).to(grad_k.dtype.element_ty),
        mask=here & (column < WIDTH),
    )
    column = tl.arange(0, PADDED_VALUES)[None, :]
    tl.store(
        grad_v + (line + j)[:, None] * VALUES + column,
        sum_v.to(grad_v.dtype.element_ty),
        mask=here & (column < VALUES),
    )
