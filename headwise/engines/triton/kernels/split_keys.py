"""The decoding kernels: a few queries, keys split over programs, the partial results merged.

All query rows that share a key head are one tile, so that a key is read only once. A program takes
a share of the keys and writes a `Partial`; `merge` joins them by the rule of
`headwise.core.partial.merge`. The KV cache is contiguous, paged, or int8 with one scale per key and
value.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from headwise.core.row_sums import RowParts, RowResults
from headwise.engines.triton.kernels.online import (
    beside_sink,
    joined_sums,
    leave,
    nothing_yet,
    put_sums,
    take_in,
)
from headwise.engines.triton.kernels.tile import (
    LOG2E,
    NOTHING,
    Given,
    Sizes,
    interval,
    logits,
    of_used,
    positions,
)


class Held(NamedTuple):
    """The scales of an int8 cache and the page table of a paged one; None for other caches."""

    key_scales: Tensor | None  # (B, Hkv, M, 1): int8 keys are multiplied by them
    value_scales: Tensor | None
    pages: Tensor | None  # (B, any) int32: the page in the pool of each page of a sequence


STRIDES = [
    "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "v_batch", "v_head", "v_row",
    "scale_batch", "scale_head", "page_batch",
]  # fmt: skip


@triton.jit
def rows_at(x, held, first, row_step, b, batch_step, page_batch, j0, keys, KEYS: tl.constexpr,
            PAGE: tl.constexpr):  # fmt: skip
    """Return the addresses of the rows [j0, j0 + KEYS) of a head, which starts at x + first."""
    step = tl.arange(0, KEYS)
    if PAGE == 0:
        start = x + first + b.to(tl.int64) * batch_step + j0.to(tl.int64) * row_step
        rows = start + step.to(tl.int64) * row_step
    elif PAGE >= KEYS:  # a tile lies in one page
        page = tl.load(held.pages + b.to(tl.int64) * page_batch + j0 // PAGE).to(tl.int64)
        start = x + first + page * batch_step + (j0 % PAGE).to(tl.int64) * row_step
        rows = start + step.to(tl.int64) * row_step
    else:
        j = j0 + step
        page = tl.load(held.pages + b.to(tl.int64) * page_batch + j // PAGE, mask=j < keys, other=0)
        rows = x + first + page.to(tl.int64) * batch_step + (j % PAGE).to(tl.int64) * row_step
    return rows


@triton.jit
def take(rows, here, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load (KEYS, PADDED) from the addresses of rows; zeros where a key is not `here`."""
    column = tl.arange(0, PADDED)
    inside = here[:, None]
    if WIDTH < PADDED:
        inside = inside & (column < WIDTH)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def rows_together(
    q, steps, z, b, kh, ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):
    """Load the rows that share a key head: which are valid, their queries, heads and tile."""
    row = tl.arange(0, ROWS)
    there = row < z.group * z.queries
    row = tl.minimum(row, z.group * z.queries - 1)
    i = row % z.queries
    h = kh * z.group + row // z.queries
    column = tl.arange(0, PADDED)
    start = b.to(tl.int64) * steps[0] + h.to(tl.int64) * steps[1]
    start += i.to(tl.int64) * steps[2]
    inside = there[:, None] & (column < WIDTH)[None, :]
    return there, i, h, tl.load(q + start[:, None] + column[None, :], mask=inside, other=0.0)


@triton.jit
def add_values(acc, p, values, size, PRECISION: tl.constexpr):
    """Return acc + p · values, each value multiplied by its size, unless that is None."""
    if size is not None and values.dtype == tl.float16:
        # A weight times a small size would be subnormal, so only ratios of sizes are rounded.
        most = tl.max(size, 0)
        p *= (size / tl.where(most > 0.0, most, 1.0))[None, :]
        acc += tl.dot(p.to(values.dtype), values) * most
    else:
        if size is not None:
            p *= size[None, :]
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc


