"""The Hopper backward: a program per block of keys, and every row of its heads that sees it.

A producer warp loads rows, two consumer warpgroups own half of the keys each, and a third role, one
warp, adds the gradients of queries to memory. Tiles are keys by rows, so that weights and their
gradients are left operands in registers. The gradients of queries sum over all keys of the block:
each warpgroup puts its half of the logits' gradients into shared memory, where both read them.

A step's last product, of the gradients of keys, runs while the next step's scores are computed.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from headwise.engines.triton.kernels.hopper_forward import async_store, barriers_of
from headwise.engines.triton.kernels.hopper_loads import async_load, whole_tile
from headwise.engines.triton.kernels.hopper_softmax import (
    GROUP,
    NOTHING,
    in_eighths,
    packed,
    unpacked,
    visible,
)

LEAST = gl.constexpr(-1024.0)  # exponents below it have no weight
KEYS = gl.constexpr(128)  # per program: 64 for each warpgroup
GROUPS = gl.constexpr(2)  # consumer warpgroups per program
REGISTERS = 168  # per thread at launch; then consumers take 240, the others 24


class BackwardSizes(NamedTuple):
    """The numbers of a call, as device functions take them."""

    queries: int
    keys: int
    heads: int  # of keys
    group: int  # query heads per key head
    low: int  # row i sees the keys [i + low, i + high)
    high: int
    line: int  # rows of a head in `numbers` and grad_q, a multiple of ROWS
    lines: int  # heads of keys, of all batch entries
    section: int  # of them, worked on together
    blocks: int  # of keys
    unit: float  # turns a score, or its tanh, into a base-2 logit
    scale: float
    cap: tuple[float, ...] | None  # the constants of `capped`; None without a cap


@builtin
def async_add(descriptor, coordinates, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, as `tma.async_atomic_add` in 3.8."""
    place = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, source.handle
    )


@gluon.jit
def work(z, ORDERED: gl.constexpr):
    """Return this program's batch entry, key head and first key.

    Under a causal mask the first keys take longest, so they come first; but programs that add up in
    turns begin with the last keys, whose rows are met by the fewest others.
    """
    program = gl.program_id(0)
    size = z.section * z.blocks
    part = program // size
    lines = gl.minimum(z.section, z.lines - part * z.section)
    rest = program - part * size
    line = part * z.section + rest % lines
    number = rest // lines
    if ORDERED:
        number = z.blocks - 1 - number
    return line // z.heads, line % z.heads, number * KEYS


