"""The forward for Hopper: one warp loads, two groups of four multiply and see to the softmax.

Matrix products and exponentials run on different units of the chip. Triton's loops do one after the
other. Here a group of warps asks for the scores of the next keys before it multiplies the values of
these, so that its softmax runs beside a product; and the groups take turns at asking, so that one's
softmax runs beside the other's products.

As many programs run as the chip has multiprocessors, and each takes item after item, a block of
rows each, so that one item's first tiles are loaded while the last one's sums are finished. Every
buffer has two barriers: `full`, which the copy engine completes, and `empty`, at which each group
arrives when it has read the buffer for the last time.
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

GROUPS = gl.constexpr(2)  # that multiply, of a program
REGISTERS = 168  # of a thread at first; then those that multiply take 240, the loading warp 24


class Sizes(NamedTuple):
    """The numbers of a call, as its functions take them."""

    queries: int
    keys: int
    heads: int
    group: int  # query heads a key head
    low: int  # row i sees [i + low, i + high)
    high: int
    shift: int  # and stands beside the key i + shift
    items: int  # blocks of rows, of all heads and batch entries
    unit: float  # turns a score, or its tanh, into a power of two
    cap: tuple[float, ...] | None  # what `capped` takes; None: there is no cap


@gluon.jit
def whole_tile(tiles, n):
    """The n-th buffer as a matrix."""
    return tiles.index(n).reshape([tiles.shape[-2], tiles.shape[-1]])


@gluon.jit
def work(item, z, KEYS: gl.constexpr, BANDED: gl.constexpr):
    """An item's place (batch entry, head, first row) and its blocks of keys.

    Blocks are counted from the first key that any row sees; [inner, outer) of them need no mask,
    and the `edges` others come first.
    """
    ROWS: gl.constexpr = GROUPS * GROUP
    blocks_of_rows = gl.cdiv(z.queries, ROWS)
    line, block = item // blocks_of_rows, item % blocks_of_rows
    if BANDED and line % 2 == 0:  # few rows see much: who had a long block has a short one next
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
    """[first, last) of the keys that rows i see, and where they stand."""
    row = gl.minimum(i, z.queries - 1)
    first = row * 0
    last = first + z.keys
    if BANDED:
        first = gl.minimum(gl.maximum(row + z.low, 0), z.keys)
        last = gl.minimum(gl.maximum(row + z.high, 0), z.keys)
    return first, last, row + z.shift


@gluon.jit
def first_key(n, extent, KEYS: gl.constexpr):
    """Where the n-th block of keys begins: edges, then the others from the last to the first."""
    begin, inner, outer, edges, _ = extent
    edge = gl.where(n < inner, n, n - inner + outer)
    return begin + gl.where(n < edges, edge, outer - 1 - (n - edges)) * KEYS


@gluon.jit
def blocks_with_rest(extent, KEYS: gl.constexpr, BLOCK: gl.constexpr):
    """How many blocks come before those whose moments `triton.moments` takes, by whole BLOCKs."""
    _, inner, outer, edges, _ = extent
    whole = gl.minimum(outer * KEYS // BLOCK * (BLOCK // KEYS), outer - inner)
    return edges + outer - inner - whole


@gluon.jit
def load(call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr):
    """The one warp that loads: an item's rows, then its keys and values in turns."""
    q, k, v, rows, keys, values, barriers, z = call
    rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty = barriers
    done, round = 0, 0
    for item in range(gl.program_id(0), z.items, gl.num_programs(0)):
        b, h, i0, extent = work(item, z, KEYS, BANDED)
        for w in gl.static_range(GROUPS):
            mbarrier.wait(rows_empty.index(w), (round & 1) ^ 1)
            mbarrier.expect(rows_full.index(w), q.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q, [b, h, i0 + w * GROUP, 0], rows_full.index(w), rows.index(w)
            )
        for n in range(extent[4]):
            at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
            place = [b, h // z.group, first_key(n, extent, KEYS), 0]
            mbarrier.wait(keys_empty.index(at), turn ^ 1)
            mbarrier.expect(keys_full.index(at), k.block_type.nbytes)
            tma.async_copy_global_to_shared(k, place, keys_full.index(at), keys.index(at))
            mbarrier.wait(values_empty.index(at), turn ^ 1)
            mbarrier.expect(values_full.index(at), v.block_type.nbytes)
            tma.async_copy_global_to_shared(v, place, values_full.index(at), values.index(at))
        done, round = done + extent[4], round + 1


@gluon.jit
def absorb(
    w: gl.constexpr, n, done, sums, own, keys, values, barriers, extent, bounds, z, written,
    SCORES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    MOMENTS: gl.constexpr,
):  # fmt: skip
    """Block n's scores and softmax, beside the product of the block before it with its values."""
    acc, weights, shrink, state = sums
    _, _, keys_full, keys_empty, values_full, values_empty, turns = barriers
    at, turn = (done + n) % STAGES, ((done + n) // STAGES) & 1
    last, last_turn = (done + n - 1) % STAGES, ((done + n - 1) // STAGES) & 1
    SUMS: gl.constexpr = acc.type.layout
    zero = gl.zeros([GROUP, KEYS], gl.float32, SCORES)
    mbarrier.wait(keys_full.index(at), turn)
    mbarrier.wait(turns.index(w), (done + n) & 1)
    tile = whole_tile(keys, at).permute((1, 0))
    scores = warpgroup_mma(own, tile, zero, use_acc=False, is_async=True)
    # While the scores are made, the sums are shrunk to fit the last block's weights.
    p = gl.convert_layout(unpacked(weights, keys.dtype), gl.DotOperandLayout(0, SUMS, 2))
    acc = acc * along(shrink, SUMS)
    mbarrier.wait(values_full.index(last), last_turn)
    summed = warpgroup_mma(p, whole_tile(values, last), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - w), count=1)
    s = warpgroup_mma_wait(1, deps=(scores,))
    mbarrier.arrive(keys_empty.index(at), count=1)
    j0 = first_key(n, extent, KEYS)
    weights, state, shrink = soften(
        s, state, j0, bounds, z, written, keys.dtype, False, MASKED, MOMENTS
    )
    acc, p = warpgroup_mma_wait(0, deps=(summed, p))
    mbarrier.arrive(values_empty.index(last), count=1)
    return acc, weights, shrink, state


@gluon.jit
def follow(
    w: gl.constexpr, call, KEYS: gl.constexpr, STAGES: gl.constexpr, BANDED: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """A group of four warps: GROUP rows of each item, over all of its blocks of keys."""
    out, rows, results, keys, values, barriers, z, sinks, written = call
    rows_full, rows_empty, keys_full, keys_empty, values_full, values_empty, turns = barriers
    WIDTH: gl.constexpr = values.shape[-1]
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

        # The first block has no block before it.
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
        weights, state, _ = soften(
            s, None, j0, bounds, z, written, keys.dtype, True, True, BLOCK > 0
        )
        shrink = gl.full([GROUP], 1.0, gl.float32, ROWS)
        acc = gl.zeros([GROUP, WIDTH], gl.float32, SUMS)
        sums = (acc, weights, shrink, state)
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
        acc, weights, shrink, state = sums
        mbarrier.arrive(rows_empty.index(w), count=1)  # the rows have met their last key
        done, round = done + blocks, round + 1
        at, turn = (done - 1) % STAGES, ((done - 1) // STAGES) & 1
        p = gl.convert_layout(unpacked(weights, keys.dtype), gl.DotOperandLayout(0, SUMS, 2))
        acc = acc * along(shrink, SUMS)
        mbarrier.wait(values_full.index(at), turn)
        summed = warpgroup_mma(p, whole_tile(values, at), acc, is_async=True)
        weight = finish(state, b, h, i, z, sinks, written, ROWS)
        acc, p = warpgroup_mma_wait(0, deps=(summed, p))
        mbarrier.arrive(values_empty.index(at), count=1)
        acc = acc * along(weight, SUMS)
        tma.store_wait(0)  # the last item's rows have left
        whole_tile(results, w).store(acc.to(keys.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out, [b, h, i0 + w * GROUP, 0], results.index(w))
    tma.store_wait(0)


@gluon.jit
def barriers_of(count: gl.constexpr, arrivals: gl.constexpr):
    """So many barriers, each completed by so many arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(made.index(n), count=arrivals)
    return made


@gluon.jit(do_not_specialize=[*Sizes._fields])
def forward(
    q, k, v, out, written, sinks, queries, keys, heads, group, low, high, shift, items, unit, cap,
    STAGES: gl.constexpr, BANDED: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """As many items as come to this program, GROUPS · GROUP query rows of one head each.

    BLOCK, where it is not 0: the logits' moments are taken of the keys past the last whole BLOCK
    that all rows of an item see, as `headwise.engines.triton.host.moments_call` asks.
    """
    z = Sizes(queries, keys, heads, group, low, high, shift, items, unit, cap)
    KEYS: gl.constexpr = k.block_type.shape[2]
    WIDTH: gl.constexpr = k.block_type.shape[3]
    rows = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, GROUP, WIDTH], q.layout)
    results = gl.allocate_shared_memory(q.dtype, [GROUPS, 1, 1, GROUP, WIDTH], q.layout)
    key_tiles = gl.allocate_shared_memory(k.dtype, [STAGES, 1, 1, KEYS, WIDTH], k.layout)
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
        [4, 1],  # warps of the second group, and of the one that loads
        [240, 24],
    )
