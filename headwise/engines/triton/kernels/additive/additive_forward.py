"""The forward pass of the additive score: an online softmax over tiles of `additive_scores`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.additive.additive_scores import (
    ROW_LANES,
    as_rows,
    as_tile,
    scores,
    spread_keys,
    spread_rows,
)
from headwise.engines.triton.kernels.online import bounds, leave, nothing_yet, take_in
from headwise.engines.triton.kernels.tile import (
    LOOSE,
    NOTHING,
    Sizes,
    interval,
    kept,
    load_tile,
    logits,
    positions,
    row_hash,
)


@triton.jit
def each_as_rows(numbers, ROWS: tl.constexpr):
    """Return `as_rows` of each of a tuple of numbers per row."""
    found = (as_rows(numbers[0], ROWS),)  # Triton knows no stars
    for n in tl.static_range(1, len(numbers)):
        found = found + (as_rows(numbers[n], ROWS),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit(do_not_specialize=["splits", *LOOSE])
def additive_forward(
    q, k, v, qs, ks, vs, weight, powers, t, parts, splits,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr,
    FOURS: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr, CLEAN: tl.constexpr,
):  # fmt: skip
    """Compute the sums of ROWS query rows of one head over a share of the keys, for `merge`."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    number, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    number = tl.num_programs(0) - 1 - number  # late rows of a causal mask see the most keys
    block, share = number // splits, number % splits
    heads, kh = tl.num_programs(1), h // group
    row = tl.minimum(block * ROWS + tl.arange(0, ROWS), queries - 1)
    i = tl.minimum(block * ROWS + spread_rows(ROWS, WARPS), queries - 1)
    position = positions(t, z, b, i)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t, b, h, position)

    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    zero = tl.zeros([ROWS // (WARPS * ROW_LANES), WARPS, ROW_LANES], tl.float32)
    state = nothing_yet(zero)
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        each_first, each_last, lowest, highest = bounds(t, z, piece, b, h, row, PIECES)
        all_first, all_last = tl.max(each_first, 0), tl.min(each_last, 0)
        first, last = i * 0, i * 0 + keys
        if PIECES > 0:
            first, last = interval(t, z, piece, b, h, i)
        start = lowest // KEYS
        count = tl.maximum(tl.cdiv(highest, KEYS) - start, 0)
        for n in tl.range(start + share * count // splits, start + (share + 1) * count // splits):
            j0 = n * KEYS
            j = j0 + spread_keys(KEYS)
            s = scores(
                q, k, qs, ks, weight, powers, z, b, h, heads, block, n, ROWS, KEYS, WARPS, WIDTH,
                FOURS,
            )  # fmt: skip
            s, _ = logits(s, t, z, b, h, i, j, position, first, last, False, CAP, False)
            edge = (all_first > j0) | (all_last < j0 + KEYS)
            if t.dense is not None:
                edge = edge | True
            if edge:
                s, _ = logits(s, t, z, b, h, i, j, position, first, last, True, False, True)
            state, p, shrink = take_in(
                state, parts, s, position.reshape(zero.shape), j0, first_key, KEYS
            )
            if t.seed is not None:
                p = tl.where(kept(hashed, j + first_key, threshold), p * kept_share, 0.0)
            values = load_tile(v, vs, b, kh, j0, highest, KEYS, VALUES, PADDED_VALUES, False)
            if CLEAN:  # a hidden key may hold NaN
                used = tl.max(as_tile((s != NOTHING).to(tl.int32), ROWS, KEYS), 0)
                values = tl.where(used[:, None] != 0, values, 0.0).to(values.dtype)
            p = as_tile(p.to(values.dtype), ROWS, KEYS)
            shrink = as_rows(shrink, ROWS)[:, None]
            acc = tl.dot(p, values, acc * shrink, input_precision=PRECISION)

    l, m, sums, moments = state
    state = (
        as_rows(l, ROWS),
        as_rows(m, ROWS),
        each_as_rows(sums, ROWS),
        each_as_rows(moments, ROWS),
    )
    i = block * ROWS + tl.arange(0, ROWS)
    line = ((b * heads + h).to(tl.int64) * queries + i) * splits + share
    leave(parts, state, acc, line, i < queries, VALUES, PADDED_VALUES)
