"""The Hopper forward: a producer warp loads, two consumer warpgroups compute products and softmax.

Matrix products and exponentials run on different units. Triton's loops use them one after the
other. Here a warpgroup issues the scores of the next keys before it multiplies the current weights
by their values, so that its softmax overlaps with that product. The warpgroups take turns to issue
products, so that the softmax of one also overlaps with the products of the other.

The kernel is persistent: each multiprocessor runs one program, which processes items, blocks of
rows, one after the other, so that an item's first tiles are loaded while the last item is finished.
Every buffer has two barriers: `full`, which TMA completes, and `empty`, at which each warpgroup
arrives when it has read the buffer for the last time.

For statistics beside an output from elsewhere, values and output are None: scores and softmax are
all that is computed.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

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

# Triton 3.8 renamed both copies, and 3.9 dropped the older names.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
GROUPS = gl.constexpr(2)  # consumer warpgroups per program
REGISTERS = 168  # per thread at launch; then consumers take 240, the producer 24


class HopperSizes(NamedTuple):
    """The numbers of a call, as device functions take them."""

    queries: int
    keys: int
    heads: int
    group: int  # query heads per key head
    low: int  # row i sees the keys [i + low, i + high)
    high: int
    shift: int  # and is at position i + shift
    items: int  # blocks of rows, of all heads and batch entries
    factor: float  # turns a score, or its tanh, into a logit
    unit: float  # and into a base-2 logit
    cap: tuple[float, ...] | None  # the constants of `capped`; None without a cap


@gluon.jit
def whole_tile(tiles, n):
    """Return the n-th buffer as a matrix."""
    return tiles.index(n).reshape([tiles.shape[-2], tiles.shape[-1]])


@gluon.jit
def work(item, z, KEYS: gl.constexpr, BANDED: gl.constexpr):
    """Return an item's batch entry, head, first row and blocks of keys.

    Blocks are counted from the first key that any row sees; [inner, outer) of them need no mask,
    and the `edges` others are visited first.
    """
    ROWS: gl.constexpr = GROUPS * GROUP
    blocks_of_rows = gl.cdiv(z.queries, ROWS)
    line, block = item // blocks_of_rows, item % blocks_of_rows
    if BANDED and line % 2 == 0:  # balances the load: a short block follows a long one
        block = blocks_of_rows - 1 - block
    i0 = block * ROWS
    begin, end, all_begin, all_end = 0, z.keys, 0, z.keys
    if BANDED:
        i1 = gl.minimum(i0 + ROWS, z.queries) - 1
        begin = gl.minimum(gl.maximum(i0 + z.low, 0), z.keys)
        end = gl.minimum(gl.maximum(i1 + z.high, 0), z.keys)
        all_begin = gl.minimum(gl.maximum(i1 + z.low, 0), z.keys)
        all_end = gl.minimum(gl.maximum(i0 + z.high, 0), z.keys)
    blocks = gl.maximum(gl.cdiv(end - begin, KEYS), 1)
    inner = gl.cdiv(all_begin - begin, KEYS)
    outer = gl.maximum(all_end - begin, 0) // KEYS
    some = outer > inner
    inner, outer = gl.where(some, inner, blocks), gl.where(some, outer, blocks)
    extent = (begin, inner, outer, inner + blocks - outer, blocks)
    return line // z.heads, line % z.heads, i0, extent


@gluon.jit
def bounds_of(i, z, BANDED: gl.constexpr):
    """Return the keys [first, last) that rows i see, and the rows' positions."""
    row = gl.minimum(i, z.queries - 1)
    first = row * 0
    last = first + z.keys
    if BANDED:
        first = gl.minimum(gl.maximum(row + z.low, 0), z.keys)
        last = gl.minimum(gl.maximum(row + z.high, 0), z.keys)
    return first, last, row + z.shift


@gluon.jit
def first_key(n, extent, KEYS: gl.constexpr):
    """Return the first key of the n-th block: edges, then the others from last to first."""
    begin, inner, outer, edges, _ = extent
    edge = gl.where(n < inner, n, n - inner + outer)
    return begin + gl.where(n < edges, edge, outer - 1 - (n - edges)) * KEYS


