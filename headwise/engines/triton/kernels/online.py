"""The online softmax with its statistics: `headwise.core.partial.merge` for tiles of keys.

`sums` is one number per row for each of `headwise.core.row_sums.ROW_SUMS`, in their order, with
exponents in base 2. Triton's kernels add to them in `add_sums` and nowhere else.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import LN2, LOG2E, NOTHING, interval


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
def nothing_yet(zero):
    """Return the initial l, m, sums and moments, of rows that have seen no key."""
    return zero, zero + NOTHING, (zero, zero, zero), (zero, zero, zero)


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
def add_sums(
    sums, asked, l, total, p, e, moved, shrink, position, j0, first_key, KEYS: tl.constexpr,
    FINITE: tl.constexpr,
):  # fmt: skip
    """Add a tile of keys [j0, j0 + KEYS) to the rows' sums, of which `asked` has a field each.

    p is 2^e, `total` its sum; older sums, and l, are on a base that is `moved` higher, so that they
    shrink. FINITE: no e is -inf, so that p · e needs no care.
    """
    shifted, reach, squared = sums
    if asked.entropy is not None:
        finite = e
        if not FINITE:
            finite = tl.where(p == 0.0, 0.0, e)
        shifted = (shifted + l * tl.where(shrink == 0.0, 0.0, moved)) * shrink
        shifted += all_of(p * finite)
    if asked.distance is not None:
        # Counted from the block's first key, so that small distances stay exact.
        away = (position - (j0 + first_key)).to(tl.float32)
        reach = reach * shrink + (away * total - all_of(p * steps(p, KEYS).to(tl.float32)))
    if asked.participation is not None:
        squared = squared * (shrink * shrink) + all_of(p * p)
    return shifted, reach, squared


@triton.jit
def put_sums(asked, sums, l, weight, over, at, here):
    """Write the statistics that finished sums give: l is Σ 2^e over the keys, log2 of all is over.

    weight turns a sum into one weighted by p.
    """
    shifted, reach, squared = sums
    if asked.entropy is not None:
        entropy = weight * (l * over - shifted) * LN2
        # With a very large sink this is 0 · inf.
        tl.store(asked.entropy + at, tl.where(weight == 0.0, 0.0, entropy), mask=here)
    if asked.distance is not None:
        tl.store(asked.distance + at, reach * weight, mask=here)
    if asked.participation is not None:
        share = l * l / tl.where(l == 0.0, 1.0, squared)
        tl.store(asked.participation + at, share, mask=here)


@triton.jit
def leave_sums(parts, sums, at, there):
    """Write the sums of a part, for `joined_sums`."""
    shifted, reach, squared = sums
    if parts.entropy is not None:
        tl.store(parts.entropy + at, shifted, mask=there)
    if parts.distance is not None:
        tl.store(parts.distance + at, reach, mask=there)
    if parts.participation is not None:
        tl.store(parts.participation + at, squared, mask=there)


@triton.jit
def joined_sums(parts, at, there, l, moved, share):
    """Return the sums of all parts of a row together: each is `moved` below the largest.

    l (splits,) is the parts' own Σ 2^e, share their factor 2^moved.
    """
    shifted, reach, squared = 0.0, 0.0, 0.0
    if parts.entropy is not None:
        shifted = tl.load(parts.entropy + at, mask=there, other=0.0)
        # With parts far apart this is 0 · inf.
        shifted = tl.sum(tl.where(share == 0.0, 0.0, share * (shifted + l * moved)), 0)
    if parts.distance is not None:
        reach = tl.sum(tl.load(parts.distance + at, mask=there, other=0.0) * share, 0)
    if parts.participation is not None:
        squared = tl.load(parts.participation + at, mask=there, other=0.0)
        squared = tl.sum(squared * (share * share), 0)
    return shifted, reach, squared


@triton.jit
def take_in(state, asked, s, position, j0, first_key, KEYS: tl.constexpr):
    """Merge the logits s of the keys [j0, j0 + KEYS) into the rows' state of `nothing_yet`.

    Returns the state, the tile's weights before normalisation, and the factor that rescales older
    sums. The maximum is subtracted before anything is rounded, so logits of any size are exact.
    """
    l, m, sums, moments = state
    new = tl.maximum(m, most(s))
    base = tl.where(new == NOTHING, 0.0, new)
    d = s - beside(base, s)
    e = d * LOG2E  # the hardware's exponential is 2^x
    p = tl.exp2(e)
    moved = (m - base) * LOG2E
    shrink = tl.exp2(moved)
    total = all_of(p)
    sums = add_sums(
        sums, asked, l, total, p, e, moved, shrink, position, j0, first_key, KEYS, False
    )
    if asked.visible is not None:  # about the running maximum, at most √n deviations from the mean
        count, mean, spread = moments
        there = s != NOTHING
        found = all_of(there.to(tl.float32))
        d = tl.where(there, d, 0.0)
        moments = add_moments(
            count, mean, spread, found, new, all_of(d) / tl.maximum(found, 1.0), all_of(d * d)
        )
    return (l * shrink + total, new, sums, moments), p, shrink


@triton.jit
def add_moments(count, mean, spread, found, base, off, squares):
    """Join the moments of `found` more logits, of mean base + off, by Chan's formula.

    `squares` is the sum of their squares about base.
    """
    here = tl.where(found == 0.0, 0.0, base + off)
    share = found / tl.maximum(count + found, 1.0)
    gap = here - mean
    about = tl.where(squares == float("inf"), squares, squares - found * off * off)
    about += tl.where(count == 0.0, 0.0, gap * gap * count * share)  # 0 · inf for a large mean
    return count + found, mean + gap * share, spread + about


@triton.jit
def beside_sink(m, l, sinks, h):
    """Add the sink to rows whose largest logit is m, with l = Σ exp(s - m) over their keys.

    Returns the factor that turns such a sum into one weighted by p, lse - m in base 2, lse, and
    lse - m as a natural logarithm, which is 0 if the row sees no key.
    """
    top = tl.where(m == NOTHING, 0.0, m)
    base, keys, own = top, 1.0, 0.0
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32)
        rules = sink > m
        base = tl.where(rules, sink, top)
        keys = tl.where(rules, tl.exp2((m - base) * LOG2E), 1.0)
        own = tl.where(rules, 1.0, tl.exp2((sink - top) * LOG2E))
    total = l * keys + own
    empty = total == 0.0
    above = tl.log2(tl.where(empty, 1.0, total))
    weight = tl.where(empty, 0.0, keys / tl.where(empty, 1.0, total))
    gap = tl.where(m == NOTHING, 0.0, base - m)
    lse = tl.where(empty, NOTHING, base + above * LN2)
    return weight, above + gap * LOG2E, lse, tl.where(m == NOTHING, 0.0, gap + above * LN2)


@triton.jit
def leave(
    parts, state, acc, line, there, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr
):  # fmt: skip
    """Write the rows' sums to `line` of the parts; rows that saw no key write an empty part."""
    l, m, sums, moments = state
    unseen = (m == NOTHING) & (l == l)  # NaN shows in the sum, not in the maximum
    width = tl.arange(0, PADDED_VALUES)
    tl.store(
        parts.mixed + line[:, None] * VALUES + width[None, :],
        tl.where(unseen[:, None], 0.0, acc),
        mask=there[:, None] & (width < VALUES)[None, :],
    )
    tl.store(parts.maximum + line, m, mask=there)
    tl.store(parts.total + line, l, mask=there)
    leave_sums(parts, sums, line, there)
    if parts.visible is not None:
        count, mean, spread = moments
        tl.store(parts.visible + line, count, mask=there)
        tl.store(parts.logit_mean + line, mean, mask=there)
        tl.store(parts.logit_var + line, spread, mask=there)
