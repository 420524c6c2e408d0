"""The kernel of a row's largest keys: the weight that they hold, how many a share needs, which.

A row's largest weights are those above some logarithm. Each pass over the keys counts how many lie
above a few cuts of the range in which it must be, or adds up their weights, and keeps the part in
between: no weight is stored, however many keys are asked for. What is left at the end holds the
keys at the edge, whose weights are equal to rounding.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.maps.map_cells import (
    log_weights,
    row_totals,
    rows_of,
    seen_pairs,
    seen_range,
)
from headwise.engines.triton.kernels.tile import LOOSE, NOTHING, Sizes, bend, positions

FAINT = tl.constexpr(-150.0)  # 2 to this power is 0 in float32
NARROW = tl.constexpr(5e-7)  # a range of logarithms so narrow that its weights are equal
PASSES = tl.constexpr(14)
MISSING = tl.constexpr(1e-6)  # the part of a share that rounding may hide


class Bounds(NamedTuple):
    """What tells a row's largest keys from the others, as `Given` takes it; (B, Hq, N) each.

    Each bound lies midway between the logits that it tells apart, so that it does so too for a
    kernel that rounds them otherwise.
    """

    amount: Tensor  # int32: how many keys are kept
    least: Tensor
    above: Tensor
    last: Tensor  # int32


@triton.jit
def weights_at(
    tile_q, k, start_k, k_row, t, z, b, h, i, position, base, rest, j,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr,
    CAP: tl.constexpr, MARKED: tl.constexpr = True,
):  # fmt: skip
    """Return log2 of the weights on the keys j, (rows, keys), and their logits; -inf if hidden."""
    inside = j < z.keys
    tile_k = rows_of(k, start_k, k_row, j, inside, WIDTH, PADDED)
    s = tl.dot(tile_q, tile_k.T, input_precision=PRECISION)
    s, _bent = bend(s, t, z, b, h, i[:, None], j[None, :], position[:, None], CAP)
    seen = seen_pairs(t, z, b, h, i[:, None], j[None, :], PIECES, MARKED) & inside[None, :]
    seen = seen & (base != float("inf"))[:, None]
    return tl.where(seen, log_weights(s, base, rest), NOTHING), s


@triton.jit
def between(low, high):
    """Return a number in the middle of (low, high], and `high` if there is none in between."""
    middle = tl.where(high == float("inf"), high, 0.5 * low + 0.5 * high)
    middle = tl.where(low == NOTHING, NOTHING, middle)
    return tl.where((middle > low) | (low == NOTHING), middle, high)


@triton.jit(do_not_specialize=[*LOOSE, "count", "share"])
def held(
    q, k, totals, mass_out, number_out, bounds, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share, count, share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CUTS: tl.constexpr, BY_MASS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Find the weight of the `count` largest keys of a block of rows, mass_out (B, Hq, N).

    BY_MASS: how many of the largest hold `share` of each row's weight, number_out (B, Hq, N).
    With bounds: what tells apart the largest, of which each row has its own amount.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.num_programs(0) - 1 - block  # late rows of a causal mask see the most keys
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    i = tl.minimum(i, queries - 1)
    start_q = b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1]
    start_k = b.to(tl.int64) * ks[0] + (h // group).to(tl.int64) * ks[1]
    line = (b * tl.num_programs(1) + h).to(tl.int64) * queries + i
    tile_q = rows_of(q, start_q, qs[2], i, here, WIDTH, PADDED)
    base, rest = row_totals(totals, line, here)
    position = positions(t, z, b, i)
    begin, end = seen_range(t, z, b, h, i, here, PIECES)
    tiles = tl.maximum(tl.cdiv(end - begin, KEYS), 0)
    column = tl.arange(0, KEYS)

    number = tl.zeros([ROWS], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    peak = tl.zeros([ROWS], tl.float32) + NOTHING
    for n in tl.range(0, tiles):
        j = begin + n * KEYS + column
        e, _s = weights_at(
            tile_q, k, start_k, ks[2], t, z, b, h, i, position, base, rest, j, WIDTH, PADDED,
            PRECISION, PIECES, CAP,
        )  # fmt: skip
        number += tl.sum((e > NOTHING).to(tl.float32), 1)
        mass += tl.sum(tl.exp2(e), 1)
        peak = tl.maximum(peak, tl.max(e, 1))

    # The edge lies in [lower, upper); what lies at or above `upper` is less than the target.
    upper = tl.where(number > 0.0, peak + (1.0 + tl.abs(peak)) * NARROW, 0.0)
    lower = tl.zeros([ROWS], tl.float32) + FAINT
    if BY_MASS:
        target = mass * share * (1.0 - MISSING)
        unneeded = tl.log2(tl.maximum(mass * (1.0 - share), 1e-37) / tl.maximum(number, 1.0))
        lower = tl.maximum(lower, unneeded - 1.0)  # all weights below it sum to less than the rest
        unsettled = here & (mass > 0.0)
    else:
        target = tl.zeros([ROWS], tl.float32) + count
        if bounds is not None:
            target = tl.load(bounds.amount + line).to(tl.float32)
        unsettled = here & (number > target)
    slot = tl.arange(0, CUTS)[None, :]
    rounds = 0
    while (tl.max(unsettled.to(tl.int32), 0) > 0) & (rounds < PASSES):
        rounds += 1
        step = (upper - lower) / (CUTS + 1)
        sums = tl.zeros([ROWS, CUTS], tl.float32)
        for n in tl.range(0, tiles):
            j = begin + n * KEYS + column
            e, _s = weights_at(
                tile_q, k, start_k, ks[2], t, z, b, h, i, position, base, rest, j, WIDTH, PADDED,
                PRECISION, PIECES, CAP,
            )  # fmt: skip
            amount = e * 0.0 + 1.0
            if BY_MASS:
                amount = tl.exp2(e)
            for cut in tl.static_range(CUTS):
                above = e >= (lower + step * (cut + 1))[:, None]
                part = tl.sum(tl.where(above, amount, 0.0), 1)
                sums += tl.where(slot == cut, part[:, None], 0.0)
        if BY_MASS:
            beyond = sums >= target[:, None]
        else:
            beyond = sums > target[:, None]
        crossed = tl.sum(beyond.to(tl.int32), 1)
        next_lower = lower + step * crossed
        next_upper = tl.where(crossed < CUTS, lower + step * (crossed + 1), upper)
        at_upper = tl.sum(tl.where(slot == crossed[:, None], sums, 0.0), 1)
        exact = (crossed < CUTS) & (at_upper == target)
        lower = tl.where(unsettled, next_lower, lower)
        upper = tl.where(unsettled, next_upper, upper)
        wide = upper - lower > (1.0 + tl.abs(upper)) * NARROW
        unsettled = unsettled & wide
        if not BY_MASS:
            unsettled = unsettled & (exact == 0)

    inside_number = tl.zeros([ROWS], tl.float32)
    inside_mass = tl.zeros([ROWS], tl.float32)
    above_number = tl.zeros([ROWS], tl.float32)
    above_mass = tl.zeros([ROWS], tl.float32)
    # The largest logit below the edge and in it, the smallest in it and above it.
    below_top, inside_top = tl.zeros([ROWS], tl.float32) + NOTHING, peak * 0.0 + NOTHING
    inside_end = tl.zeros([ROWS], tl.float32) + float("inf")
    above_end = inside_end
    for n in tl.range(0, tiles):
        j = begin + n * KEYS + column
        e, s = weights_at(
            tile_q, k, start_k, ks[2], t, z, b, h, i, position, base, rest, j, WIDTH, PADDED,
            PRECISION, PIECES, CAP,
        )  # fmt: skip
        p = tl.exp2(e)
        above = e >= upper[:, None]
        inside = (e >= lower[:, None]) & (e < upper[:, None])
        above_number += tl.sum(above.to(tl.float32), 1)
        above_mass += tl.sum(tl.where(above, p, 0.0), 1)
        inside_number += tl.sum(inside.to(tl.float32), 1)
        inside_mass += tl.sum(tl.where(inside, p, 0.0), 1)
        if bounds is not None:
            below = (e < lower[:, None]) & (e > NOTHING)
            below_top = tl.maximum(below_top, tl.max(tl.where(below, s, NOTHING), 1))
            inside_top = tl.maximum(inside_top, tl.max(tl.where(inside, s, NOTHING), 1))
            inside_end = tl.minimum(inside_end, tl.min(tl.where(inside, s, float("inf")), 1))
            above_end = tl.minimum(above_end, tl.min(tl.where(above, s, float("inf")), 1))
    if bounds is not None:
        room = target - above_number  # for keys of the edge
        every = (number > target) == 0
        least = between(below_top, inside_end)
        least = tl.where(room > 0.0, least, between(tl.maximum(below_top, inside_top), above_end))
        crowded = (every == 0) & (room > 0.0) & (room < inside_number)
        last = tl.zeros([ROWS], tl.int32) + keys
        found = tl.zeros([ROWS], tl.float32)
        tiles = tl.where(tl.max(crowded.to(tl.int32), 0) > 0, tiles, 0)
        for n in tl.range(0, tiles):
            j = begin + n * KEYS + column
            e, _s = weights_at(
                tile_q, k, start_k, ks[2], t, z, b, h, i, position, base, rest, j, WIDTH, PADDED,
                PRECISION, PIECES, CAP,
            )  # fmt: skip
            inside = ((e >= lower[:, None]) & (e < upper[:, None])).to(tl.float32)
            number_of = found[:, None] + tl.cumsum(inside, 1)
            here_last = (inside > 0.0) & (number_of == room[:, None])
            place = tl.max(tl.where(here_last, j[None, :], -1), 1)
            last = tl.where(crowded & (place >= 0), place, last)
            found += tl.sum(inside, 1)
        none = tl.zeros([ROWS], tl.float32) + NOTHING
        tl.store(bounds.least + line, tl.where(every, none, least), mask=here)
        above_edge = tl.where(crowded, between(inside_top, above_end), none)
        tl.store(bounds.above + line, above_edge, mask=here)
        tl.store(bounds.last + line, last, mask=here)
    else:
        each = tl.where(inside_number > 0.0, inside_mass / tl.maximum(inside_number, 1.0), 0.0)
        if BY_MASS:
            more = tl.ceil((target - above_mass) / tl.where(each > 0.0, each, 1.0))
            more = tl.minimum(tl.maximum(more, 1.0), tl.maximum(inside_number, 1.0))
            needed = tl.where(mass > 0.0, tl.minimum(above_number + more, number), 0.0)
            tl.store(number_out + line, needed.to(tl.int32), mask=here)
        else:
            found = above_mass + (target - above_number) * each
            found = tl.where(number > target, found, mass)
            tl.store(mass_out + line, found, mask=here)
