"""The kernel of the rows' totals: the forward pass of a map, which needs no values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.core.row_sums import RowParts
from headwise.engines.triton.kernels.maps.map_cells import rows_of
from headwise.engines.triton.kernels.online import beside_sink, bounds, nothing_yet, take_in
from headwise.engines.triton.kernels.tile import LOOSE, NOTHING, Sizes, logits, positions


@triton.jit
def add_keys(
    sums, tile_q, k, start_k, k_row, t, z, b, h, i, position, first, last, j0, limit,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Merge the keys from j0 on, below `limit`, into the rows' sums."""
    j = j0 + tl.arange(0, KEYS)
    tile_k = rows_of(k, start_k, k_row, j, j < limit, WIDTH, PADDED)
    s = tl.dot(tile_q, tile_k.T, input_precision=PRECISION)
    s, _ = logits(
        s, t, z, b, h, i[:, None], j[None, :], position[:, None], first[:, None],
        tl.minimum(last, limit)[:, None], False, CAP, MASKED,
    )  # fmt: skip
    if MASKED and t.dense is not None:
        s = tl.where((j < limit)[None, :], s, NOTHING)
    asked = RowParts(None, None, None)  # type: ignore[arg-type]
    sums, _, _ = take_in(sums, asked, s, position, j0, 0, KEYS)
    return sums


@triton.jit(do_not_specialize=LOOSE)
def log_sums(
    q, k, lse, base, log_total, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute the `RowTotals` of a block of rows of one head, (B, Hq, N) each."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.num_programs(0) - 1 - block  # late rows of a causal mask see the most keys
    i = block * ROWS + tl.arange(0, ROWS)
    there = i < queries
    i = tl.minimum(i, queries - 1)
    start_q = b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1]
    start_k = b.to(tl.int64) * ks[0] + (h // group).to(tl.int64) * ks[1]
    tile_q = rows_of(q, start_q, qs[2], i, there, WIDTH, PADDED)
    position = positions(t, z, b, i)
    sums = nothing_yet(tl.zeros([ROWS], tl.float32))
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last, lowest, highest = bounds(t, z, piece, b, h, i, PIECES)
        # Whole blocks that every row sees come first and need no mask; keys before and after them
        # do. The bounds of a row that sees no key are any two numbers with first >= last.
        clean = tl.minimum(tl.maximum(tl.max(first, 0), lowest), highest)
        blocks = tl.maximum(tl.min(tl.where(first < last, last, 0), 0) - clean, 0) // KEYS
        if t.dense is not None:
            blocks = blocks * 0
        for n in tl.range(0, blocks):
            sums = add_keys(
                sums, tile_q, k, start_k, ks[2], t, z, b, h, i, position, first, last,
                clean + n * KEYS, keys, KEYS, WIDTH, PADDED, PRECISION, CAP, False,
            )  # fmt: skip
        before = tl.cdiv(tl.maximum(clean - lowest, 0), KEYS)
        rest = clean + blocks * KEYS
        after = tl.cdiv(tl.maximum(highest - rest, 0), KEYS)
        for n in tl.range(0, before + after):
            j0 = tl.where(n < before, lowest + n * KEYS, rest + (n - before) * KEYS)
            sums = add_keys(
                sums, tile_q, k, start_k, ks[2], t, z, b, h, i, position, first, last, j0,
                tl.where(n < before, clean, highest), KEYS, WIDTH, PADDED, PRECISION, CAP, True,
            )  # fmt: skip

    l, m, _, _ = sums
    _, _, found, above = beside_sink(m, l, t.sinks, h)
    line = (b * tl.num_programs(1) + h).to(tl.int64) * queries + i
    tl.store(lse + line, found, mask=there)
    tl.store(base + line, tl.where((l == l) | (m == -NOTHING), m, l), mask=there)
    tl.store(log_total + line, above, mask=there)
