"""The backward kernels of the additive score: weights and slopes are recomputed.

A program owns the rows, or the keys, that it writes, so there are no atomics and the result is
deterministic.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.additive.additive_scores import as_tile, scores
from headwise.engines.triton.kernels.additive.additive_slopes import (
    dimensions,
    gathered,
    no_slopes,
    side_of_keys,
    side_of_rows,
    slopes,
)
from headwise.engines.triton.kernels.gradients import row_numbers, weigh
from headwise.engines.triton.kernels.maps.map_cells import seen_pairs, touched
from headwise.engines.triton.kernels.online import bounds
from headwise.engines.triton.kernels.tile import (
    LOOSE,
    NOTHING,
    Sizes,
    load_tile,
    logits,
    positions,
    row_hash,
)


@triton.jit
def score_gradient(
    s, bent, seen, grads, values, t, z, rows, j, hashed, numbers, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Return the weights after dropout, and ∂ score, 0 for hidden keys; (ROWS, KEYS)."""
    base, rest, shared, entropy = numbers
    dp = tl.dot(grads, values.T, input_precision=PRECISION)
    met, _ds, raw = weigh(
        tl.where(seen, s, NOTHING), bent, tl.where(seen, dp, 0.0), t, z, rows, j[None, :],
        hashed[:, None], base[:, None], rest[:, None], shared[:, None], entropy[:, None], CAP,
    )  # fmt: skip
    return met, tl.where(seen, raw, 0.0)


