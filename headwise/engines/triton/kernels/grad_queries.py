"""The backward kernel of the queries: a block of rows, and every key that it sees."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.extents import edge_of, met, middle_of
from headwise.engines.triton.kernels.gradients import row_numbers, weigh, whole_rows
from headwise.engines.triton.kernels.tile import (
    LOOSE,
    NOTHING,
    Sizes,
    load_tile,
    logits,
    of_used,
    positions,
    row_hash,
)


class RowSums(NamedTuple):
    """Row sums for gradients of slopes and relative table, (B, Hq, N) each; None if not needed."""

    slopes: Tensor | None  # Σ ds |i - j|
    before: Tensor | None  # Σ ds over keys at least R before the query
    after: Tensor | None  # Σ ds over keys at least R after it


@triton.jit
def step(
    state, numbers, q, do, tensors, t, z, rows, sums, b, h, i0, j0, first, last,
    position, hashed, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """Add the keys [j0, j0 + KEYS) to the rows' gradient."""
    grad, slopes, before, after = state
    base, rest, shared, entropy = numbers
    k, v, ks, vs, bias, dense = tensors
    kh = h // z.group
    i, j = i0 + tl.arange(0, q.shape[0]), (j0 + tl.arange(0, KEYS))[None, :]
    keys = load_tile(k, ks, b, kh, j0, z.keys, KEYS, WIDTH, PADDED, TMA)
    values = load_tile(v, vs, b, kh, j0, z.keys, KEYS, VALUES, PADDED_VALUES, TMA)
    s = tl.dot(q, keys.T, input_precision=PRECISION)
    dp = tl.dot(do, values.T, input_precision=PRECISION)
    s, bent = logits(
        s, t, z, b, h, i[:, None], j, position[:, None], first[:, None], last[:, None],
        False, CAP, MASKED, i0, j0, bias, dense,
    )  # fmt: skip
    if MASKED:
        seen = s != NOTHING
        dp = tl.where(seen, dp, 0.0)
        if CLEAN:  # as in the forward: a hidden key may hold NaN
            used = tl.max(seen.to(tl.int32), 0)
            keys = of_used(keys, used)
    _, ds, raw = weigh(
        s, bent, dp, t, z, rows, j, hashed[:, None], base[:, None], rest[:, None],
        shared[:, None], entropy[:, None], CAP,
    )  # fmt: skip
    away = position[:, None] - (j + z.first_key)
    if sums.slopes is not None:
        slopes += tl.sum(ds * tl.abs(away).to(tl.float32), 1)
    if sums.before is not None:
        before += tl.sum(tl.where(away >= z.reach, ds, 0.0), 1)
        after += tl.sum(tl.where(away <= -z.reach, ds, 0.0), 1)
    grad = tl.dot(raw.to(keys.dtype), keys, grad, input_precision=PRECISION)
    return grad, slopes, before, after


@triton.jit(do_not_specialize=LOOSE)
def grad_queries(
    q, do, k, v, qs, dos, ks, vs, bias, dense, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    rows, grad_q, sums,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
    CLEAN: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one block of ROWS query rows; the loops are the forward's."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PIECES > 0:
        block = tl.num_programs(0) - 1 - block
    i0 = block * ROWS
    i = i0 + tl.arange(0, ROWS)
    tensors = (k, v, ks, vs, bias, dense)
    here = i < z.queries
    position = positions(t, z, b, i)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t, b, h, position)
    one, two, dirty, counts = met(t, z, b, h, i, KEYS, PIECES)
    edges, all_edges, middle, all_middle = counts
    here_q = load_tile(q, qs, b, h, i0, z.queries, ROWS, WIDTH, PADDED, TMA)
    grads = load_tile(do, dos, b, h, i0, z.queries, ROWS, VALUES, PADDED_VALUES, TMA)
    line = (b * tl.num_programs(1) + h).to(tl.int64) * z.queries
    numbers = row_numbers(rows, whole_rows(z, b, tl.num_programs(1), h), i)
    zero = tl.zeros([ROWS], tl.float32)
    state = (tl.zeros([ROWS, PADDED], tl.float32), zero, zero, zero)
    cleaned = 0
    if CLEAN:
        cleaned = tl.where(dirty, all_edges, 0)
        for n in tl.range(0, cleaned):
            j0, now_first, now_last = edge_of(n, one, two, edges, KEYS, PIECES)
            state = step(
                state, numbers, here_q, grads, tensors, t, z, rows, sums, b, h, i0, j0,
                now_first, now_last, position, hashed, KEYS, WIDTH, VALUES, PADDED,
                PADDED_VALUES, TMA, PRECISION, CAP, True, True,
            )  # fmt: skip
    for n in tl.range(cleaned, all_edges):
        j0, now_first, now_last = edge_of(n, one, two, edges, KEYS, PIECES)
        state = step(
            state, numbers, here_q, grads, tensors, t, z, rows, sums, b, h, i0, j0,
            now_first, now_last, position, hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES,
            TMA, PRECISION, CAP, True, False,
        )  # fmt: skip
    for n in tl.range(0, all_middle):
        j0 = middle_of(n, one, two, middle, KEYS, PIECES)
        state = step(
            state, numbers, here_q, grads, tensors, t, z, rows, sums, b, h, i0, j0,
            position, position, position, hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES,
            TMA, PRECISION, CAP, False, False,
        )  # fmt: skip

    grad, slopes, before, after = state
    column = tl.arange(0, PADDED)
    tl.store(
        grad_q + (line + i)[:, None] * WIDTH + column[None, :],
        (grad * z.scale).to(grad_q.dtype.element_ty),
        mask=here[:, None] & (column < WIDTH)[None, :],
    )
    if sums.slopes is not None:
        tl.store(sums.slopes + line + i, slopes, mask=here)
    if sums.before is not None:
        tl.store(sums.before + line + i, before, mask=here)
        tl.store(sums.after + line + i, after, mask=here)
