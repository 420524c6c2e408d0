"""The kernel of the totals of effects: each row's largest logit, and the sums over its other keys.

`headwise.maps.effect_totals` says why the largest is kept apart.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.maps.map_cells import grads_of, products, rows_of
from headwise.engines.triton.kernels.online import bounds
from headwise.engines.triton.kernels.tile import LOG2E, LOOSE, NOTHING, Sizes, logits, positions


@triton.jit
def add_keys(
    sums, tile_q, tile_g, k, start_k, k_row, w, t, z, b, h, i, position, first, last, j0, limit,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    VALUE_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Merge the keys from j0 on, below `limit`, into the rows' sums."""
    column = tl.arange(0, KEYS)
    j = j0 + column
    tile_k = rows_of(k, start_k, k_row, j, j < limit, WIDTH, PADDED)
    s = tl.dot(tile_q, tile_k.T, input_precision=PRECISION)
    s, _ = logits(
        s, t, z, b, h, i[:, None], j[None, :], position[:, None], first[:, None],
        tl.minimum(last, limit)[:, None], False, CAP, MASKED,
    )  # fmt: skip
    if MASKED and t.dense is not None:
        s = tl.where((j < limit)[None, :], s, NOTHING)
    c = products(w, tile_g, b, h // z.group, j, j < limit, VALUES, PADDED_VALUES, VALUE_PRECISION)
    best, product, base, total, value = sums
    top = tl.max(s, 1)
    chosen = s == tl.where(top == NOTHING, float("inf"), top)[:, None]
    # Several keys may share the largest logit: one stands for all, the others join the rest.
    count = tl.sum(tl.where(chosen, 1.0, 0.0), 1)
    here = tl.sum(tl.where(chosen, c, 0.0), 1) / tl.maximum(count, 1.0)
    s = tl.where(chosen, NOTHING, s)
    higher = top > best
    lesser, lost = tl.where(higher, best, top), tl.where(higher, product, here)
    best, product = tl.where(higher, top, best), tl.where(higher, here, product)
    crowd = tl.where(count > 1.0, top, NOTHING)
    level = tl.maximum(tl.maximum(base, lesser), tl.maximum(crowd, tl.max(s, 1)))
    safe = tl.where(level == NOTHING, 0.0, level)
    p = tl.exp2((s - safe[:, None]) * LOG2E)
    shrink, one = tl.exp2((base - safe) * LOG2E), tl.exp2((lesser - safe) * LOG2E)
    more = tl.where(count > 1.0, tl.exp2((crowd - safe) * LOG2E) * (count - 1.0), 0.0)
    total = total * shrink + one + more + tl.sum(p, 1)
    c = p * c
    if MASKED:
        c = tl.where(p == 0.0, 0.0, c)  # a hidden value may be anything
    lost = tl.where(one == 0.0, 0.0, one * lost) + tl.where(more == 0.0, 0.0, more * here)
    value = value * shrink + lost + tl.sum(c, 1)
    return best, product, level, total, value


@triton.jit(do_not_specialize=LOOSE)
def peaks(
    q, k, w, best_out, product_out, base_out, total_out, value_out, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr, VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr, VALUE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the `PeakSums` of a block of rows of one head, (B, Hq, N) each."""
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
    tile_g = grads_of(w, b, h, i, there, VALUES, PADDED_VALUES)
    position = positions(t, z, b, i)
    zero = tl.zeros([ROWS], tl.float32)
    nothing = zero + NOTHING
    sums = nothing, zero, nothing, zero, zero
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last, lowest, highest = bounds(t, z, piece, b, h, i, PIECES)
        # As in `map_lse`: whole blocks that every row sees come first and need no mask.
        clean = tl.minimum(tl.maximum(tl.max(first, 0), lowest), highest)
        blocks = tl.maximum(tl.min(tl.where(first < last, last, 0), 0) - clean, 0) // KEYS
        if t.dense is not None:
            blocks = blocks * 0
        for n in tl.range(0, blocks):
            sums = add_keys(
                sums, tile_q, tile_g, k, start_k, ks[2], w, t, z, b, h, i, position, first, last,
                clean + n * KEYS, keys, KEYS, WIDTH, PADDED, PRECISION, CAP, VALUES, PADDED_VALUES,
                VALUE_PRECISION, False,
            )  # fmt: skip
        before = tl.cdiv(tl.maximum(clean - lowest, 0), KEYS)
        rest = clean + blocks * KEYS
        after = tl.cdiv(tl.maximum(highest - rest, 0), KEYS)
        for n in tl.range(0, before + after):
            j0 = tl.where(n < before, lowest + n * KEYS, rest + (n - before) * KEYS)
            sums = add_keys(
                sums, tile_q, tile_g, k, start_k, ks[2], w, t, z, b, h, i, position, first, last,
                j0, tl.where(n < before, clean, highest), KEYS, WIDTH, PADDED, PRECISION, CAP,
                VALUES, PADDED_VALUES, VALUE_PRECISION, True,
            )  # fmt: skip

    best, product, base, total, value = sums
    best = tl.where(total == total, best, total)  # a maximum may drop NaN
    line = (b * tl.num_programs(1) + h).to(tl.int64) * queries + i
    tl.store(best_out + line, best, mask=there)
    tl.store(product_out + line, tl.where(best == NOTHING, 0.0, product), mask=there)
    tl.store(base_out + line, base, mask=there)
    tl.store(total_out + line, total, mask=there)
    tl.store(value_out + line, value, mask=there)
