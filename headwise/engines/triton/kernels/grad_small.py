"""Gradients of a bias tensor of any broadcast shape, and of the relative table (T5).

Each is a sum over the pairs that share one parameter. A program owns its parameters and loops over
their pairs, so the results are deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.gradients import row_numbers, weigh, whole_rows
from headwise.engines.triton.kernels.tile import (
    LOOSE,
    NOTHING,
    Sizes,
    bend,
    dense_seen,
    interval,
    kept_only,
    load_tile,
    positions,
    row_hash,
)


@triton.jit
def visible(t, z, b, h, i, j, row, PIECES: tl.constexpr):
    """Return True for visible pairs (i, j); `row` is i in the shape that intervals shall have."""
    seen = (i < z.queries) & (j >= 0) & (j < z.keys)
    if t.dense is not None:
        seen = seen & dense_seen(t, z, b, h, i, tl.maximum(j, 0))
    if PIECES > 0:
        first, last = interval(t, z, 0, b, h, row)
        inside = (j >= first) & (j < last)
        if PIECES == 2:
            first, last = interval(t, z, 1, b, h, row)
            inside = inside | ((j >= first) & (j < last))
        seen = seen & inside
    return seen


@triton.jit(
    do_not_specialize=[*LOOSE, "heads", "key_tiles", "entries", "members", "row_span", "key_span"]
)
def grad_bias(
    q, do, k, v, qs, dos, ks, vs, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad, heads, key_tiles, entries, members, row_span, key_span,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, PRECISION: tl.constexpr,
    PIECES: tl.constexpr, CAP: tl.constexpr,
    ROW_SUM: tl.constexpr, KEY_SUM: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a bias gradient, contiguous float32, summed over every axis of size 1.

    entries, members, row_span, key_span: the number of batch entries, heads, row tiles and key
    tiles that each program loops over.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    tile, b0, h0 = tl.program_id(0), tl.program_id(2), tl.program_id(1)
    across = key_tiles // key_span  # tiles of the gradient along the keys
    row0, key0 = tile // across, tile % across
    total = tl.zeros([ROWS, KEYS], tl.float32)
    for n in tl.range(0, entries * members * row_span * key_span):
        j0 = (key0 + n % key_span) * KEYS
        n = n // key_span
        i0 = (row0 + n % row_span) * ROWS
        n = n // row_span
        h = h0 + n % members
        b = b0 + n // members
        i, j = i0 + tl.arange(0, ROWS), j0 + tl.arange(0, KEYS)
        left = load_tile(q, qs, b, h, i0, z.queries, ROWS, WIDTH, PADDED, False)
        right = load_tile(k, ks, b, h // z.group, j0, z.keys, KEYS, WIDTH, PADDED, False)
        s = tl.dot(left, right.T, input_precision=PRECISION)
        left = load_tile(do, dos, b, h, i0, z.queries, ROWS, VALUES, PADDED_VALUES, False)
        right = load_tile(v, vs, b, h // z.group, j0, z.keys, KEYS, VALUES, PADDED_VALUES, False)
        dp = tl.dot(left, right.T, input_precision=PRECISION)
        position = positions(t, z, b, i)
        hashed = position
        if t.seed is not None:
            hashed = row_hash(t, b, h, position)
        line = whole_rows(z, b, heads, h)
        base, rest, shared, entropy = row_numbers(rows, line, i)
        seen = visible(t, z, b, h, i[:, None], j[None, :], i[:, None], PIECES)
        s, _ = bend(s, t, z, b, h, i[:, None], j[None, :], position[:, None], CAP)
        s = tl.where(seen, s, NOTHING)
        s = kept_only(s, t, z, b, h, i[:, None], j[None, :])
        dp = tl.where(seen, dp, 0.0)
        _, ds, _ = weigh(
            s, s, dp, t, z, rows, j[None, :], hashed[:, None], base[:, None], rest[:, None],
            shared[:, None], entropy[:, None], CAP,
        )  # fmt: skip
        total += ds
    height = 1 if ROW_SUM else z.queries
    length = 1 if KEY_SUM else z.keys
    if ROW_SUM:
        total = tl.sum(total, 0)[None, :]
    if KEY_SUM:
        total = tl.sum(total, 1)[:, None]
    i = (row0 * ROWS + tl.arange(0, 1 if ROW_SUM else ROWS))[:, None]
    j = (key0 * KEYS + tl.arange(0, 1 if KEY_SUM else KEYS))[None, :]
    line = (b0 * tl.num_programs(1) + h0).to(tl.int64) * height
    tl.store(grad + (line + i) * length + j, total, mask=(i < height) & (j < length))


@triton.jit(do_not_specialize=LOOSE)
def grad_distance(
    q, do, k, v, qs, dos, ks, vs, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Sum ds over the pairs at one distance, -R < i - j < R; grad is (B, Hq, 2R + 1) float32."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    number, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    distance = number + 1 - z.reach
    heads = tl.num_programs(1)
    line = whole_rows(z, b, heads, h)
    total = tl.zeros([ROWS], tl.float32)
    wide, values = tl.arange(0, PADDED)[None, :], tl.arange(0, PADDED_VALUES)[None, :]
    start_q = q + b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1] + wide
    start_o = do + b.to(tl.int64) * dos[0] + h.to(tl.int64) * dos[1] + values
    start_k = k + b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1] + wide
    start_v = v + b.to(tl.int64) * vs[0] + (h // z.group).to(tl.int64) * vs[1] + values
    for i0 in tl.range(0, z.queries, ROWS):
        i = i0 + tl.arange(0, ROWS)
        position = positions(t, z, b, i)
        j = position - distance - z.first_key
        seen = visible(t, z, b, h, i, j, i, PIECES)
        load, load_values = seen[:, None] & (wide < WIDTH), seen[:, None] & (values < VALUES)
        row, key = i.to(tl.int64)[:, None], j.to(tl.int64)[:, None]
        left = tl.load(start_q + row * qs[2], mask=load, other=0.0).to(tl.float32)
        right = tl.load(start_k + key * ks[2], mask=load, other=0.0).to(tl.float32)
        s = tl.sum(left * right, 1)
        left = tl.load(start_o + row * dos[2], mask=load_values, other=0.0).to(tl.float32)
        right = tl.load(start_v + key * vs[2], mask=load_values, other=0.0).to(tl.float32)
        dp = tl.sum(left * right, 1)
        hashed = position
        if t.seed is not None:
            hashed = row_hash(t, b, h, position)
        base, rest, shared, entropy = row_numbers(rows, line, i)
        s, _ = bend(s, t, z, b, h, i, tl.maximum(j, 0), position, CAP)
        s = tl.where(seen, s, NOTHING)
        s = kept_only(s, t, z, b, h, i, j)
        _, ds, _ = weigh(s, s, dp, t, z, rows, j, hashed, base, rest, shared, entropy, CAP)
        total += ds
    place = (b * heads + h).to(tl.int64) * (2 * z.reach + 1) + number + 1
    tl.store(grad + place, tl.sum(total, 0))