@triton.jit(do_not_specialize=LOOSE)
def additive_grad_queries(
    q, k, v, do, qs, ks, vs, dos, weight, powers, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, room, grad_q, grad_weight,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    FOURS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of rows, and its part of the weight's, (B, Hq, blocks, D)."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.num_programs(0) - 1 - block  # late rows of a causal mask see the most keys
    heads, kh = tl.num_programs(1), h // group
    i = block * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(i, queries - 1)
    position = positions(t, z, b, row)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t, b, h, position)
    place = (b * heads + h).to(tl.int64)
    numbers = row_numbers(rows, place * queries, row)
    grads = load_tile(do, dos, b, h, block * ROWS, queries, ROWS, VALUES, PADDED_VALUES, False)
    room += (place * tl.num_programs(0) + block) * (ROWS * KEYS)

    total = no_slopes(ROWS, WARPS, PADDED)
    turned = no_slopes(ROWS, WARPS, PADDED)
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last, lowest, highest = bounds(t, z, piece, b, h, row, PIECES)
        start = lowest // KEYS
        for step in tl.range(0, tl.maximum(tl.cdiv(highest, KEYS) - start, 0)):
            n = start + step
            j0 = n * KEYS
            j = j0 + tl.arange(0, KEYS)
            s = scores(
                q, k, qs, ks, weight, powers, z, b, h, heads, block, n, ROWS, KEYS, WARPS, WIDTH,
                FOURS,
            )  # fmt: skip
            s, bent = logits(
                as_tile(s, ROWS, KEYS), t, z, b, h, row[:, None], j[None, :], position[:, None],
                first[:, None], last[:, None], False, CAP, True,
            )  # fmt: skip
            values = load_tile(v, vs, b, kh, j0, highest, KEYS, VALUES, PADDED_VALUES, False)
            _met, raw = score_gradient(
                s, bent, s != NOTHING, grads, values, t, z, rows, j, hashed, numbers, PRECISION,
                CAP,
            )  # fmt: skip
            total, turned = slopes(
                total, turned, raw.T, room,
                side_of_rows(powers, q, qs, z, b, h, heads, block, ROWS, WIDTH),
                side_of_keys(powers, k, ks, z, b, h, heads, n, KEYS, WIDTH), ROWS, KEYS, WARPS,
                WIDTH, PADDED, True,
            )  # fmt: skip

    column, here = tl.arange(0, PADDED), i < queries
    w = tl.load(weight + h * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(
        grad_q + (place * queries + i)[:, None] * WIDTH + column[None, :],
        (4.0 * w[None, :] * gathered(total, ROWS, PADDED)).to(grad_q.dtype.element_ty),
        mask=here[:, None] & (column < WIDTH)[None, :],
    )  # fmt: skip
    turned = tl.sum(tl.where(here[:, None], gathered(turned, ROWS, PADDED), 0.0), 0)
    part = grad_weight + (place * tl.num_programs(0) + block) * WIDTH
    tl.store(part + column, turned, mask=column < WIDTH)


@triton.jit(do_not_specialize=LOOSE)
def additive_grad_keys(
    q, k, v, do, qs, ks, vs, dos, weight, powers, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, room, grad_k, grad_v,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    FOURS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys, from every row of its heads that sees some."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * group
    j0 = block * KEYS
    j = j0 + tl.arange(0, KEYS)
    place = (b * tl.num_programs(1) + kh).to(tl.int64)
    values = load_tile(v, vs, b, kh, j0, keys, KEYS, VALUES, PADDED_VALUES, False)
    room += (place * tl.num_programs(0) + block) * (ROWS * KEYS)
    sum_k = no_slopes(KEYS, WARPS, PADDED)
    sum_v = tl.zeros([KEYS, PADDED_VALUES], tl.float32)
    for member in tl.range(0, group):
        h = kh * group + member
        line = (b * heads + h).to(tl.int64) * queries
        d = tl.minimum(dimensions(PADDED), WIDTH - 1)
        for n in tl.range(0, tl.cdiv(queries, ROWS)):
            n += tl.zeros([], tl.int32)
            i0 = n * ROWS
            i = i0 + tl.arange(0, ROWS)
            there = i < queries
            row = tl.minimum(i, queries - 1)
            some, _whole = touched(t, z, b, h, row, there, j0, tl.minimum(j0 + KEYS, keys), PIECES)
            if some:
                position = positions(t, z, b, row)
                hashed = position
                if t.seed is not None:
                    hashed = row_hash(t, b, h, position)
                s = scores(
                    q, k, qs, ks, weight, powers, z, b, h, heads, n, block, ROWS, KEYS, WARPS,
                    WIDTH, FOURS,
                )  # fmt: skip
                s, bent = logits(
                    as_tile(s, ROWS, KEYS), t, z, b, h, row[:, None], j[None, :], position[:, None],
                    position[:, None], position[:, None], False, CAP, False,
                )  # fmt: skip
                seen = seen_pairs(t, z, b, h, row[:, None], j[None, :], PIECES)
                seen = seen & there[:, None] & (j < keys)[None, :]
                grads = load_tile(do, dos, b, h, i0, queries, ROWS, VALUES, PADDED_VALUES, False)
                met, raw = score_gradient(
                    s, bent, seen, grads, values, t, z, rows, j, hashed,
                    row_numbers(rows, line, row), PRECISION, CAP,
                )  # fmt: skip
                sum_v = tl.dot(met.to(grads.dtype).T, grads, sum_v, input_precision=PRECISION)
                total = no_slopes(KEYS, WARPS, PADDED)
                total, _ = slopes(
                    total, total, raw, room,
                    side_of_keys(powers, k, ks, z, b, h, heads, block, KEYS, WIDTH),
                    side_of_rows(powers, q, qs, z, b, h, heads, n, ROWS, WIDTH), KEYS, ROWS, WARPS,
                    WIDTH, PADDED, False,
                )  # fmt: skip
                sum_k += 4.0 * tl.load(weight + h * WIDTH + d).to(tl.float32) * total

    column = tl.arange(0, PADDED)[None, :]
    tl.store(
        grad_k + (place * keys + j)[:, None] * WIDTH + column,
        gathered(sum_k, KEYS, PADDED).to(grad_k.dtype.element_ty),
        mask=(j < keys)[:, None] & (column < WIDTH),
    )
    column = tl.arange(0, PADDED_VALUES)[None, :]
    tl.store(
        grad_v + (place * keys + j)[:, None] * VALUES + column,
        sum_v.to(grad_v.dtype.element_ty),
        mask=(j < keys)[:, None] & (column < VALUES),
    )
