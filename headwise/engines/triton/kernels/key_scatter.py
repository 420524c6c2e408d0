"""Mean and scatter matrix of the keys before each block of keys, or of all of them.

The logits q·k of a row over some keys have the mean q·mean(k) and the variance qᵀCq / count, where
C is the keys' scatter about their mean: O(n·d²) for all rows, without visiting pairs.

A line is one key head of one batch entry. It has one slot per block of keys, and a last slot for
all keys. A scatter is stored as the sum of two 16-bit numbers, which fast matrix products take.
"""

# A kernel is Triton's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.tile import load_tile

# The vectors of a slot: the block's own mean; mean and scatter diagonal of all keys before it.
OWN_MEAN, MEAN, DIAGONAL = (tl.constexpr(n) for n in range(3))
VECTORS = 3
FAR_OUT = tl.constexpr(64.0)  # (mean / deviation)² above which squares about zero lose digits


@triton.jit
def vector(vectors, which, line, slot, lines, slots, PADDED: tl.constexpr):
    """Return the address of a block's vector; vectors (VECTORS, lines, slots, PADDED)."""
    return vectors + ((which * lines + line) * slots + slot) * PADDED


@triton.jit
def matrix(scatters, half, line, slot, lines, slots, PADDED: tl.constexpr):
    """Return the address of half a block's scatter; scatters (2, lines, slots, PADDED, PADDED)."""
    return scatters + ((half * lines + line) * slots + slot).to(tl.int64) * (PADDED * PADDED)


@triton.jit
def halves(x, half: tl.constexpr):
    """Split x into a sum of two numbers of a shorter type."""
    high = x.to(half)
    return high, (x - high.to(tl.float32)).to(half)


@triton.jit
def save(x, r, c, scatters, line, slot, lines, slots, PADDED: tl.constexpr):
    """Write the rows r of a block's scatter."""
    spots = r[:, None] * PADDED + c[None, :]
    high, low = halves(x, scatters.dtype.element_ty)
    tl.store(matrix(scatters, 0, line, slot, lines, slots, PADDED) + spots, high)
    tl.store(matrix(scatters, 1, line, slot, lines, slots, PADDED) + spots, low)


@triton.jit(do_not_specialize=["keys", "heads", "first_line", "slots"])
def scatter_of_blocks(
    k, keys, heads, first_line, slots, vectors, scatters,
    BLOCK: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Compute mean and scatter of one block of keys of one line. k holds `keys` keys."""
    block, lines = tl.program_id(0), tl.num_programs(1)
    line = lines - 1 - tl.program_id(1)  # last line first: the forward has just read its keys
    b, h = (first_line + line) // heads, (first_line + line) % heads
    start = block * BLOCK
    column = tl.arange(0, PADDED)
    count = tl.minimum(keys - start, BLOCK)
    tiles = tl.cdiv(count, TILE)
    # About zero, so that both factors of the product are the tile as it was loaded.
    total = tl.zeros([TILE, PADDED], tl.float32)
    scatter = tl.zeros([PADDED, PADDED], tl.float32)
    for n in tl.range(0, tiles):
        tile = load_tile(k, None, b, h, start + n * TILE, keys, TILE, WIDTH, PADDED, True)
        scatter = tl.dot(tile.T, tile, scatter)
        total += tile.to(tl.float32)
    sums = tl.sum(total, 0)
    mean = sums / count
    scatter -= mean[:, None] * sums[None, :]
    squares = tl.sum(tl.where(column[:, None] == column[None, :], scatter, 0.0), 1)
    if tl.max((mean * mean * count > squares * FAR_OUT).to(tl.int32), 0) > 0:
        # Too much cancelled: again, about the mean, x = k - centre: Σ k xᵀ = Σ x xᵀ + centre Σ xᵀ.
        centre = mean
        row = tl.arange(0, TILE)[:, None]
        total = tl.zeros([TILE, PADDED], tl.float32)
        scatter = tl.zeros([PADDED, PADDED], tl.float32)
        for n in tl.range(0, tiles):
            j0 = start + n * TILE
            tile = load_tile(k, None, b, h, j0, keys, TILE, WIDTH, PADDED, True)
            x = tl.where(row < keys - j0, tile.to(tl.float32) - centre[None, :], 0.0)
            total += x
            high, low = halves(x, tile.dtype)
            scatter = tl.dot(tile.T, low, tl.dot(tile.T, high, scatter))
        sums = tl.sum(total, 0)
        mean = centre + sums / count
        scatter -= mean[:, None] * sums[None, :]
    tl.store(vector(vectors, OWN_MEAN, line, block, lines, slots, PADDED) + column, mean)
    save(scatter, column, column, scatters, line, block, lines, slots, PADDED)


@triton.jit
def publish(
    scatter, mean, r, c, vectors, scatters, line, slot, lines, slots, PADDED: tl.constexpr
):  # fmt: skip
    """Write the rows r of mean, diagonal and scatter of all keys before a block."""
    diagonal = tl.sum(tl.where(r[:, None] == c[None, :], scatter, 0.0), 1)
    tl.store(vector(vectors, MEAN, line, slot, lines, slots, PADDED) + r, mean)
    tl.store(vector(vectors, DIAGONAL, line, slot, lines, slots, PADDED) + r, diagonal)
    save(scatter, r, c, scatters, line, slot, lines, slots, PADDED)


@triton.jit(do_not_specialize=["keys", "slots"])
def join_blocks(
    keys, slots, vectors, scatters, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PADDED: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Turn the scatters of a line's blocks into those of all keys before them, ROWS rows, in place.

    Chan's formula joins them. The last slot is for all keys; WHOLE: only that one is needed.
    """
    part, line, lines = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    r, c = part * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    spots = r[:, None] * PADDED + c[None, :]
    scatter = tl.zeros([ROWS, PADDED], tl.float32)
    mean, across = tl.zeros([ROWS], tl.float32), tl.zeros([PADDED], tl.float32)  # rows, columns
    for block in tl.range(0, slots - 1, num_stages=AHEAD):
        high = tl.load(matrix(scatters, 0, line, block, lines, slots, PADDED) + spots)
        low = tl.load(matrix(scatters, 1, line, block, lines, slots, PADDED) + spots)
        own = vector(vectors, OWN_MEAN, line, block, lines, slots, PADDED)
        gap, gap_across = tl.load(own + r) - mean, tl.load(own + c) - across
        if not WHOLE:
            publish(scatter, mean, r, c, vectors, scatters, line, block, lines, slots, PADDED)
        count = block * (BLOCK * 1.0)
        more = tl.minimum(keys - block * BLOCK, BLOCK)
        share = more / (count + more)
        scatter += high.to(tl.float32) + low.to(tl.float32)
        scatter += gap[:, None] * gap_across[None, :] * (count * share)
        mean += gap * share
        across += gap_across * share
    publish(scatter, mean, r, c, vectors, scatters, line, slots - 1, lines, slots, PADDED)
