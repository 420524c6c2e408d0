"""The kernel of a map's largest numbers: keeps each row's largest so far, and their keys.

They are weights, or effects, which are ranked by magnitude.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.maps.map_cells import (
    effects,
    grads_of,
    log_weights,
    marks_of,
    products,
    row_totals,
    rows_of,
    seen_pairs,
    seen_range,
)
from headwise.engines.triton.kernels.tile import LOOSE, NOTHING, Sizes, bend, positions


@triton.jit(do_not_specialize=[*LOOSE, "count", "norm_batch", "norm_head"])
def largest(
    q, k, norms, totals, w, best_out, key_out, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    count, norm_batch, norm_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, KEPT: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
    VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr, VALUE_PRECISION: tl.constexpr,
):  # fmt: skip
    """Find log2 of the `count` largest weights of each row of a block, in no order.

    best_out and key_out are (B, Hq, N, KEPT). With w, they are the largest magnitudes of effects,
    and twice the keys' numbers, plus one for negative effects.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    i = tl.minimum(i, queries - 1)
    kh = h // group
    start_q = b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1]
    start_k = b.to(tl.int64) * ks[0] + kh.to(tl.int64) * ks[1]
    line = (b * tl.num_programs(1) + h).to(tl.int64) * queries + i
    tile_q = rows_of(q, start_q, qs[2], i, here, WIDTH, PADDED)
    base, rest = row_totals(totals, line, here)
    lost = (base != base) | (rest != rest)
    tile_g, marks = tile_q, (base, rest)
    if w is not None:
        tile_g = grads_of(w, b, h, i, here, VALUES, PADDED_VALUES)
        marks = marks_of(w, line, here)
        lost = lost | (marks[0] != marks[0])
    position = positions(t, z, b, i)
    begin, end = seen_range(t, z, b, h, i, here, PIECES)

    slot = tl.arange(0, KEPT)[None, :]
    column = tl.arange(0, KEYS)
    # A slot beyond `count` is never the smallest, so nothing is stored there.
    best = tl.where(slot + tl.zeros([ROWS, 1], tl.int32) < count, NOTHING, float("inf"))
    key = tl.zeros([ROWS, KEPT], tl.int32) - 1
    for n in tl.range(0, tl.maximum(tl.cdiv(end - begin, KEYS), 0)):
        j = begin + n * KEYS + column
        inside = j < keys
        tile_k = rows_of(k, start_k, ks[2], j, inside, WIDTH, PADDED)
        s = tl.dot(tile_q, tile_k.T, input_precision=PRECISION)
        s, _bent = bend(s, t, z, b, h, i[:, None], j[None, :], position[:, None], CAP)
        e = tl.where(lost[:, None], 0.0, log_weights(s, base, rest))
        x = e
        if w is not None:
            c = products(w, tile_g, b, kh, j, inside, VALUES, PADDED_VALUES, VALUE_PRECISION)
            x = tl.where(lost[:, None], 0.0, effects(e, c, marks))
            e = tl.abs(x)
        if norms is not None:
            start = b.to(tl.int64) * norm_batch + kh.to(tl.int64) * norm_head
            norm = tl.load(norms + start + j, mask=inside, other=0.0)
            e += tl.log2(tl.maximum(norm, 1.1754944e-38))[None, :]  # a value of 0 still counts
        seen = seen_pairs(t, z, b, h, i[:, None], j[None, :], PIECES) & inside[None, :]
        e = tl.where(seen & (base != float("inf"))[:, None], e, NOTHING)
        floor = tl.min(best, 1)
        top, at = tl.max(e, 1, return_indices=True)
        while tl.max((top > floor).to(tl.int32), 0) > 0:
            _, worst = tl.min(best, 1, return_indices=True)
            taken = (slot == worst[:, None]) & (top > floor)[:, None]
            best = tl.where(taken, top[:, None], best)
            number = begin + n * KEYS + at
            if w is not None:
                negative = tl.where(column[None, :] == at[:, None], (x < 0.0).to(tl.int32), 0)
                number = 2 * number + tl.sum(negative, 1)
            key = tl.where(taken, number[:, None], key)
            e = tl.where(column[None, :] == at[:, None], NOTHING, e)
            floor = tl.min(best, 1)
            top, at = tl.max(e, 1, return_indices=True)
    # If a row is NaN, all of its weights are, and any of its keys will do.
    best = tl.where(lost[:, None] & (key >= 0), float("nan"), best)
    there = here[:, None] & (slot < KEPT)
    tl.store(best_out + line[:, None] * KEPT + slot, best, mask=there)
    tl.store(key_out + line[:, None] * KEPT + slot, key, mask=there)
