"""Mean and variance of a row's plain logits, from mean and scatter of the keys it sees.

If a row does not see all keys, these cover whole blocks; the moments of the few keys after them
come from the forward's loop.
"""

# A kernel is Triton's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.key_scatter import DIAGONAL, MEAN, halves, matrix, vector
from headwise.engines.triton.kernels.tile import load_tile

LARGEST = tl.constexpr(1e36)  # of a usable scatter; above it rows loop over their keys


@triton.jit
def join(count, mean, spread, more, its_mean, its_spread):
    """Join count, mean and sum of squares about the mean of two sets, by Chan's formula."""
    share = more / tl.maximum(count + more, 1.0)
    gap = its_mean - mean
    return count + more, mean + gap * share, spread + its_spread + gap * gap * (count * share)


@triton.jit
def meet(
    state, rows, k, b, h, j0, last, scale, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Join the moments of the logits of the keys [j0, j0 + KEYS) before `last`."""
    tile = load_tile(k, None, b, h, j0, 0, KEYS, WIDTH, PADDED, True)
    s = tl.dot(rows, tile.T) * scale
    seen = (j0 + tl.arange(0, KEYS) < last)[None, :]
    more = tl.minimum(last - j0, KEYS).to(tl.float32)
    mean = tl.sum(tl.where(seen, s, 0.0), 1) / more
    off = tl.where(seen, s - mean[:, None], 0.0)
    return join(state[0], state[1], state[2], more, mean, tl.sum(off * off, 1))


@triton.jit
def turn(rows, high, low):
    """Return rows · (high + low)."""
    if rows.dtype == high.dtype:
        turned = tl.dot(rows, low, tl.dot(rows, high))
    else:  # float16, whose range is too small for a scatter
        most, rest = halves(rows.to(tl.float32), high.dtype)
        turned = tl.dot(rest, high, tl.dot(most, low, tl.dot(most, high)))
    return turned


@triton.jit
def left(rest_mean, rest_spread, line, i, end, reach, keys, before):
    """Return count, mean and sum of squares about it of the keys past the whole blocks."""
    more = tl.maximum(tl.minimum(i + reach, keys) - before, 0).to(tl.float32)
    mean, spread = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    if rest_mean is not None:
        mean = tl.load(rest_mean + line + i, mask=i < end, other=0.0)
        spread = tl.load(rest_spread + line + i, mask=i < end, other=0.0)
    return more, mean, spread


@triton.jit
def finish(state, rest, line, i, end, means, variances, visible):
    """Join both parts of the rows' moments, and write them."""
    count, mean, spread = join(state[0], state[1], state[2], rest[0], rest[1], rest[2])
    spread = spread / tl.maximum(count, 1.0)
    tl.store(visible + line + i, count, mask=i < end)
    tl.store(means + line + i, mean, mask=i < end)
    tl.store(variances + line + i, tl.where(spread < 0.0, 0.0, spread), mask=i < end)


_NUMBERS = ["queries", "keys", "group", "reach", "first", "heads", "first_line", "slots", "scale"]


@triton.jit(do_not_specialize=_NUMBERS)
def moments_of_rows(
    q, k, queries, keys, group, reach, first, heads, first_line, slots, scale,
    vectors, scatters, rest_mean, rest_spread, means, variances, visible,
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute the rows of a head that see the same whole blocks; row i sees keys [0, i + reach).

    The forward takes AT_ONCE rows per tile; the first of them decides the whole blocks of all.
    Without `rest_mean` all rows see all keys, and a program takes BLOCK rows.
    """
    # In reverse order, so that the next kernel finds the first queries in the cache.
    head, lines = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(1) // group
    line = head // group
    b, kh = (first_line + line) // heads, (first_line + line) % heads
    h = kh * group + head % group
    stretch = first + tl.program_id(0)
    begin, end = stretch * BLOCK, stretch * BLOCK + BLOCK
    slot, before = slots - 1, keys
    if rest_mean is not None:
        begin = tl.cdiv(tl.maximum(begin - reach, 0), AT_ONCE) * AT_ONCE
        end = tl.cdiv(tl.maximum(end - reach, 0), AT_ONCE) * AT_ONCE
        slot = tl.maximum(tl.minimum(stretch, keys // BLOCK), 0)
        before = slot * BLOCK
    end = tl.minimum(end, queries)
    column, lane = tl.arange(0, PADDED), tl.arange(0, ROWS)
    spots = column[:, None] * PADDED + column[None, :]
    diagonal = tl.load(vector(vectors, DIAGONAL, line, slot, lines, slots, PADDED) + column)
    centre = tl.load(vector(vectors, MEAN, line, slot, lines, slots, PADDED) + column)[None, :]
    high = tl.load(matrix(scatters, 0, line, slot, lines, slots, PADDED) + spots)
    low = tl.load(matrix(scatters, 1, line, slot, lines, slots, PADDED) + spots)
    zero = tl.zeros([ROWS], tl.float32)
    start = (b * heads * group + h).to(tl.int64) * queries
    if tl.sum((diagonal < LARGEST).to(tl.int32), 0) == PADDED:
        for n in tl.range(0, tl.cdiv(end - begin, ROWS)):
            i = begin + n * ROWS + lane
            rest = left(rest_mean, rest_spread, start, i, end, reach, keys, before)
            rows = load_tile(q, None, b, h, begin + n * ROWS, 0, ROWS, WIDTH, PADDED, True)
            wide = rows.to(tl.float32)
            # Both sums at once, or the compiler converts the layout of one of them twice.
            both = tl.join(wide * centre, turn(rows, high, low) * wide)
            mean, spread = tl.split(tl.sum(both, 1))
            state = (zero + before, mean * scale, spread * scale * scale)
            finish(state, rest, start, i, end, means, variances, visible)
    else:  # some key is not finite, or its square is not
        for n in tl.range(0, tl.cdiv(end - begin, ROWS)):
            i = begin + n * ROWS + lane
            rest = left(rest_mean, rest_spread, start, i, end, reach, keys, before)
            rows = load_tile(q, None, b, h, begin + n * ROWS, 0, ROWS, WIDTH, PADDED, True)
            state = (zero, zero, zero)
            for m in tl.range(0, tl.cdiv(before, KEYS)):
                state = meet(state, rows, k, b, kh, m * KEYS, before, scale, KEYS, WIDTH, PADDED)
            finish(state, rest, start, i, end, means, variances, visible)
