"""One step of the online softmax with its statistics: `headwise.core.partial.merge` for a tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import FAR, LN2, LOG2E, NOTHING, interval


@triton.jit
def bounds(t, z, piece: tl.constexpr, b, h, i, PIECES: tl.constexpr):
    """[first, last) of each row in one piece, and of all of them together."""
    first, last = i * 0, i * 0 + z.keys
    lowest, highest = z.keys * 0, z.keys
    if PIECES > 0:
        first, last = interval(t, z, piece, b, h, i)
        empty = first >= last
        lowest = tl.min(tl.where(empty, z.keys, first), 0)
        highest = tl.max(tl.where(empty, 0, last), 0)
    return first, last, lowest, highest


@triton.jit
def nothing_yet(ROWS: tl.constexpr):
    """The sums of rows that have seen no key, as `take_in` hands them on."""
    zero = tl.zeros([ROWS], tl.float32)
    return zero, zero + NOTHING, zero, zero, zero, zero, zero


@triton.jit
def most(x):
    """The largest of each row of a tile, (rows, keys) or as `additive_scores` spreads it."""
    return tl.max(x, 1) if len(x.shape) == 2 else tl.max(tl.max(x, 1), 3)


@triton.jit
def all_of(x):
    """The sum of each row of a tile, as in `most`."""
    return tl.sum(x, 1) if len(x.shape) == 2 else tl.sum(tl.sum(x, 1), 3)


@triton.jit
def beside(row, s):
    """A number of each row, to meet the tile s."""
    return row[:, None] if len(s.shape) == 2 else row[:, None, :, :, None]


@triton.jit
def steps(s, KEYS: tl.constexpr):
    """How far each key of a tile is from its first."""
    if len(s.shape) == 2:
        found = tl.arange(0, KEYS)[None, :]
    else:
        lanes: tl.constexpr = s.shape[4]
        found = tl.arange(0, KEYS // lanes)[None, :, None, None, None] * lanes
        found += tl.arange(0, lanes)[None, None, None, None, :]
    return found


@triton.jit
def take_in(
    sums, s, unit, position, j0, first_key, KEYS: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Merge the logits s of the KEYS from j0 on into the rows' sums; s as `most` takes it.

    Returns the sums, the tile's weights before division, and what older sums are multiplied by.
    `unit` turns a logit into one of base 2, because the exponential of the hardware is 2^x.
    """
    l, m, shifted, far, count, mean, spread = sums
    new = tl.maximum(m, most(s) * unit)
    # A row that has seen nothing yet must not take FAR from FAR: fused into one instruction the
    # product is not rounded as `new` was, and their difference is anything up to 1e23.
    base = tl.where(new < unit * (0.5 * FAR), 0.0, new)
    e = s * unit - beside(base, s)
    p = tl.exp2(e)
    shrink = tl.exp2(m - new)
    total = all_of(p)
    if ENTROPY:
        moved = tl.where(m == NOTHING, 0.0, m - new)
        shifted = (shifted + l * moved) * shrink + all_of(p * e)
    if DISTANCE:
        away = (position - (j0 + first_key)).to(tl.float32)
        far = far * shrink + (away * total - all_of(p * steps(s, KEYS).to(tl.float32)))
    if MOMENTS:  # about the largest so far, which is at most √n deviations from the mean
        there = (s <= 0.5 * FAR) == 0  # NaN is there
        found = all_of(there.to(tl.float32))
        e = tl.where(there, e, 0.0)
        off = all_of(e) / tl.maximum(found, 1.0)
        here = tl.where(found == 0.0, 0.0, new + off)
        share = found / tl.maximum(count + found, 1.0)
        gap = here - mean
        squares = all_of(e * e)
        about = tl.where(squares == float("inf"), squares, squares - found * off * off)
        spread += about + gap * gap * count * share
        mean += gap * share
        count += found
    return (l * shrink + total, new, shifted, far, count, mean, spread), p, shrink


@triton.jit
def saw_nothing(l, m, unit):
    """Which rows met no key: not those that met NaN, of which a maximum does not tell."""
    return (m < unit * (0.5 * FAR)) & (l == l)


@triton.jit
def beside_sink(m, sinks, h):
    """Where a row's weights are counted from, as a power of two and as a logit; its sink's weight.

    That is m, its largest power, or its sink. A sink that rules is not rounded twice and weighs 1:
    a device would subtract the rounded product from the unrounded one, and find the difference.
    """
    base, summit, weight = m, m * LN2, 0.0
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        power = sink * LOG2E
        base, summit = tl.maximum(m, power), tl.where(power > m, sink, summit)
        weight = tl.where(power > m, 1.0, tl.exp2(power - tl.where(base == NOTHING, 0.0, base)))
    return tl.where(base == NOTHING, 0.0, base), summit, weight


@triton.jit
def leave(
    parts, sums, acc, unit, line, there, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, MOMENTS: tl.constexpr,
):  # fmt: skip
    """Write rows' sums at `line` of the parts; rows that saw nothing leave nothing."""
    l, m, shifted, far, count, mean, spread = sums
    unseen = saw_nothing(l, m, unit)
    width = tl.arange(0, PADDED_VALUES)
    tl.store(
        parts.mixed + line[:, None] * VALUES + width[None, :],
        tl.where(unseen[:, None], 0.0, acc),
        mask=there[:, None] & (width < VALUES)[None, :],
    )
    tl.store(parts.maximum + line, tl.where(unseen, NOTHING, m), mask=there)
    tl.store(parts.total + line, tl.where(unseen, 0.0, l), mask=there)
    if ENTROPY:
        tl.store(parts.shifted + line, tl.where(unseen, 0.0, shifted), mask=there)
    if DISTANCE:
        tl.store(parts.reach + line, tl.where(unseen, 0.0, far), mask=there)
    if MOMENTS:
        tl.store(parts.seen + line, count, mask=there)
        tl.store(parts.mean + line, mean, mask=there)
        tl.store(parts.spread + line, spread, mask=there)