@gluon.jit
def blocks_with_rest(extent, KEYS: gl.constexpr, BLOCK: gl.constexpr):
    """Return the number of blocks before those whose moments `row_moments` takes, in BLOCKs."""
    _, inner, outer, edges, _ = extent
    whole = gl.minimum(outer * KEYS // BLOCK * (BLOCK // KEYS), outer - inner)
    return edges + outer - inner - whole


@gluon.jit
def load(call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr):
    """Run the producer warp: load each item's rows, then its keys and values in turns."""
    q, k, v, rows, keys, values, barriers, z = call
    rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty = barriers
    done, round = 0, 0
    for item in range(gl.program_id(0), z.items, gl.num_programs(0)):
        b, h, i0, extent = work(item, z, KEYS, BANDED)
        for w in gl.static_range(GROUPS):
            mbarrier.wait(rows_empty.index(w), (round & 1) ^ 1)
            mbarrier.expect(rows_full.index(w), q.block_type.nbytes)
            async_load(q, [b, h, i0 + w * GROUP, 0], rows_full.index(w), rows.index(w))
        for n in range(extent[4]):
            at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
            place = [b, h // z.group, first_key(n, extent, KEYS), 0]
            mbarrier.wait(keys_empty.index(at), turn ^ 1)
            mbarrier.expect(keys_full.index(at), k.block_type.nbytes)
            async_load(k, place, keys_full.index(at), keys.index(at))
            if v is not None:
                mbarrier.wait(values_empty.index(at), turn ^ 1)
                mbarrier.expect(values_full.index(at), v.block_type.nbytes)
                async_load(v, place, values_full.index(at), values.index(at))
        done, round = done + extent[4], round + 1


@gluon.jit
def begin(
    w: gl.constexpr, done, round, own, keys, values, barriers, extent, bounds, z, written,
    SCORES: gl.constexpr, SUMS: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, MOMENTS: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of an item's first block: no product before it can overlap."""
    rows_full, _, keys_full, keys_empty, _, _, turns = barriers
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    at = done % STAGES
    mbarrier.wait(rows_full.index(w), round & 1)
    mbarrier.wait(keys_full.index(at), (done // STAGES) & 1)
    mbarrier.wait(turns.index(w), done & 1)
    tile = whole_tile(keys, at).permute((1, 0))
    scores = warpgroup_mma(own, tile, zero, use_acc=False, is_async=True)
    mbarrier.arrive(turns.index(1 - w), count=1)
    s = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(keys_empty.index(at), count=1)
    j0 = first_key(0, extent, KEYS)
    weights, state, _ = soften(s, None, j0, bounds, z, written, keys.dtype, True, True, MOMENTS)
    shrink = gl.full([GROUP], 1.0, gl.float32, ROWS)
    acc = shrink
    if values is not None:
        WIDTH: gl.constexpr = values.shape[-1]
        acc = gl.zeros([GROUP, WIDTH], gl.float32, SUMS)
    return acc, weights, shrink, state


@gluon.jit
def absorb(
    w: gl.constexpr, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
    SCORES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    MOMENTS: gl.constexpr,
):  # fmt: skip
    """Compute scores and softmax of block n, while the block before it is multiplied by values."""
    acc, weights, shrink, state = sums
    summed = acc
    _, _, keys_full, keys_empty, values_full, values_empty, turns = barriers
    at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
    last, last_turn = (done + n - 1) % STAGES, ((done + n - 1) // STAGES) & 1
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    mbarrier.wait(keys_full.index(at), turn)
    mbarrier.wait(turns.index(w), (done + n) & 1)
    tile = whole_tile(keys, at).permute((1, 0))
    scores = warpgroup_mma(own, tile, zero, use_acc=False, is_async=True)
    p = weights
    if values is not None:
        # While the scores are computed, the accumulators are rescaled for the last block's weights.
        SUMS: gl.constexpr = acc.type.layout
        p = gl.convert_layout(unpacked(weights, keys.dtype), gl.DotOperandLayout(0, SUMS, 2))
        acc = acc * along(shrink, SUMS)
        mbarrier.wait(values_full.index(last), last_turn)
        summed = warpgroup_mma(p, whole_tile(values, last), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - w), count=1)
    s = warpgroup_mma_wait(0 if values is None else 1, deps=(scores,))
    mbarrier.arrive(keys_empty.index(at), count=1)
    j0 = first_key(n, extent, KEYS)
    weights, state, shrink = soften(
        s, state, j0, bounds, z, written, keys.dtype, False, MASKED, MOMENTS
    )
    if values is not None:
        acc, p = warpgroup_mma_wait(0, deps=(summed, p))
        mbarrier.arrive(values_empty.index(last), count=1)
    return acc, weights, shrink, state


@gluon.jit
def last_product(
    n, sums, keys, values, barriers, b, h, i, z, sinks, written,
    ROWS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply an item's last block by its values while its statistics are written; return out."""
    acc, weights, shrink, state = sums
    _, _, _, _, values_full, values_empty, _ = barriers
    SUMS: gl.constexpr = acc.type.layout
    at, turn = n % STAGES, (n // STAGES) & 1
    p = gl.convert_layout(unpacked(weights, keys.dtype), gl.DotOperandLayout(0, SUMS, 2))
    acc = acc * along(shrink, SUMS)
    mbarrier.wait(values_full.index(at), turn)
    summed = warpgroup_mma(p, whole_tile(values, at), acc, is_async=True)
    weight = finish(state, b, h, i, z, sinks, written, ROWS)
    acc, p = warpgroup_mma_wait(0, deps=(summed, p))
    mbarrier.arrive(values_empty.index(at), count=1)
    return acc * along(weight, SUMS)


@gluon.jit
def follow(
    w: gl.constexpr, call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Run a consumer warpgroup: GROUP rows of each item, over all of its blocks of keys."""
    out, rows, results, keys, values, barriers, z, sinks, written = call
    rows_empty, turns = barriers[1], barriers[6]
    WIDTH: gl.constexpr = rows.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    ROWS: gl.constexpr = row_max(in_eighths(zero)).type.layout
    own = whole_tile(rows, w)
    done, round = 0, 0
    if w == 1:
        mbarrier.arrive(turns.index(0), count=1)
    for item in range(gl.program_id(0), z.items, gl.num_programs(0)):
        b, h, i0, extent = work(item, z, KEYS, BANDED)
        edges, blocks = extent[3], extent[4]
        i = i0 + w * GROUP + gl.arange(0, GROUP, ROWS)
        bounds = bounds_of(i, z, BANDED)
        sums = begin(
            w, done, round, own, keys, values, barriers, extent, bounds, z, written,
            SCORES, SUMS, ROWS, KEYS, STAGES, BLOCK > 0,
        )  # fmt: skip
        for n in range(1, edges):
            sums = absorb(
                w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
                SCORES, KEYS, STAGES, True, BLOCK > 0,
            )  # fmt: skip
        rest = edges
        if BLOCK > 0:
            rest = blocks_with_rest(extent, KEYS, BLOCK)
            for n in range(gl.maximum(edges, 1), rest):
                sums = absorb(
                    w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
                    SCORES, KEYS, STAGES, False, True,
                )  # fmt: skip
            acc, weights, shrink, state = sums
            state = put_moments(state, rest > 0, b, h, i, z, written, ROWS)
            sums = (acc, weights, shrink, state)
        for n in range(gl.maximum(rest, 1), blocks):
            sums = absorb(
                w, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
                SCORES, KEYS, STAGES, False, False,
            )  # fmt: skip
        mbarrier.arrive(rows_empty.index(w), count=1)  # the rows are no longer needed
        done, round = done + blocks, round + 1
        if values is None:
            finish(sums[3], b, h, i, z, sinks, written, ROWS)
        else:
            acc = last_product(
                done - 1, sums, keys, values, barriers, b, h, i, z, sinks, written, ROWS, STAGES
            )
            tma.store_wait(0)  # until the last item's rows are copied out
            whole_tile(results, w).store(acc.to(keys.dtype))
            fence_async_shared()
            async_store(out, [b, h, i0 + w * GROUP, 0], results.index(w))
    if values is not None:
        tma.store_wait(0)


@gluon.jit
def barriers_of(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate `count` barriers, each completed by `arrivals` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit(do_not_specialize=[*HopperSizes._fields])
def forward(
    q, k, v, out, written, sinks, queries, keys, heads, group, low, high, shift, items, factor,
    unit, cap,
    STAGES: gl.constexpr, BANDED: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Compute this program's items, GROUPS · GROUP query rows of one head each.

    If BLOCK is not 0, moments cover the keys past the last whole BLOCK that all rows of an item
    see; `row_moments` joins those of the other keys.
    """
    z = HopperSizes(queries, keys, heads, group, low, high, shift, items, factor, unit, cap)
    KEYS: gl.constexpr = k.block_type.shape[2]
    WIDTH: gl.constexpr = k.block_type.shape[3]
    rows = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, GROUP, WIDTH], q.layout)
    key_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
    results, value_tiles = None, None
    if v is not None:
        results = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, GROUP, WIDTH], q.layout)
        value_tiles = gl.allocate_shared_memory(v.dtype, [STAGES, 1, 1, KEYS, WIDTH], v.layout)
    rows_full, rows_empty = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    keys_full, keys_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    values_full, values_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    turns = barriers_of(GROUPS, 1)
    loading = (rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty)
    barriers = (rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty, turns)
    given = (q, k, v, rows, key_tiles, value_tiles, loading, z)
    call = (out, rows, results, key_tiles, value_tiles, barriers, z, sinks, written)
    gl.warp_specialize(
        [
            (follow, (0, call, KEYS, STAGES, BANDED, BLOCK)),
            (follow, (1, call, KEYS, STAGES, BANDED, BLOCK)),
            (load, (given, KEYS, STAGES, BANDED)),
        ],
        [4, 1],  # warps of the second consumer, and of the producer
        [240, 24],
    )
