"""One step of the online softmax with its statistics: `headwise.core.partial.merge` for a tile."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import FAR, LN2, LOG2E, NOTHING, interval


@triton.jit
def bounds(t, z, piece: tl.constexpr, b, h, i, PIECES: tl.constexpr):
    """Return the keys [first, last) of each row in one piece, and the range that covers them."""
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
    """Return the initial sums for `take_in`, of rows that have seen no key."""
    zero = tl.zeros([ROWS], tl.float32)
    return zero, zero + NOTHING, zero, zero, zero, zero, zero


@triton.jit
def most(x):
    """Return the maximum of each row of a tile (rows, keys), or of one that is spread."""
    return tl.max(x, 1) if len(x.shape) == 2 else tl.max(tl.max(x, 1), 3)


@triton.jit
def all_of(x):
    """Return the sum of each row of a tile; `additive_scores` describes spread tiles."""
    return tl.sum(x, 1) if len(x.shape) == 2 else tl.sum(tl.sum(x, 1), 3)


@triton.jit
def beside(row, s):
    """Broadcast one number per row to the shape of the tile s."""
    return row[:, None] if len(s.shape) == 2 else row[:, None, :, :, None]


@triton.jit
def steps(s, KEYS: tl.constexpr):
    """Return the index of each key within a tile."""
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
    """Merge the logits s of the keys [j0, j0 + KEYS) into the rows' running sums.

    Returns the sums, the tile's weights before normalisation, and the factor that rescales older
    sums. `unit` turns logits into base 2, because the hardware's exponential is 2^x.
    """
    l, m, shifted, far, count, mean, spread = sums
    new = tl.maximum(m, most(s) * unit)
    # For a row that has seen no key, FAR - FAR must not be computed: in a fused multiply-add the
    # product is not rounded as `new` was, and the difference can be as large as 1e23.
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
    if MOMENTS:  # about the running maximum, at most √n deviations from the mean
        there = (s <= 0.5 * FAR) == 0  # NaN counts as visible
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
    """Return True for rows that saw no key. A row with NaN has the same maximum, but a NaN sum."""
    return (m < unit * (0.5 * FAR)) & (l == l)


@triton.jit
def beside_sink(m, sinks, h):
    """Return the larger of m and the sink, in base 2 and as a logit, and the sink's weight.

    A larger sink is not converted to base 2 and back, and its weight is set to 1: a GPU would
    compute another number, because it subtracts a rounded product from an unrounded one.
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
    """Write the rows' sums to `line` of the parts; rows that saw no key write an empty part."""
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
