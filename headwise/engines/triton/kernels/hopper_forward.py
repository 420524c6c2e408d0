"""The Hopper forward: a producer warp loads, consumer warpgroups compute products and softmax.

Matrix products and exponentials run on different units. Triton's loops use them one after the
other. Here a warpgroup issues the scores of the next keys before it multiplies the current weights
by their values, so that its softmax overlaps with that product. The warpgroups take turns to issue
products, so that the softmax of one also overlaps with the products of the others.

The kernel is persistent: each multiprocessor runs one program, which processes items, blocks of
rows, one after the other, so that an item's first tiles are loaded while the last item is finished.
Every buffer has two barriers: `full`, which TMA completes, and `empty`, at which each warpgroup
arrives when it has read the buffer for the last time.

Heads between 129 and 192 wide have their queries and keys in two parts, of 128 and 64. For
statistics beside an output from elsewhere, values and output are None: scores and softmax are all
that is computed.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headwise.engines.triton.kernels.hopper_items import (
    SENT,
    SLOTS,
    HopperSizes,
    blocks_with_rest,
    bounds_of,
    first_key,
    met_by,
    of_pieces,
    place_of,
    work,
)
from headwise.engines.triton.kernels.hopper_loads import EIGHT, load, whole_tile
from headwise.engines.triton.kernels.hopper_softmax import (
    GROUP,
    along,
    finish,
    in_eighths,
    put_moments,
    row_max,
    soften,
    unpacked,
)

# Triton 3.8 renamed the copy, and 3.9 dropped the older name.
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
REGISTERS = {2: 168, 3: 128}  # per thread at launch, by the number of consumer warpgroups
EVERYWHERE = gl.constexpr(-1)  # the loop over keys takes all moments


@gluon.jit
def word(info, n):
    """Return the n-th number of shared memory."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.sum(info.index(n).load(ALONE), 0)


@gluon.jit
def words(info, at):
    """Return what `send` wrote of one piece."""
    return (
        word(info, at), word(info, at + 1), word(info, at + 2), word(info, at + 3),
        word(info, at + 4),
    )  # fmt: skip