@triton.jit
def share(
    q, k, v, held, t, z, parts, strides, splits,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute one share of the keys of one key head of one batch entry, for all rows of its group.

    Strides are in multiples of UNIT, so that the compiler can use wide loads.
    """
    number, kh, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row = strides[:9]
    scale_batch, scale_head, page_batch = strides[9:]
    queries, keys, group = z.queries, z.keys, z.group
    steps = (q_batch * UNIT, q_head * UNIT, q_row * UNIT)
    there, i, h, tile_q = rows_together(q, steps, z, b, kh, ROWS, WIDTH, PADDED)
    position = positions(t, z, b, i)
    first_k = kh.to(tl.int64) * (k_head * UNIT)
    first_v = kh.to(tl.int64) * (v_head * UNIT)
    scales = b.to(tl.int64) * scale_batch + kh.to(tl.int64) * scale_head

    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    state = nothing_yet(tl.zeros([ROWS], tl.float32))
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last = i * 0, i * 0 + keys
        lowest, highest = keys * 0, keys
        if CAUSAL:
            last = keys - queries + i + 1
        if PIECES > 0:
            first, last = interval(t, z, piece, b, h, i)
            empty = first >= last
            lowest = tl.min(tl.where(empty, keys, first), 0)
            highest = tl.max(tl.where(empty, 0, last), 0)
        blocks = tl.maximum(tl.cdiv(highest - lowest, KEYS), 0)
        for n in tl.range((number * blocks) // splits, ((number + 1) * blocks) // splits):
            j0 = lowest + n * KEYS
            j = j0 + tl.arange(0, KEYS)
            here = j < highest
            tile = take(
                rows_at(k, held, first_k, k_row * UNIT, b, k_batch * UNIT, page_batch, j0, keys,
                        KEYS, PAGE),
                here, WIDTH, PADDED,
            )  # fmt: skip
            values = take(
                rows_at(v, held, first_v, v_row * UNIT, b, v_batch * UNIT, page_batch, j0, keys,
                        KEYS, PAGE),
                here, VALUES, PADDED_VALUES,
            )  # fmt: skip
            s = tl.dot(tile_q, tile.to(tile_q.dtype).T, input_precision=PRECISION)
            if held.key_scales is not None:
                s *= tl.load(held.key_scales + scales + j, mask=here, other=0.0)[None, :]
            s, _ = logits(
                s, t, z, b, h[:, None], i[:, None], j[None, :], position[:, None],
                first[:, None], last[:, None], False, CAP, True,
            )  # fmt: skip
            state, p, shrink = take_in(state, parts, s, position, j0, z.first_key, KEYS)
            if t.intervals is not None or t.dense is not None:
                # A hidden key may hold NaN, and 0 · NaN is NaN.
                used = tl.max((s != NOTHING).to(tl.int32), 0)
                values = of_used(values, used)
            size = None
            if held.value_scales is not None:
                size = tl.load(held.value_scales + scales + j, mask=here, other=0.0)
            acc = add_values(acc * shrink[:, None], p, values.to(tile_q.dtype), size, PRECISION)

    heads = tl.num_programs(1) * group
    line = ((b * heads + h).to(tl.int64) * queries + i) * splits + number
    leave(parts, state, acc, line, there, VALUES, PADDED_VALUES)


@triton.jit(do_not_specialize=[*STRIDES, "splits", *Sizes._fields])
def split(
    q, k, v, held, t, parts,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    scale_batch, scale_head, page_batch, splits,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Compute a share of the keys of any call."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    strides = (
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, scale_batch,
        scale_head, page_batch,
    )  # fmt: skip
    share(
        q, k, v, held, t, z, parts, strides, splits, ROWS, KEYS, WIDTH, VALUES, PADDED,
        PADDED_VALUES, UNIT, PAGE, CAUSAL, PRECISION, PIECES, CAP,
    )  # fmt: skip


@triton.jit(do_not_specialize=["size", *STRIDES, "splits", "queries", "keys", "group", "scale"])
def split_step(
    q, k, v, held, mixed, size,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    scale_batch, scale_head, page_batch, splits, queries, keys, group, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, UNIT: tl.constexpr,
    PAGE: tl.constexpr, CAUSAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Compute a share of the keys of a plain step, with few arguments, so that launches are fast.

    `mixed` has room for `size` parts: their values, then their maxima, then their totals. CHAINED:
    programmatic dependent launch; the kernel starts early and waits for the one before it.
    """
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    z = Sizes(queries, keys, group, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, scale, 0.0, 1.0)
    strides = (
        q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, scale_batch,
        scale_head, page_batch,
    )  # fmt: skip
    given = Given(
        None, None, None, None, None, None, None, None, None, None, None, None, None, None, None
    )  # fmt: skip
    maximum = mixed + size * WIDTH
    parts = RowParts(mixed, maximum, maximum + size)
    share(
        q, k, v, held, given, z, parts, strides, splits, ROWS, KEYS, WIDTH, WIDTH, WIDTH, WIDTH,
        UNIT, PAGE, CAUSAL, "tf32x3", 0, False,
    )  # fmt: skip


@triton.jit
def join_row(
    parts, out, merged, sinks, splits, queries, heads,
    SPLITS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge all parts of one row at once, for BLOCK of its values, as `partial.merge` does."""
    line, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, SPLITS)
    at = line * splits + n
    there = n < splits
    m = tl.load(parts.maximum + at, mask=there, other=NOTHING)
    top = tl.max(m, 0)
    l = tl.load(parts.total + at, mask=there, other=0.0)
    moved = (m - tl.where(top == NOTHING, 0.0, top)) * LOG2E
    share = tl.exp2(moved)  # of each part; 0 if it saw no key
    seen = tl.sum(l * share, 0)
    weight, over, lse, log_total = beside_sink(top, seen, sinks, (line // queries) % heads)
    width = block * BLOCK + tl.arange(0, BLOCK)
    inside = there[:, None] & (width < VALUES)[None, :]
    values = tl.load(parts.mixed + at[:, None] * VALUES + width[None, :], mask=inside, other=0.0)
    mixed = tl.sum(values * (share * weight)[:, None], 0)
    tl.store(out + line * VALUES + width, mixed.to(out.dtype.element_ty), mask=width < VALUES)
    if block == 0:
        if merged.lse is not None:
            tl.store(merged.lse + line, lse)
            tl.store(
                merged.max_logit + line, tl.where((seen == seen) | (top == -NOTHING), top, seen)
            )
        if merged.log_total is not None:
            tl.store(merged.log_total + line, log_total)
        sums = joined_sums(parts, at, there, l, moved, share)
        put_sums(merged, sums, seen, weight, over, line, None)
        if merged.visible is not None:
            count = tl.load(parts.visible + at, mask=there, other=0.0)
            mean = tl.load(parts.logit_mean + at, mask=there, other=0.0)
            spread = tl.load(parts.logit_var + at, mask=there, other=0.0)
            whole = tl.maximum(tl.sum(count, 0), 1.0)
            # About the largest mean of a part, so that the terms of the sum stay small.
            about = tl.max(tl.where(count > 0.0, mean, NOTHING), 0)
            about = tl.where(about == NOTHING, 0.0, about)
            middle = tl.sum(count * tl.where(count > 0.0, mean - about, 0.0), 0) / whole
            gap = tl.where(count > 0.0, mean - about - middle, 0.0)
            variance = tl.sum(spread + count * gap * gap, 0) / whole
            tl.store(merged.logit_mean + line, about + middle)
            tl.store(merged.logit_var + line, tl.maximum(variance, 0.0))
            tl.store(merged.visible + line, tl.sum(count, 0))


@triton.jit(do_not_specialize=["splits", "queries", "heads"])
def merge(
    parts, out, merged, sinks, splits, queries, heads,
    SPLITS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the parts of any call."""
    join_row(parts, out, merged, sinks, splits, queries, heads, SPLITS, VALUES, BLOCK)


@triton.jit(do_not_specialize=["size", "splits"])
def merge_step(
    mixed, out, size, splits,
    SPLITS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a plain step."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    maximum = mixed + size * VALUES
    parts = RowParts(mixed, maximum, maximum + size)
    merged = RowResults(None, None, None)  # type: ignore[arg-type]
    join_row(parts, out, merged, None, splits, 1, 1, SPLITS, VALUES, BLOCK)
