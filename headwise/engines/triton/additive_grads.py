"""The backward kernels of the additive score: its weights from lse, its slopes computed again.

∂s/∂q_d = w_d (1 - tanh²) = 4 w_d r (1 - r) with r = 1 / (1 + e^{2q} e^{2k}). A program owns the
rows, or the keys, that it writes; there are no atomics, and the result is the same every time.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.additive import (
    FAR_APART,
    pair_terms,
    scores,
)
from headwise.engines.triton.cells import seen_pairs, touched
from headwise.engines.triton.gradients import row_numbers, weigh
from headwise.engines.triton.online import bounds
from headwise.engines.triton.tiles import (
    FAR,
    LOOSE,
    Sizes,
    load_tile,
    logits,
    positions,
    row_hash,
    tanh,
)


@triton.jit
def slopes(
    grad, turned, raw, q, k, qs, ks, a, c, weight, z, b, h, i0, j0, near, AXIS: tl.constexpr,
    TURN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    EVEN: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Add Σ raw · w_d (1 - tanh²) along AXIS to column d of grad, and Σ raw · tanh to `turned`.

    raw is (ROWS, KEYS), of the rows from i0 and the keys from j0 on, and 0 where one is not seen.
    """
    column = tl.arange(0, PADDED)[None, :]
    i = tl.minimum(i0 + tl.arange(0, ROWS), z.queries - 1)[:, None]
    j = tl.minimum(j0 + tl.arange(0, KEYS), z.keys - 1)[None, :]
    if near:
        at_a, at_c = a + i, c + j
        for n in tl.range(0, EVEN // 2):
            x, y, shared = pair_terms(at_a, at_c, z.queries, z.keys)
            one, two = shared * y, shared * x
            u, w = 4.0 * tl.load(weight + 2 * n), 4.0 * tl.load(weight + 2 * n + 1)
            first = tl.sum(raw * (one - one * one), AXIS)[:, None] * u
            second = tl.sum(raw * (two - two * two), AXIS)[:, None] * w
            grad += tl.where(column == 2 * n, first, 0.0)
            grad += tl.where(column == 2 * n + 1, second, 0.0)
            if TURN:
                first = tl.sum(raw * (1.0 - 2.0 * one), AXIS)[:, None]
                second = tl.sum(raw * (1.0 - 2.0 * two), AXIS)[:, None]
                turned += tl.where(column == 2 * n, first, 0.0)
                turned += tl.where(column == 2 * n + 1, second, 0.0)
            at_a += 2 * z.queries
            at_c += 2 * z.keys
    else:
        line = q + b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1] + i.to(tl.int64) * qs[2]
        at = k + b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1]
        at += j.to(tl.int64) * ks[2]
        for d in tl.range(0, WIDTH):
            bent = tanh(tl.load(line + d).to(tl.float32) + tl.load(at + d).to(tl.float32))
            bent = tl.where(raw == 0.0, 0.0, bent)  # a key that nobody sees may hold a NaN
            first = tl.sum(raw * (1.0 - bent * bent), AXIS)[:, None] * tl.load(weight + d)
            grad += tl.where(column == d, first, 0.0)
            if TURN:
                turned += tl.where(column == d, tl.sum(raw * bent, AXIS)[:, None], 0.0)
    return grad, turned