@gluon.jit
def seen_by(z, j0, ROWS: gl.constexpr):
    """Return the blocks of rows [begin, end) that may see keys, and [inner, outer) that see all."""
    blocks = gl.cdiv(z.queries, ROWS)
    begin = gl.maximum(j0 - z.high + 1, 0) // ROWS
    end = gl.minimum(gl.cdiv(gl.maximum(j0 + KEYS - z.low, 0), ROWS), blocks)
    begin = gl.minimum(begin, end)
    inner = gl.cdiv(gl.maximum(j0 + KEYS - z.high, 0), ROWS)
    last = gl.maximum(j0 - z.low + 1, 0)  # rows before it see the first of the keys
    outer = gl.where(last >= z.queries, blocks, last // ROWS)
    inner = gl.where(j0 + KEYS > z.keys, end, inner)  # there is nothing past the last key
    inner = gl.minimum(gl.maximum(inner, begin), end)
    outer = gl.minimum(gl.maximum(outer, inner), end)
    return begin, inner, outer, end


@gluon.jit
def supply(call, ROWS: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr):
    """Run the producer warp: load the keys and values, then blocks of rows."""
    q, grad, k, v, numbers, tiles, barriers, z = call
    rows, grads, keys, values, constants = tiles
    KINDS: gl.constexpr = constants.shape[0] // STAGES
    pair_full, rows_full, rows_empty, grads_full, grads_empty = barriers
    b, kh, j0 = work(z, ORDERED)
    for w in gl.static_range(GROUPS):
        mbarrier.expect(pair_full.index(w), k.block_type.nbytes + v.block_type.nbytes)
        async_load(k, [b, kh, j0 + w * GROUP, 0], pair_full.index(w), keys.index(w))
        async_load(v, [b, kh, j0 + w * GROUP, 0], pair_full.index(w), values.index(w))
    begin, _, _, end = seen_by(z, j0, ROWS)
    kind = z.lines * z.group * z.line  # numbers of a kind
    n = 0
    for member in range(z.group):
        h = kh * z.group + member
        line = (b * z.heads * z.group + h) * z.line
        for block in range(begin, end):
            at, turn, i0 = n % STAGES, (n // STAGES) & 1, block * ROWS
            mbarrier.wait(rows_empty.index(at), turn ^ 1)
            mbarrier.expect(rows_full.index(at), q.block_type.nbytes + numbers.block_type.nbytes)
            async_load(q, [b, h, i0, 0], rows_full.index(at), rows.index(at))
            async_load(numbers, [line + i0], rows_full.index(at), constants.index(at * KINDS))
            mbarrier.wait(grads_empty.index(at), turn ^ 1)
            rest: gl.constexpr = (KINDS - 1) * numbers.block_type.nbytes
            mbarrier.expect(grads_full.index(at), grad.block_type.nbytes + rest)
            async_load(grad, [b, h, i0, 0], grads_full.index(at), grads.index(at))
            for x in gl.static_range(1, KINDS):
                place = [x * kind + line + i0]
                async_load(numbers, place, grads_full.index(at), constants.index(at * KINDS + x))
            n += 1


@gluon.jit
def step(
    w: gl.constexpr, n, count, i0, masked, j0, sums, tiles, barriers, z,
    SUMS: gl.constexpr, SHARES: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Add a block of rows to the gradients of keys and values, and hand over that of its queries.

    Its scores are given; those of the next block are computed beside the last products.
    """
    grad_k, grad_v, s = sums
    rows, grads, keys, values, constants, halves, results = tiles
    KINDS: gl.constexpr = constants.shape[0] // STAGES
    LATE: gl.constexpr = KINDS == 3  # exponents are needed again: fewer registers at a time
    (_, rows_full, rows_empty, grads_full, grads_empty,
     halves_full, halves_empty, results_full, results_empty) = barriers  # fmt: skip
    SCORES: gl.constexpr = s.type.layout
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TYPE: gl.constexpr = rows.dtype
    own = unknown(w)
    at, turn = n % STAGES, (n // STAGES) & 1
    queries, tops = whole_tile(rows, at), whole_tile(grads, at)
    mbarrier.wait(grads_full.index(at), turn)
    dp = product_of(whole_tile(values, own), tops.permute((1, 0)), SCORES)
    base = constants.index(at * KINDS).load(COLUMNS)
    if LATE:
        dp = warpgroup_mma_wait(0, deps=(dp,))
    e = gl.fma(s, z.unit, -base[None, :])
    if masked:
        e = hide(e, i0, j0 + w * GROUP, z)
    p = gl.exp2(e)
    weights = gl.convert_layout(rounded(p, TYPE), LEFT)
    grad_v = warpgroup_mma(weights, tops, grad_v, is_async=True)
    if not LATE:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    less = constants.index(at * KINDS + 1).load(COLUMNS)
    off = dp - less[None, :]
    if KINDS == 3:
        own_entropy = constants.index(at * KINDS + 2).load(COLUMNS)
        off = gl.fma(-own_entropy[None, :], gl.maximum(e, LEAST), off)
    ds = p * off
    half, half_turn = n % HALVES, (n // HALVES) & 1
    mine, other = half * GROUPS + w, half * GROUPS + 1 - w
    mbarrier.wait(halves_empty.index(mine), half_turn ^ 1)
    slopes = rounded(ds, TYPE)
    halves.index(mine).store(slopes)
    fence_async_shared()
    mbarrier.arrive(halves_full.index(mine), count=1)
    grad_v, weights = warpgroup_mma_wait(0, deps=(grad_v, weights))
    mbarrier.arrive(grads_empty.index(at), count=1)
    left, right = shares(w, halves.index(mine), whole_tile(keys, own))
    grad_q = product_of(left, right, SHARES)
    mbarrier.wait(halves_full.index(other), half_turn)
    left, right = shares(w, halves.index(other), whole_tile(keys, 1 - own))
    grad_q = warpgroup_mma(left, right, grad_q, is_async=True)
    following = gl.minimum(n + 1, count - 1)
    mbarrier.wait(rows_full.index(following % STAGES), (following // STAGES) & 1)
    coming = whole_tile(rows, following % STAGES)
    s = product_of(whole_tile(keys, own), coming.permute((1, 0)), SCORES)
    slopes = gl.convert_layout(slopes, LEFT)
    grad_k = warpgroup_mma(slopes, queries, grad_k, is_async=True)
    grad_q = warpgroup_mma_wait(2, deps=(grad_q,))
    mbarrier.arrive(halves_empty.index(other), count=1)
    mbarrier.wait(results_empty.index(w), (n & 1) ^ 1)
    results.index(w).store(in_threads(grad_q))
    fence_async_shared()
    mbarrier.arrive(results_full.index(w), count=1)
    s, grad_k, slopes = warpgroup_mma_wait(0, deps=(s, grad_k, slopes))
    mbarrier.arrive(rows_empty.index(at), count=1)
    return grad_k, grad_v, s


@gluon.jit
def hide(e, i0, j0, z):
    """Return exponents of keys by rows, -inf where a row does not see a key."""
    LIKE: gl.constexpr = e.type.layout
    e = in_eighths(e)
    j = j0 + gl.arange(0, GROUP, gl.SliceLayout(1, gl.SliceLayout(2, e.type.layout)))
    first = gl.where(j < z.keys, j - z.high + 1, i0 + 8 * e.shape[1])  # rows that see key j
    seen = visible(e, i0, first, j - z.low + 1)
    e = gl.where(seen, e, NOTHING).reshape([GROUP, 8 * e.shape[1]])
    return gl.convert_layout(e, LIKE)


@gluon.jit
def unknown(x):
    """Return a number as one that the compiler does not know.

    Where it knows the address of a tile, it keeps a descriptor of each part of it in registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def rounded(x, TYPE: gl.constexpr):
    """Round to 16 bits, two at a time in one register; see `packed`."""
    return unpacked(packed(in_eighths(x), TYPE), TYPE)


@gluon.jit
def product_of(left, right, LAYOUT: gl.constexpr):
    """Begin the product of two tiles.

    No instruction sets the registers of its result: the assembler would not let one product run
    beside another whose registers are set meanwhile.
    """
    zero = gl.zeros([left.shape[0], right.shape[1]], gl.int32, LAYOUT)
    unset = gl.inline_asm_elementwise("", "=f,r", [zero], dtype=gl.float32, is_pure=False, pack=1)
    return warpgroup_mma(left, right, unset, use_acc=False, is_async=True)


@gluon.jit
def shares(w: gl.constexpr, half, keys):
    """Return the operands of warpgroup w's part of the gradients of queries, from half the keys.

    Its part is 64 columns of 64 rows, or 64 rows of 64 columns.
    """
    if half.shape[1] == GROUP:
        left, right = half, keys.slice(w * GROUP, GROUP, 1)
    else:
        left, right = half.slice(w * GROUP, GROUP, 1), keys
    return left.permute((1, 0)), right


@gluon.jit
def in_threads(x):
    """Reorder a (64, 64) product as its threads hold it, each four numbers in turns: (16, 256)."""
    return x.reshape([4, 2, 8, 8, 4, 2]).permute((3, 0, 2, 4, 1, 5)).reshape([16, 256])


@gluon.jit
def differentiate(
    w: gl.constexpr, call, ROWS: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Run a consumer warpgroup: GROUP keys, over all rows that see the program's keys."""
    grad_k, grad_v, tiles, barriers, z = call
    keys, values = tiles[2], tiles[3]
    WIDTH: gl.constexpr = keys.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SHARES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    b, kh, j0 = work(z, ORDERED)
    begin, inner, outer, end = seen_by(z, j0, ROWS)
    sum_k = gl.zeros([GROUP, WIDTH], gl.float32, SUMS)
    sum_v = sum_k
    count = (end - begin) * z.group
    if count > 0:
        mbarrier.wait(barriers[0].index(0), 0)
        mbarrier.wait(barriers[0].index(1), 0)
        mbarrier.wait(barriers[1].index(0), 0)
        queries = whole_tile(tiles[0], 0).permute((1, 0))
        zero = gl.zeros([GROUP, ROWS], gl.float32, SCORES)
        s = warpgroup_mma(whole_tile(keys, w), queries, zero, use_acc=False)
        sums = (sum_k, sum_v, s)
        n = 0
        for _ in range(z.group):
            for block in range(begin, end):
                masked = (block < inner) | (block >= outer)
                sums = step(
                    w, n, count, block * ROWS, masked, j0, sums, tiles, barriers, z, SUMS, SHARES,
                    STAGES, HALVES,
                )  # fmt: skip
                n += 1
        sum_k, sum_v, _ = sums
    whole_tile(values, w).store(sum_v.to(keys.dtype))  # nobody else reads these values
    fence_async_shared()
    async_store(grad_v, [b, kh, j0 + w * GROUP, 0], values.index(w))
    # The other warpgroup has multiplied its last gradients of logits by these keys.
    last = gl.maximum(count - 1, 0)
    halves_empty = barriers[6]
    mine = last % HALVES * GROUPS + w
    mbarrier.wait(halves_empty.index(mine), (last // HALVES) & 1, pred=count > 0)
    whole_tile(keys, w).store((sum_k * z.scale).to(keys.dtype))
    fence_async_shared()
    async_store(grad_k, [b, kh, j0 + w * GROUP, 0], keys.index(w))
    tma.store_wait(0)


@gluon.jit
def add(call, ROWS: gl.constexpr, ORDERED: gl.constexpr):
    """Run the adding warp: add the gradients of queries to those of other programs.

    ORDERED: each block of rows counts the programs that have added to it, from the last keys on, so
    that all runs add up in one order. A program only waits for those that were started before it.
    """
    grad_q, counts, results, results_full, results_empty, z = call
    WIDTH: gl.constexpr = 8192 // ROWS
    b, kh, j0 = work(z, ORDERED)
    begin, _, _, end = seen_by(z, j0, ROWS)
    n = 0
    for member in range(z.group):
        line = (b * z.heads * z.group + kh * z.group + member) * z.line
        for block in range(begin, end):
            count = counts
            if ORDERED:
                count = counts + (line // ROWS + block)
                first = gl.minimum(((block + 1) * ROWS + z.high - 2) // KEYS, z.blocks - 1)
                turn = first - j0 // KEYS
                while gl.atomic_add(count, 0, sem="acquire") < turn:
                    pass
            for w in gl.static_range(GROUPS):
                place = (line + block * ROWS) * WIDTH // 256 + w * 16
                mbarrier.wait(results_full.index(w), n & 1)
                async_add(grad_q, [place, 0], results.index(w))
                if ORDERED:
                    added(w)
                else:
                    tma.store_wait(0)
                mbarrier.arrive(results_empty.index(w), count=1)
            if ORDERED:
                gl.atomic_add(count, 1, sem="release")
            n += 1


@gluon.jit
def added(x):
    """Wait until all that was added is in global memory; `tma.store_wait` waits for its reads."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*BackwardSizes._fields])
def backward(
    q, grad, k, v, numbers, grad_q, counts, grad_k, grad_v, queries, keys, heads, group, low, high,
    line, lines, section, blocks, unit, scale, cap,
    STAGES: gl.constexpr, HALVES: gl.constexpr, ENTROPY: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of KEYS keys and values, and add those of the queries they meet."""
    z = BackwardSizes(
        queries, keys, heads, group, low, high, line, lines, section, blocks, unit, scale, cap
    )
    ROWS: gl.constexpr = q.block_type.shape[2]
    WIDTH: gl.constexpr = q.block_type.shape[3]
    rows = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    grads = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    key_tiles = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, GROUP, WIDTH], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, GROUP, WIDTH], v.layout)
    KINDS: gl.constexpr = 3 if ENTROPY else 2
    constants = gl.allocate_shared_memory(gl.float32, [STAGES * KINDS, ROWS], numbers.layout)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, ROWS], q.dtype)
    halves = gl.allocate_shared_memory(q.dtype, [HALVES * GROUPS, GROUP, ROWS], HALF)
    results = gl.allocate_shared_memory(gl.float32, [GROUPS, 16, 256], grad_q.layout)
    pair_full = barriers_of(GROUPS, 1)
    rows_full, rows_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    grads_full, grads_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    halves_full, halves_empty = barriers_of(HALVES * GROUPS, 1), barriers_of(HALVES * GROUPS, 1)
    results_full, results_empty = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    loaded = (rows, grads, key_tiles, values, constants)
    loading = (pair_full, rows_full, rows_empty, grads_full, grads_empty)
    given = (q, grad, k, v, numbers, loaded, loading, z)
    tiles = (rows, grads, key_tiles, values, constants, halves, results)
    barriers = (
        pair_full, rows_full, rows_empty, grads_full, grads_empty, halves_full, halves_empty,
        results_full, results_empty,
    )  # fmt: skip
    call = (grad_k, grad_v, tiles, barriers, z)
    adding = (grad_q, counts, results, results_full, results_empty, z)
    gl.warp_specialize(
        [
            (differentiate, (0, call, ROWS, STAGES, HALVES, ORDERED)),
            (differentiate, (1, call, ROWS, STAGES, HALVES, ORDERED)),
            (supply, (given, ROWS, STAGES, ORDERED)),
            (add, (adding, ROWS, ORDERED)),
        ],
        [4, 1, 1],  # warps of the second consumer, the producer and the adding warp
        [240, 24, 24],
    )
