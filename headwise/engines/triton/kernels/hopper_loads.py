"""The producer warp of the Hopper forward: loads rows, keys and values by TMA, item after item."""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from headwise.engines.triton.kernels.hopper_items import (
    SENT,
    SLOTS,
    block_of,
    bounds_of,
    first_key,
    of_pieces,
    place_of,
    work,
)
from headwise.engines.triton.kernels.hopper_softmax import GROUP

# Triton 3.8 renamed the copy, and 3.9 dropped the older name; 3.7 renamed the barrier.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
together = getattr(gl, "thread_barrier", None) or gl.barrier
FIELDS = gl.constexpr(8)  # numbers per piece of an entry of the table, and before the first entry
EIGHT = gl.constexpr(8)  # numbers in the 16 bytes that all strides are multiples of
CHUNK = gl.constexpr(16)  # values that are cleaned at once


@gluon.jit
def whole_tile(tiles, n):
    """Return the n-th buffer as a matrix."""
    return tiles.index(n).reshape([tiles.shape[-2], tiles.shape[-1]])


@gluon.jit
def entry_of(mask, b, h, block, z, piece: gl.constexpr, PIECES: gl.constexpr):
    """Load an item's blocks of keys in one piece from the table, and whether they need cleaning."""
    place = b.to(gl.int64) * z.table_batch + h.to(gl.int64) * z.table_head + block
    at = mask.table + FIELDS + place * (PIECES * FIELDS) + piece * FIELDS
    extent = (gl.load(at), gl.load(at + 1), gl.load(at + 2), gl.load(at + 3), gl.load(at + 4))
    return extent, gl.load(at + 5)