@gluon.jit
def receive(info, sent, round, PIECES: gl.constexpr):
    """Wait for the next item; return it and its blocks of keys."""
    slot = round % SLOTS
    mbarrier.wait(sent.index(slot), (round // SLOTS) & 1)
    at = slot * (1 + SENT * 2)
    one = words(info, at + 1)
    two = one
    if PIECES == 2:
        two = words(info, at + 1 + SENT)
    return word(info, at), of_pieces(one, two, PIECES)


@gluon.jit
def scores_of(own, keys, at, zero):
    """Begin the scores of a group's rows with a block of keys."""
    tile = whole_tile(keys[0], at).permute((1, 0))
    scores = warpgroup_mma(own[0], tile, zero, use_acc=False, is_async=True)
    if keys[1] is not None:
        tile = whole_tile(keys[1], at).permute((1, 0))
        scores = warpgroup_mma(own[1], tile, scores, is_async=True)
    return scores


@gluon.jit
def begin(
    w: gl.constexpr, done, round, own, keys, values, barriers, extent, bounds, z, written,
    SCORES: gl.constexpr, SUMS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, PIECES: gl.constexpr, MOMENTS: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of an item's first block: no product before it can overlap."""
    rows_full, keys_full, keys_empty, turns = barriers[0], barriers[2], barriers[3], barriers[6]
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    at = done % STAGES
    mbarrier.wait(rows_full.index(w), round & 1)
    mbarrier.wait(keys_full.index(at), (done // STAGES) & 1)
    mbarrier.wait(turns.index(w), done & 1)
    scores = scores_of(own, keys, at, zero)
    mbarrier.arrive(turns.index((w + 1) % turns.shape[0]), count=1)
    s = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_empty.index(at), count=1)
    j0, bounds = met_by(extent[4] * 0, extent, bounds, KEYS, PIECES)
    weights, state, _ = soften(s, None, j0, bounds, z, written, keys[0].dtype, True, True, MOMENTS)
    shrink = gl.full([GROUP], 1.0, gl.float32, ROWS)
    acc = shrink
    if values is not None:
        WIDTH: gl.constexpr = values.shape[-1]
        acc = gl.zeros([GROUP, WIDTH], gl.float32, SUMS)
    return acc, weights, shrink, state


@gluon.jit
def absorb(
    w: gl.constexpr, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
    SCORES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, PIECES: gl.constexpr,
    MASKED: gl.constexpr, MOMENTS: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of block n, while the block before it is multiplied by values."""
    acc, weights, shrink, state = sums
    summed = acc
    keys_full, keys_empty, values_full, values_empty, turns = (
        barriers[2], barriers[3], barriers[4], barriers[5], barriers[6],
    )  # fmt: skip
    TYPE: gl.constexpr = keys[0].dtype
    at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
    last, last_turn = (done + n - 1) % STAGES, ((done + n - 1) // STAGES) & 1
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    mbarrier.wait(keys_full.index(at), turn)
    mbarrier.wait(turns.index(w), (done + n) & 1)
    scores = scores_of(own, keys, at, zero)
    p = weights
    if values is not None:
        # While the scores are computed, the accumulators are rescaled for the last block's weights.
        SUMS: gl.constexpr = acc.type.layout
        p = gl.convert_layout(unpacked(weights, TYPE), gl.DotOperandLayout(0, SUMS, 2))
        acc = acc * along(shrink, SUMS)
        mbarrier.wait(values_full.index(last), last_turn)
        summed = warpgroup_mma(p, whole_tile(values, last), acc, is_async=True)
    mbarrier.arrive(turns.index((w + 1) % turns.shape[0]), count=1)
    s = warpgroup_mma_wait(0 if values is None else 1, deps=(scores,))
    mbarrier.arrive(keys_empty.index(at), count=1)
    if MASKED:
        j0, seen = met_by(n, extent, bounds, KEYS, PIECES)
    else:
        j0, seen = first_key(n, extent, KEYS, PIECES), (bounds[0], bounds[1], bounds[4])
    weights, state, shrink = soften(s, state, j0, seen, z, written, TYPE, False, MASKED, MOMENTS)
    if values is not None:
        acc, p = warpgroup_mma_wait(0, deps=(summed, p))
        mbarrier.arrive(values_empty.index(last), count=1)
    return acc, weights, shrink, state


@gluon.jit
def last_product(
    n, sums, values, barriers, b, h, i, z, sinks, written,
    TYPE: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply an item's last block by its values while its statistics are written; return out."""
    acc, weights, shrink, state = sums
    values_full, values_empty = barriers[4], barriers[5]
    SUMS: gl.constexpr = acc.type.layout
    at, turn = n % STAGES, (n // STAGES) & 1
    p = gl.convert_layout(unpacked(weights, TYPE), gl.DotOperandLayout(0, SUMS, 2))
    acc = acc * along(shrink, SUMS)
    mbarrier.wait(values_full.index(at), turn)
    summed = warpgroup_mma(p, whole_tile(values, at), acc, is_async=True)
    weight = finish(state, b, h, i, z, sinks, written, ROWS)
    acc, p = warpgroup_mma_wait(0, deps=(summed, p))
    mbarrier.arrive(values_empty.index(at), count=1)
    return acc * along(weight, SUMS)


@gluon.jit
def put_rows(acc, out, b, h, i0, z, TYPE: gl.constexpr):
    """Write a group's rows of the output, where shared memory has no room for them."""
    SUMS: gl.constexpr = acc.type.layout
    row = gl.arange(0, GROUP, gl.SliceLayout(1, SUMS))
    column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, SUMS))
    width = z.value_width // EIGHT * EIGHT  # so that stores are wide
    start = out + ((b * z.heads + h).to(gl.int64) * z.queries + i0) * width
    inside = (i0 + row < z.queries)[:, None] & (column < width)[None, :]
    gl.store(start + (row * width)[:, None] + column[None, :], acc.to(TYPE), mask=inside)


@gluon.jit
def attend(
    w: gl.constexpr, call, b, h, i0, extent, done, round,
    KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, PIECES: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Compute a group's rows of an item, over all of its blocks of keys."""
    out, rows, results, keys, values, barriers, _, z, mask, sinks, written = call
    TYPE: gl.constexpr = keys[0].dtype
    WIDTH: gl.constexpr = KEYS if values is None else values.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    ROWS: gl.constexpr = row_max(in_eighths(zero)).type.layout
    own = (whole_tile(rows[0], w), None if rows[1] is None else whole_tile(rows[1], w))
    edges, blocks = extent[3], extent[4]
    i = i0 + w * GROUP + gl.arange(0, GROUP, ROWS)
    bounds = bounds_of(b, h, i, z, mask, BANDED, PIECES)
    sums = begin(
        w, done, round, own, keys, values, barriers, extent, bounds, z, written,
        SCORES, SUMS, ROWS, KEYS, STAGES, PIECES, BLOCK != 0,
    )  # fmt: skip
    for n in range(1, edges):
        sums = absorb(
            w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
            SCORES, KEYS, STAGES, PIECES, True, BLOCK != 0,
        )  # fmt: skip
    rest = edges
    if BLOCK > 0:
        rest = blocks_with_rest(extent, KEYS, BLOCK, PIECES)
        for n in range(gl.maximum(edges, 1), rest):
            sums = absorb(
                w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
                SCORES, KEYS, STAGES, PIECES, False, True,
            )  # fmt: skip
        acc, weights, shrink, state = sums
        state = put_moments(state, rest > 0, b, h, i, z, written, ROWS)
        sums = (acc, weights, shrink, state)
    for n in range(gl.maximum(rest, 1), blocks):
        sums = absorb(
            w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
            SCORES, KEYS, STAGES, PIECES, False, BLOCK == EVERYWHERE,
        )  # fmt: skip
    mbarrier.arrive(barriers[1].index(w), count=1)  # the rows are no longer needed
    if BLOCK == EVERYWHERE:
        acc, weights, shrink, state = sums
        state = put_moments(state, True, b, h, i, z, written, ROWS)
        sums = (acc, weights, shrink, state)
    if values is None:
        finish(sums[3], b, h, i, z, sinks, written, ROWS)
    else:
        acc = last_product(
            done + blocks - 1, sums, values, barriers, b, h, i, z, sinks, written, TYPE, ROWS,
            STAGES,
        )  # fmt: skip
        if results is None:
            put_rows(acc, out, b, h, i0 + w * GROUP, z, TYPE)
        else:
            tma.store_wait(0)  # until the last item's rows are copied out
            whole_tile(results, w).store(acc.to(TYPE))
            fence_async_shared()
            async_store(out, [b, h, i0 + w * GROUP, 0], results.index(w))


@gluon.jit
def follow(
    w: gl.constexpr, call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr,
    PIECES: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Run a consumer warpgroup: GROUP rows of each item."""
    _, rows, results, _, _, barriers, info, z, _, _, _ = call
    turns = barriers[6]
    ROWS: gl.constexpr = rows[0].shape[0] * GROUP
    done, round = 0, 0
    if w == turns.shape[0] - 1:
        mbarrier.arrive(turns.index(0), count=1)
    if PIECES == 0:
        for item in range(gl.program_id(0), z.items, gl.num_programs(0)):
            b, h, i0, extent = work(item, z, ROWS, KEYS, BANDED)
            attend(w, call, b, h, i0, extent, done, round, KEYS, STAGES, BANDED, PIECES, BLOCK)
            done, round = done + extent[4], round + 1
    else:
        item, extent = receive(info, barriers[7], round, PIECES)
        while item < z.items:
            b, h, block = place_of(item, z, ROWS)
            attend(
                w, call, b, h, block * ROWS, extent, done, round, KEYS, STAGES, BANDED, PIECES,
                BLOCK,
            )  # fmt: skip
            done, round = done + extent[4], round + 1
            item, extent = receive(info, barriers[7], round, PIECES)
    if results is not None:
        tma.store_wait(0)


@gluon.jit
def barriers_of(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate `count` barriers, each completed by `arrivals` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit
def tiles_of(count: gl.constexpr, x):
    """Allocate `count` tiles of a descriptor."""
    shape: gl.constexpr = [count] + x.block_type.shape  # noqa: RUF005 - Gluon has no stars
    return gl.allocate_shared_memory(x.dtype, shape, x.layout)


@gluon.jit(do_not_specialize=[*HopperSizes._fields])
def forward(
    q, k, v, q_rest, k_rest, out, written, sinks, mask,
    queries, keys, heads, group, value_width, low, high, shift, items, table_batch, table_head,
    interval_step, interval_batch, interval_head, position_batch, value_batch, value_head,
    value_row, factor, unit, cap,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr, PIECES: gl.constexpr,
    BLOCK: gl.constexpr, DIRECT: gl.constexpr,
):  # fmt: skip
    """Compute this program's items, GROUPS · GROUP query rows of one head each.

    If BLOCK is positive, moments cover the keys past the last whole BLOCK that all rows of an item
    see; `row_moments` joins those of the other keys. PIECES: intervals per row of a mask with a
    table. DIRECT: out is a tensor, not a descriptor.
    """
    z = HopperSizes(
        queries, keys, heads, group, value_width, low, high, shift, items, table_batch, table_head,
        interval_step, interval_batch, interval_head, position_batch, value_batch, value_head,
        value_row, factor, unit, cap,
    )  # fmt: skip
    KEYS: gl.constexpr = k.block_type.shape[2]
    row_rest, key_rest, value_tiles, results = None, None, None, None
    if q_rest is not None:
        row_rest, key_rest = tiles_of(GROUPS, q_rest), tiles_of(STAGES, k_rest)
    if v is not None:
        value_tiles = tiles_of(STAGES, v)
    if not DIRECT:
        results = tiles_of(GROUPS, out)
    rows, key_tiles = (tiles_of(GROUPS, q), row_rest), (tiles_of(STAGES, k), key_rest)
    rows_full, rows_empty = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    keys_full, keys_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    values_full, values_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    turns, sent, info = barriers_of(GROUPS, 1), None, None
    if PIECES > 0:
        sent = barriers_of(SLOTS, 1)
        info = gl.allocate_shared_memory(
            gl.int32, [SLOTS * (1 + 2 * SENT), 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    barriers = (
        rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty, turns, sent,
    )  # fmt: skip
    given = ((q, q_rest), (k, k_rest), v, rows, key_tiles, value_tiles, barriers, info, z, mask)
    call = (out, rows, results, key_tiles, value_tiles, barriers, info, z, mask, sinks, written)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (follow, (0, call, KEYS, STAGES, BANDED, PIECES, BLOCK)),
                (follow, (1, call, KEYS, STAGES, BANDED, PIECES, BLOCK)),
                (load, (given, KEYS, STAGES, BANDED, PIECES)),
            ],
            [4, 1],  # warps of the second consumer, and of the producer
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (follow, (0, call, KEYS, STAGES, BANDED, PIECES, BLOCK)),
                (follow, (1, call, KEYS, STAGES, BANDED, PIECES, BLOCK)),
                (follow, (2, call, KEYS, STAGES, BANDED, PIECES, BLOCK)),
                (load, (given, KEYS, STAGES, BANDED, PIECES)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