@triton.jit(do_not_specialize=LOOSE)
def additive_grad_queries(
    q, k, v, do, qs, ks, vs, dos, factors, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad_q, grad_weight,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One block of query rows: its gradient, and its part of the weight's, (B, Hq, blocks, D)."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads, kh = tl.num_programs(1), h // group
    i = block * ROWS + tl.arange(0, ROWS)
    there = i < queries
    row = tl.minimum(i, queries - 1)
    position = positions(t, z, b, row)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t.seed, b, h, position)
    a = factors.a + (b * heads + h).to(tl.int64) * queries * EVEN
    c = factors.c + (b * (heads // group) + kh).to(tl.int64) * keys * EVEN
    weight = factors.weight + h * EVEN
    near = tl.load(factors.size + b * heads + h) < FAR_APART
    line = (b * heads + h).to(tl.int64) * queries
    lse, shared, entropy = row_numbers(rows, line, i, there)
    grads = load_tile(do, dos, b, h, block * ROWS, queries, ROWS, VALUES, PADDED_VALUES, False)

    grad = tl.zeros([ROWS, PADDED], tl.float32)
    turned = tl.zeros([ROWS, PADDED], tl.float32)
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last, lowest, highest = bounds(t, z, piece, b, h, row, PIECES)
        for n in tl.range(0, tl.maximum(tl.cdiv(highest - lowest, KEYS), 0)):
            j0 = lowest + n * KEYS
            j = j0 + tl.arange(0, KEYS)
            s = scores(
                q, k, qs, ks, a, c, weight, z, b, h, block * ROWS, j0, near, ROWS, KEYS, WIDTH,
                EVEN,
            )  # fmt: skip
            s, bent = logits(
                s, t, z, b, h, row[:, None], j[None, :], position[:, None], first[:, None],
                last[:, None], False, CAP, True,
            )  # fmt: skip
            values = load_tile(v, vs, b, kh, j0, highest, KEYS, VALUES, PADDED_VALUES, False)
            dp = tl.dot(grads, values.T, input_precision=PRECISION)
            seen = s > 0.5 * FAR
            _met, _ds, raw = weigh(
                s, bent, tl.where(seen, dp, 0.0), t, z, rows, j[None, :], hashed[:, None],
                lse[:, None], shared[:, None], entropy[:, None], False, CAP,
            )  # fmt: skip
            raw = tl.where(seen, raw, 0.0)
            grad, turned = slopes(
                grad, turned, raw, q, k, qs, ks, a, c, weight, z, b, h, block * ROWS, j0, near, 1,
                True, ROWS, KEYS, WIDTH, EVEN, PADDED,
            )  # fmt: skip

    column = tl.arange(0, PADDED)
    tl.store(
        grad_q + (line + i)[:, None] * WIDTH + column[None, :],
        grad.to(grad_q.dtype.element_ty),
        mask=there[:, None] & (column < WIDTH)[None, :],
    )
    part = ((b * heads + h).to(tl.int64) * tl.num_programs(0) + block) * WIDTH
    turned = tl.where(there[:, None], turned, 0.0)
    tl.store(grad_weight + part + column, tl.sum(turned, 0), mask=column < WIDTH)


@triton.jit(do_not_specialize=LOOSE)
def additive_grad_keys(
    q, k, v, do, qs, ks, vs, dos, factors, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad_k, grad_v,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, and every row of its heads that sees some of them."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    heads = tl.num_programs(1) * group
    j0 = block * KEYS
    j = j0 + tl.arange(0, KEYS)
    values = load_tile(v, vs, b, kh, j0, keys, KEYS, VALUES, PADDED_VALUES, False)
    c = factors.c + (b * tl.num_programs(1) + kh).to(tl.int64) * keys * EVEN
    sum_k = tl.zeros([KEYS, PADDED], tl.float32)
    sum_v = tl.zeros([KEYS, PADDED_VALUES], tl.float32)
    for member in tl.range(0, group):
        h = kh * group + member
        a = factors.a + (b * heads + h).to(tl.int64) * queries * EVEN
        weight = factors.weight + h * EVEN
        near = tl.load(factors.size + b * heads + h) < FAR_APART
        line = (b * heads + h).to(tl.int64) * queries
        for n in tl.range(0, tl.cdiv(queries, ROWS)):
            i0 = n * ROWS + tl.zeros([], tl.int32)
            i = i0 + tl.arange(0, ROWS)
            there = i < queries
            row = tl.minimum(i, queries - 1)
            some, _whole = touched(t, z, b, h, row, there, j0, tl.minimum(j0 + KEYS, keys), PIECES)
            if some:
                position = positions(t, z, b, row)
                hashed = position
                if t.seed is not None:
                    hashed = row_hash(t.seed, b, h, position)
                s = scores(
                    q, k, qs, ks, a, c, weight, z, b, h, i0, j0, near, ROWS, KEYS, WIDTH, EVEN,
                )  # fmt: skip
                s, bent = logits(
                    s, t, z, b, h, row[:, None], j[None, :], position[:, None], position[:, None],
                    position[:, None], False, CAP, False,
                )  # fmt: skip
                seen = seen_pairs(t, z, b, h, row[:, None], j[None, :], PIECES)
                seen = seen & there[:, None] & (j < keys)[None, :]
                s = tl.where(seen, s, FAR)
                lse, shared, entropy = row_numbers(rows, line, i, there)
                grads = load_tile(do, dos, b, h, i0, queries, ROWS, VALUES, PADDED_VALUES, False)
                dp = tl.dot(grads, values.T, input_precision=PRECISION)
                met, _ds, raw = weigh(
                    s, bent, tl.where(seen, dp, 0.0), t, z, rows, j[None, :], hashed[:, None],
                    lse[:, None], shared[:, None], entropy[:, None], False, CAP,
                )  # fmt: skip
                sum_v = tl.dot(met.to(grads.dtype).T, grads, sum_v, input_precision=PRECISION)
                raw = tl.where(seen, raw, 0.0)
                sum_k, _turned = slopes(
                    sum_k, sum_k, raw, q, k, qs, ks, a, c, weight, z, b, h, i0, j0, near, 0,
                    False, ROWS, KEYS, WIDTH, EVEN, PADDED,
                )  # fmt: skip

    line = (b * tl.num_programs(1) + kh).to(tl.int64) * keys
    here = (j < keys)[:, None]
    column = tl.arange(0, PADDED)[None, :]
    tl.store(
        grad_k + (line + j)[:, None] * WIDTH + column,
        sum_k.to(grad_k.dtype.element_ty),
        mask=here & (column < WIDTH),
    )
    column = tl.arange(0, PADDED_VALUES)[None, :]
    tl.store(
        grad_v + (line + j)[:, None] * VALUES + column,
        sum_v.to(grad_v.dtype.element_ty),
        mask=here & (column < VALUES),
    )