@gluon.jit
def send(info, slot, item, one, two, PIECES: gl.constexpr):
    """Write an item and its blocks of keys to shared memory, for `receive`."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = slot * (1 + SENT * 2)
    info.index(at).store(gl.full([1], item, gl.int32, ALONE))
    for n in gl.static_range(SENT):
        info.index(at + 1 + n).store(gl.full([1], one[n], gl.int32, ALONE))
        if PIECES == 2:
            info.index(at + 1 + SENT + n).store(gl.full([1], two[n], gl.int32, ALONE))


@gluon.jit
def clean_values(
    tile, b, h, i0, j0, second, z, mask,
    ROWS: gl.constexpr, BANDED: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Load the values of a block of keys without TMA: 0 for keys that none of an item's rows sees.

    Those may hold anything, and 0 · NaN is NaN. Few blocks are like that: the ends of masks that
    leave keys to nobody, and masks whose rows leave gaps.
    """
    KEYS: gl.constexpr = tile.shape[0]
    WIDTH: gl.constexpr = tile.shape[1]
    PADDED: gl.constexpr = 128 if ROWS == 128 else 256
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    PART: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (WIDTH // 8), WIDTH // 8], [1, 1], [1, 0])
    lane = gl.arange(0, PADDED, ALONE)
    first, last, first2, last2, _ = bounds_of(b, h, i0 + lane, z, mask, BANDED, PIECES)
    if PIECES == 2:
        first, last = gl.where(second, first2, first), gl.where(second, last2, last)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, PART))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, PART))
    step, width = z.value_row * EIGHT, z.value_width // EIGHT * EIGHT  # so that loads are wide
    base = mask.v + b.to(gl.int64) * (z.value_batch * EIGHT)
    base = base + (h // z.group).to(gl.int64) * (z.value_head * EIGHT)
    for n in gl.static_range(0, KEYS, CHUNK):
        j = j0 + n
        low = gl.minimum(gl.maximum(first - j, 0), CHUNK)
        high = gl.minimum(gl.maximum(last - j, 0), CHUNK)
        seen = ((1 << high) - 1) & ~((1 << low) - 1)  # the bits of the keys that a row sees
        seen = gl.reduce_or(gl.where(lane < ROWS, seen, 0), 0)
        used = ((seen >> row) & 1) != 0
        place = (base + j.to(gl.int64) * step) + ((row * step)[:, None] + column[None, :])
        inside = used[:, None] & (column < width)[None, :]
        tile.slice(n, CHUNK).store(gl.load(place, mask=inside, other=0.0))
        fence_async_shared()
        together()  # or the compiler would hold all of the tile in registers


@gluon.jit
def load_both(x, tiles, full, at, b, h, start):
    """Load a block of queries or keys, whose heads may have two parts."""
    if x[1] is None:
        mbarrier.expect(full, x[0].block_type.nbytes)
    else:
        mbarrier.expect(full, x[0].block_type.nbytes + x[1].block_type.nbytes)
        async_load(x[1], [b, h, start, x[0].block_type.shape[3]], full, tiles[1].index(at))
    async_load(x[0], [b, h, start, 0], full, tiles[0].index(at))


@gluon.jit
def load_keys(k, keys, barriers, place, count, STAGES: gl.constexpr):
    """Load a block of keys, the count-th of this program."""
    keys_full, keys_empty = barriers[2], barriers[3]
    at, turn = count % STAGES, (count // STAGES) & 1
    b, h, start = place
    mbarrier.wait(keys_empty.index(at), turn ^ 1)
    load_both(k, keys, keys_full.index(at), at, b, h, start)


@gluon.jit
def load_values(v, values, barriers, place, count, STAGES: gl.constexpr):
    """Load a block of values, the count-th of this program."""
    values_full, values_empty = barriers[4], barriers[5]
    at, turn = count % STAGES, (count // STAGES) & 1
    b, h, start = place
    mbarrier.wait(values_empty.index(at), turn ^ 1)
    mbarrier.expect(values_full.index(at), v.block_type.nbytes)
    async_load(v, [b, h, start, 0], values_full.index(at), values.index(at))


@gluon.jit
def load_block(
    call, b, h, i0, n, extent, dirty, done, round,
    KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Load an item's n-th block of keys, with the first one its rows, and then its values."""
    q, k, v, rows, keys, values, barriers, _, z, mask = call
    rows_full, rows_empty = barriers[0], barriers[1]
    values_full, values_empty = barriers[4], barriers[5]
    GROUPS: gl.constexpr = rows[0].shape[0]
    kh = h // z.group
    start = first_key(n, extent, KEYS, PIECES)
    load_keys(k, keys, barriers, (b, kh, start), done + n, STAGES)
    if n == 0:
        for w in gl.static_range(GROUPS):
            mbarrier.wait(rows_empty.index(w), (round & 1) ^ 1)
            load_both(q, rows, rows_full.index(w), w, b, h, i0 + w * GROUP)
    if v is not None:
        if mask.v is None:
            load_values(v, values, barriers, (b, kh, start), done + n, STAGES)
        else:
            second = block_of(n, extent, KEYS, PIECES)[2]
            bad = gl.where(second, dirty[1], dirty[0])
            if (bad > 0) & (n < extent[3]):
                at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
                mbarrier.wait(values_empty.index(at), turn ^ 1)
                clean_values(
                    whole_tile(values, at), b, h, i0, start, second, z, mask, GROUPS * GROUP,
                    BANDED, PIECES,
                )  # fmt: skip
                mbarrier.arrive(values_full.index(at), count=1)
            else:
                load_values(v, values, barriers, (b, kh, start), done + n, STAGES)


@gluon.jit
def offer(call, item, round, PIECES: gl.constexpr):
    """Send an item and its entry of the table to the consumers; return both as `load` uses them.

    The last one is an item that does not exist.
    """
    _, _, _, rows, _, _, barriers, info, z, mask = call
    ROWS: gl.constexpr = rows[0].shape[0] * GROUP
    b, h, block = place_of(gl.minimum(item, z.items - 1), z, ROWS)
    one, dirty = entry_of(mask, b, h, block, z, 0, PIECES)
    two, dirty2 = one, dirty
    if PIECES == 2:
        two, dirty2 = entry_of(mask, b, h, block, z, 1, PIECES)
    send(info, round % SLOTS, item, one, two, PIECES)
    mbarrier.arrive(barriers[7].index(round % SLOTS), count=1)
    return item, b, h, block * ROWS, of_pieces(one, two, PIECES), (dirty, dirty2)


@gluon.jit
def load(
    call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, PIECES: gl.constexpr
):
    """Run the producer warp: load item after item."""
    _, _, _, rows, _, _, _, _, z, mask = call
    done, round = 0, 0
    if PIECES == 0:
        ROWS: gl.constexpr = rows[0].shape[0] * GROUP
        for item in range(gl.program_id(0), z.items, gl.num_programs(0)):
            b, h, i0, extent = work(item, z, ROWS, KEYS, BANDED)
            for n in range(extent[4]):
                load_block(
                    call, b, h, i0, n, extent, None, done, round, KEYS, STAGES, BANDED, PIECES,
                )  # fmt: skip
            done, round = done + extent[4], round + 1
    else:
        item, b, h, i0, extent, dirty = offer(call, gl.program_id(0), 0, PIECES)
        while item < z.items:
            coming = item, b, h, i0, extent, dirty
            for n in range(extent[4]):
                load_block(
                    call, b, h, i0, n, extent, dirty, done, round, KEYS, STAGES, BANDED, PIECES,
                )  # fmt: skip
                # While the consumers are busy, the next item is taken and sent. Its slot is free:
                # this item's rows were loaded, so consumers have received the one before it.
                if n == gl.minimum(extent[4], STAGES) - 1:
                    # The table begins with the number of items taken after the first ones.
                    taken = gl.num_programs(0) + gl.atomic_add(mask.table, 1, sem="relaxed")
                    coming = offer(call, taken, round + 1, PIECES)
            done, round = done + extent[4], round + 1
            item, b, h, i0, extent, dirty = coming
