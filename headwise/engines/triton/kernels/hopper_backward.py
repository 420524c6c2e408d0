"""The Hopper backward: a program per block of keys, and every row of its heads that sees it.

A producer warp loads rows, two consumer warpgroups own half of the keys each, and a third role, one
warp, adds the gradients of queries to memory. Tiles are keys by rows, so that weights and their
gradients are left operands in registers. The gradients of queries sum over all keys of the block:
each warpgroup puts its half of the logits' gradients into shared memory, where both read them.

The producer decides which blocks of rows a program visits, and tells the others through shared
memory. A step's last product, of the gradients of keys, runs while the next step's scores are
computed.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
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
    LOG2E,
    NOTHING,
    capped,
    in_eighths,
    packed,
    product,
    unpacked,
    visible,
)

LEAST = gl.constexpr(-1024.0)  # exponents below it have no weight
KEYS = gl.constexpr(128)  # per program: 64 for each warpgroup
GROUPS = gl.constexpr(2)  # consumer warpgroups per program
REGISTERS = 168  # per thread at launch; then consumers take 240, the others 24
SLOTS = gl.constexpr(4)  # steps of which the others are told: more than the stages
WORDS = gl.constexpr(3)  # per step
LSE, SHARED, BASE, REST, ENTROPY = map(gl.constexpr, range(5))  # the numbers of a row


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
    mask_batch: int  # strides of the mask's tables, in heads
    mask_head: int
    factor: float  # turns a score, or its tanh, into a logit
    unit: float  # and into a base-2 logit
    scale: float
    cap: tuple[float, ...] | None  # the constants of `capped`; None without a cap


class BackwardMask(NamedTuple):
    """The tables of a mask that is no band, of `row_bounds` and `key_visits`; None for a band."""

    seen: Tensor | None = None  # the keys that blocks of rows see
    visits: Tensor | None = None  # the blocks of rows that see a block of keys
    unseen: Tensor | None = None  # 1 for keys that no row sees


@builtin
def async_add(descriptor, coordinates, source, _semantic=None):
    """Add a tile in shared memory to one in global memory, as `tma.async_atomic_add` in 3.8."""
    place = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, place, source.handle
    )


@gluon.jit
def work(z, ORDERED: gl.constexpr):
    """Return this program's batch entry, key head and block of keys.

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
    return line // z.heads, line % z.heads, number


@gluon.jit
def met_by(z, j0, ROWS: gl.constexpr):
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
def mask_line(z, b, h):
    """Return the place of a query head in the mask's tables."""
    return b * z.mask_batch + h * z.mask_head


@gluon.jit
def entry_of(mask, z, b, h, number, piece, PIECES: gl.constexpr):
    """Return the address of what `key_visits` wrote of one piece."""
    place = (mask_line(z, b, h) * z.blocks + number) * PIECES + piece
    return mask.visits + place.to(gl.int64) * 4


@gluon.jit
def steps_of(mask, z, ROWS: gl.constexpr, ORDERED: gl.constexpr, PIECES: gl.constexpr):
    """Return how many blocks of rows this program visits, and if no row sees one of its keys."""
    b, kh, number = work(z, ORDERED)
    if PIECES == 0:
        begin, _, _, end = met_by(z, number * KEYS, ROWS)
        count, unseen = (end - begin) * z.group, number < 0
    else:
        count, least = number * 0, number * 0 + 1
        for turn in range(z.group * PIECES):
            h = kh * z.group + turn // PIECES
            entry = entry_of(mask, z, b, h, number, turn % PIECES, PIECES)
            count += gl.load(entry + 2)
            least = gl.minimum(least, gl.load(entry + 3))
        unseen = least > 0
    return count, unseen


@gluon.jit
def turn_of(seen, z, block, number, piece, rows, PIECES: gl.constexpr):
    """Return how many visits of a block of rows come before this one; see `add`.

    `seen` is where the table has what a block of rows sees of the first piece.
    """
    turn = number * 0
    for other in gl.static_range(PIECES):
        at = seen + other * 4 * rows
        low, high = gl.load(at), gl.load(at + rows)
        first, last = low // KEYS, (high - 1) // KEYS
        count = gl.where(low < high, last - first + 1, 0)
        turn += gl.minimum(gl.maximum(last - number, 0), count)
        if other == 0:
            turn += ((piece > 0) & (low < high) & (first <= number) & (number <= last)).to(gl.int32)
    return turn


@gluon.jit
def word(info, n, WARPS: gl.constexpr):
    """Return the n-th number of shared memory."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    return gl.sum(info.index(n).load(ALONE), 0)


@gluon.jit
def tell(info, noted, n, i0, masked, place, turn):
    """Tell the other roles of step n: its first row and if it is masked, its place, its turn."""
    ALONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    at = n % SLOTS
    info.index(at * WORDS).store(gl.full([1], i0 * 2 + masked, gl.int32, ALONE))
    info.index(at * WORDS + 1).store(gl.full([1], place, gl.int32, ALONE))
    info.index(at * WORDS + 2).store(gl.full([1], turn, gl.int32, ALONE))
    mbarrier.arrive(noted.index(at), count=1)


@gluon.jit
def fill(given, n, b, h, i0, line, bound, STAGES: gl.constexpr):
    """Load a block of rows: queries and their lse, then the other numbers and gradients."""
    q, grad, numbers, mask_bounds, _, tiles, barriers, z = given
    rows, grads, constants, bounds = tiles
    rows_full, rows_empty, grads_full, grads_empty = barriers
    KINDS: gl.constexpr = constants.shape[0] // STAGES
    kind = z.lines * z.group * z.line  # numbers of a kind
    at, turn = n % STAGES, (n // STAGES) & 1
    mbarrier.wait(rows_empty.index(at), turn ^ 1)
    mbarrier.expect(rows_full.index(at), q.block_type.nbytes + numbers.block_type.nbytes)
    async_load(q, [b, h, i0, 0], rows_full.index(at), rows.index(at))
    async_load(numbers, [line + i0], rows_full.index(at), constants.index(at * KINDS))
    mbarrier.wait(grads_empty.index(at), turn ^ 1)
    MORE: gl.constexpr = KINDS - 1 if bounds is None else KINDS + 1
    mbarrier.expect(grads_full.index(at), grad.block_type.nbytes + MORE * numbers.block_type.nbytes)
    async_load(grad, [b, h, i0, 0], grads_full.index(at), grads.index(at))
    for x in gl.static_range(1, KINDS):
        place = [x * kind + line + i0]
        async_load(numbers, place, grads_full.index(at), constants.index(at * KINDS + x))
    if bounds is not None:
        async_load(mask_bounds, [bound], grads_full.index(at), bounds.index(at * 2))
        async_load(mask_bounds, [bound + z.line], grads_full.index(at), bounds.index(at * 2 + 1))


@gluon.jit
def supply(
    call, ROWS: gl.constexpr, STAGES: gl.constexpr, ORDERED: gl.constexpr, PIECES: gl.constexpr
):
    """Run the producer warp: load the keys and values, then each block of rows that sees them."""
    k, v, keys, values, pair_full, info, noted, careful, given = call
    mask, z = given[4], given[7]
    b, kh, number = work(z, ORDERED)
    j0 = number * KEYS
    for w in gl.static_range(GROUPS):
        mbarrier.expect(pair_full.index(w), k.block_type.nbytes + v.block_type.nbytes)
        async_load(k, [b, kh, j0 + w * GROUP, 0], pair_full.index(w), keys.index(w))
        async_load(v, [b, kh, j0 + w * GROUP, 0], pair_full.index(w), values.index(w))
    n = 0
    if PIECES == 0:
        begin, inner, outer, end = met_by(z, j0, ROWS)
        for member in range(z.group):
            h = kh * z.group + member
            line = (b * z.heads * z.group + h) * z.line
            for block in range(begin, end):
                place = line // ROWS + block
                masked = (block < inner) | (block >= outer) | (gl.load(careful + place) > 0)
                last = gl.minimum(((block + 1) * ROWS + z.high - 2) // KEYS, z.blocks - 1)
                tell(info, noted, n, block * ROWS, masked, place, last - number)
                fill(given, n, b, h, block * ROWS, line, None, STAGES)
                n += 1
    else:
        rows = z.line // ROWS
        for turn in range(z.group * PIECES):
            h, piece = kh * z.group + turn // PIECES, turn % PIECES
            line = (b * z.heads * z.group + h) * z.line
            entry = entry_of(mask, z, b, h, number, piece, PIECES)
            own = mask_line(z, b, h) * PIECES  # of the pieces of all heads
            for block in range(gl.load(entry), gl.load(entry + 1)):
                seen = mask.seen + own.to(gl.int64) * 4 * rows + block
                at = seen + piece * 4 * rows
                if (gl.load(at) < j0 + KEYS) & (gl.load(at + rows) > j0):
                    place = line // ROWS + block
                    some = (gl.load(at + 2 * rows) > j0) | (gl.load(at + 3 * rows) < j0 + KEYS)
                    some = some | (gl.load(careful + place) > 0)
                    before = number
                    if ORDERED:
                        before = turn_of(seen, z, block, number, piece, rows, PIECES)
                    tell(info, noted, n, block * ROWS, some, place, before)
                    bound = (own + piece) * 2 * z.line + block * ROWS
                    fill(given, n, b, h, block * ROWS, line, bound, STAGES)
                    n += 1


@gluon.jit
def step(
    w: gl.constexpr, n, count, j0, sums, tiles, barriers, z,
    SUMS: gl.constexpr, SHARES: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Add a block of rows to the gradients of keys and values, and hand over that of its queries.

    Its scores are given; those of the next block are computed beside the last products. More than
    GROUP rows are weighed in two parts, which takes fewer registers.
    """
    grad_k, grad_v, s = sums
    rows, grads, keys, values, constants, bounds, halves, results, info = tiles
    KINDS: gl.constexpr = constants.shape[0] // STAGES
    numbers = (constants, bounds)
    (_, _, rows_full, rows_empty, grads_full, grads_empty,
     halves_full, halves_empty, results_full, results_empty) = barriers  # fmt: skip
    SCORES: gl.constexpr = s.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    TYPE: gl.constexpr = rows.dtype
    PARTS: gl.constexpr = rows.shape[-2] // GROUP
    own = unknown(w)
    at, turn = n % STAGES, (n // STAGES) & 1
    half, half_turn = n % HALVES, (n // HALVES) & 1
    mine, other = half * GROUPS + w, half * GROUPS + 1 - w
    told = word(info, n % SLOTS * WORDS, 4)
    queries, tops = whole_tile(rows, at), whole_tile(grads, at)
    mbarrier.wait(grads_full.index(at), turn)
    dp = product_of(whole_tile(values, own), tops.permute((1, 0)), SCORES)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.wait(halves_empty.index(mine), half_turn ^ 1)
    room = halves.index(mine)
    slopes2 = None
    if PARTS == 1:
        p, slopes = weigh(s, dp, numbers, at, told, 0, j0 + w * GROUP, z, TYPE, KINDS)
        p = gl.convert_layout(p, LEFT)
        grad_v = warpgroup_mma(p, tops, grad_v, is_async=True)
        room.store(slopes)
    else:
        s, s2 = parted(s)
        dp, dp2 = parted(dp)
        p, slopes = weigh(s, dp, numbers, at, told, 0, j0 + w * GROUP, z, TYPE, KINDS)
        p = gl.convert_layout(p, LEFT)
        grad_v = warpgroup_mma(p, tops.slice(0, GROUP), grad_v, is_async=True)
        room.slice(0, GROUP, 1).store(slopes)
        p2, slopes2 = weigh(s2, dp2, numbers, at, told, 1, j0 + w * GROUP, z, TYPE, KINDS)
        p2 = gl.convert_layout(p2, LEFT)
        grad_v = warpgroup_mma(p2, tops.slice(GROUP, GROUP), grad_v, is_async=True)
        room.slice(GROUP, GROUP, 1).store(slopes2)
    fence_async_shared()
    mbarrier.arrive(halves_full.index(mine), count=1)
    grad_v, p = warpgroup_mma_wait(0, deps=(grad_v, p))
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
    if PARTS == 1:
        grad_k = warpgroup_mma(slopes, queries, grad_k, is_async=True)
        grad_q = warpgroup_mma_wait(2, deps=(grad_q,))
    else:
        grad_k = warpgroup_mma(slopes, queries.slice(0, GROUP), grad_k, is_async=True)
        slopes2 = gl.convert_layout(slopes2, LEFT)
        grad_k = warpgroup_mma(slopes2, queries.slice(GROUP, GROUP), grad_k, is_async=True)
        grad_q = warpgroup_mma_wait(3, deps=(grad_q,))
    mbarrier.arrive(halves_empty.index(other), count=1)
    mbarrier.wait(results_empty.index(w), (n & 1) ^ 1)
    results.index(w).store(in_threads(grad_q))
    fence_async_shared()
    mbarrier.arrive(results_full.index(w), count=1)
    s, grad_k, slopes = warpgroup_mma_wait(0, deps=(s, grad_k, slopes))
    mbarrier.arrive(rows_empty.index(at), count=1)
    return grad_k, grad_v, s


@gluon.jit
def parted(x):
    """Return the first and the last GROUP columns of a product, which each thread holds of both."""
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    one, two = gl.split(x.reshape([GROUP, 2, GROUP]).permute((0, 2, 1)))
    return gl.convert_layout(one, HALF), gl.convert_layout(two, HALF)


@gluon.jit
def of_rows(x, n, part: gl.constexpr, COLUMNS: gl.constexpr):
    """Load the n-th number of a part of the rows, next to their columns."""
    return x.index(n).slice(part * GROUP, GROUP).load(COLUMNS)


@gluon.jit
def weigh(
    s, dp, numbers, at, told, part: gl.constexpr, j0, z, TYPE: gl.constexpr, KINDS: gl.constexpr
):
    """Return the weights of keys by GROUP rows and the gradients of their logits, in 16 bits."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    constants, bounds = numbers
    first = at * KINDS
    if z.cap is not None:
        s = capped(s, z.cap)
    e = gl.fma(s, z.unit, of_rows(constants, first + LSE, part, COLUMNS)[None, :])
    masked = (told & 1) != 0
    if masked:
        e = exact(s, constants, first, part, z, COLUMNS)
        if bounds is None:
            e = hide(e, (told >> 1) + part * GROUP, j0, z)
        else:
            e = hide_by(e, bounds, at, part, j0, COLUMNS)
    p = gl.exp2(e)
    off = dp - of_rows(constants, first + SHARED, part, COLUMNS)[None, :]
    if KINDS > ENTROPY:
        slope = of_rows(constants, first + ENTROPY, part, COLUMNS)
        off = gl.fma(slope[None, :], gl.maximum(e, LEAST), off)
    ds = p * off
    if z.cap is not None:
        ds *= gl.fma(-s, s, 1.0)
    if masked:
        ds = gl.where(p == 0.0, 0.0, ds)  # a row or a hidden value may hold NaN
    return rounded(p, TYPE), rounded(ds, TYPE)


@gluon.jit
def exact(s, constants, first, part: gl.constexpr, z, COLUMNS: gl.constexpr):
    """Return exponents from scores, exact for large logits; they take three more operations.

    Rounding of large logits may push a weight above 1; NaN stays.
    """
    base = of_rows(constants, first + BASE, part, COLUMNS)
    rest = of_rows(constants, first + REST, part, COLUMNS)
    e = gl.fma(product(s, z.factor) - base[None, :], LOG2E, rest[None, :])
    return gl.where(e > 0.0, 0.0, e)


@gluon.jit
def hide(e, i0, j0, z):
    """Return exponents of keys by rows, -inf where a row does not see a key, for a band."""
    LIKE: gl.constexpr = e.type.layout
    e = in_eighths(e)
    j = j0 + gl.arange(0, GROUP, gl.SliceLayout(1, gl.SliceLayout(2, e.type.layout)))
    first = gl.where(j < z.keys, j - z.high + 1, i0 + GROUP)  # rows that see key j
    seen = visible(e, i0, first, j - z.low + 1)
    e = gl.where(seen, e, NOTHING).reshape([GROUP, GROUP])
    return gl.convert_layout(e, LIKE)


@gluon.jit
def hide_by(e, bounds, at, part: gl.constexpr, j0, COLUMNS: gl.constexpr):
    """Return exponents of keys by rows, -inf for keys outside the bounds of a row."""
    first = of_rows(bounds, at * 2, part, COLUMNS)
    last = of_rows(bounds, at * 2 + 1, part, COLUMNS)
    j = j0 + gl.arange(0, GROUP, gl.SliceLayout(1, e.type.layout))
    seen = (j[:, None] >= first[None, :]) & (j[:, None] < last[None, :])
    return gl.where(seen, e, NOTHING)


@gluon.jit
def clean(tile, mask, z, b, kh, j0):
    """Set keys that no row sees to 0: they may hold anything, and 0 · NaN is NaN."""
    WIDTH: gl.constexpr = tile.shape[1]
    ALL: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    j = j0 + gl.arange(0, GROUP, gl.SliceLayout(1, ALL))
    unseen = j * 0 + 1
    for member in range(z.group):
        line = mask_line(z, b, kh * z.group + member) * z.blocks * KEYS
        unseen = gl.minimum(unseen, gl.load(mask.unseen + line + j))
    x = tile.load(ALL)
    tile.store(gl.where(unseen[:, None] > 0, gl.zeros_like(x), x))
    fence_async_shared()


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
    zero = gl.full([left.shape[0], right.shape[1]], 0, gl.int32, LAYOUT)
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
    ORDERED: gl.constexpr, PIECES: gl.constexpr,
):  # fmt: skip
    """Run a consumer warpgroup: GROUP keys, over all rows that see the program's keys."""
    grad_k, grad_v, tiles, barriers, mask, z = call
    keys, values = tiles[2], tiles[3]
    pair_full, cleaned = barriers[0], barriers[1]
    WIDTH: gl.constexpr = keys.shape[-1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    SHARES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, GROUP, 16])
    b, kh, number = work(z, ORDERED)
    j0 = number * KEYS
    count, unseen = steps_of(mask, z, ROWS, ORDERED, PIECES)
    sum_k = gl.zeros([GROUP, WIDTH], gl.float32, SUMS)
    sum_v = sum_k
    if count > 0:
        mbarrier.wait(pair_full.index(0), 0)
        mbarrier.wait(pair_full.index(1), 0)
        if PIECES > 0:
            if unseen:
                clean(whole_tile(keys, w), mask, z, b, kh, j0 + w * GROUP)
            mbarrier.arrive(cleaned.index(w), count=1)
            mbarrier.wait(cleaned.index(1 - w), 0)
        mbarrier.wait(barriers[2].index(0), 0)
        queries = whole_tile(tiles[0], 0).permute((1, 0))
        zero = gl.zeros([GROUP, ROWS], gl.float32, SCORES)
        s = warpgroup_mma(whole_tile(keys, w), queries, zero, use_acc=False)
        sums = (sum_k, sum_v, s)
        for n in range(count):
            sums = step(w, n, count, j0, sums, tiles, barriers, z, SUMS, SHARES, STAGES, HALVES)
        sum_k, sum_v, _ = sums
    else:
        mbarrier.wait(pair_full.index(w), 0)  # what TMA loads must not follow what is stored
    whole_tile(values, w).store(sum_v.to(keys.dtype))  # nobody else reads these values
    fence_async_shared()
    async_store(grad_v, [b, kh, j0 + w * GROUP, 0], values.index(w))
    # The other warpgroup has multiplied its last gradients of logits by these keys.
    last = gl.maximum(count - 1, 0)
    halves_empty = barriers[7]
    mine = last % HALVES * GROUPS + w
    mbarrier.wait(halves_empty.index(mine), (last // HALVES) & 1, pred=count > 0)
    whole_tile(keys, w).store((sum_k * z.scale).to(keys.dtype))
    fence_async_shared()
    async_store(grad_k, [b, kh, j0 + w * GROUP, 0], keys.index(w))
    tma.store_wait(0)


@gluon.jit
def add(call, ROWS: gl.constexpr, ORDERED: gl.constexpr, PIECES: gl.constexpr):
    """Run the adding warp: add the gradients of queries to those of other programs.

    ORDERED: each block of rows counts the programs that have added to it, from the last keys on, so
    that all runs add up in one order. A program only waits for those that were started before it.
    """
    grad_q, counts, results, results_full, results_empty, info, noted, mask, z = call
    steps, _ = steps_of(mask, z, ROWS, ORDERED, PIECES)
    for n in range(steps):
        at = n % SLOTS
        mbarrier.wait(noted.index(at), (n // SLOTS) & 1)
        place = word(info, at * WORDS + 1, 1)
        count = counts + place
        if ORDERED:
            turn = word(info, at * WORDS + 2, 1)
            while gl.atomic_add(count, 0, sem="acquire") < turn:
                pass
        for w in gl.static_range(GROUPS):
            mbarrier.wait(results_full.index(w), n & 1)
            async_add(grad_q, [(place * GROUPS + w) * 16, 0], results.index(w))
            tma.store_wait(0)
            mbarrier.arrive(results_empty.index(w), count=1)
        if ORDERED:
            added(place)
            gl.atomic_add(count, 1, sem="release")


@gluon.jit
def added(x):
    """Wait until all that was added is in global memory; `tma.store_wait` waits for its reads."""
    return gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*BackwardSizes._fields])
def backward(
    q, grad, k, v, numbers, mask_bounds, careful, grad_q, counts, grad_k, grad_v, mask,
    queries, keys, heads, group, low, high, line, lines, section, blocks, mask_batch, mask_head,
    factor, unit, scale, cap,
    STAGES: gl.constexpr, HALVES: gl.constexpr, KINDS: gl.constexpr, ORDERED: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of KEYS keys and values, and add those of the queries they meet.

    KINDS: numbers of a row that are loaded. PIECES: intervals per row of a mask with tables, whose
    bounds `mask_bounds` are a descriptor, and so no part of `mask`.
    """
    z = BackwardSizes(
        queries, keys, heads, group, low, high, line, lines, section, blocks, mask_batch,
        mask_head, factor, unit, scale, cap,
    )  # fmt: skip
    ROWS: gl.constexpr = q.block_type.shape[2]
    WIDTH: gl.constexpr = q.block_type.shape[3]
    rows = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    grads = gl.allocate_shared_memory(q.dtype, [STAGES, 1, 1, ROWS, WIDTH], q.layout)
    key_tiles = gl.allocate_shared_memory(k.dtype, [GROUPS, 1, 1, GROUP, WIDTH], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [GROUPS, 1, 1, GROUP, WIDTH], v.layout)
    constants = gl.allocate_shared_memory(gl.float32, [STAGES * KINDS, ROWS], numbers.layout)
    bounds, cleaned = None, None
    if PIECES > 0:
        bounds = gl.allocate_shared_memory(gl.int32, [STAGES * 2, ROWS], numbers.layout)
        cleaned = barriers_of(GROUPS, 1)
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([GROUP, ROWS], q.dtype)
    halves = gl.allocate_shared_memory(q.dtype, [HALVES * GROUPS, GROUP, ROWS], HALF)
    results = gl.allocate_shared_memory(gl.float32, [GROUPS, 16, 256], grad_q.layout)
    info = gl.allocate_shared_memory(
        gl.int32, [SLOTS * WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    pair_full, noted = barriers_of(GROUPS, 1), barriers_of(SLOTS, 1)
    rows_full, rows_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    grads_full, grads_empty = barriers_of(STAGES, 1), barriers_of(STAGES, GROUPS)
    halves_full, halves_empty = barriers_of(HALVES * GROUPS, 1), barriers_of(HALVES * GROUPS, 1)
    results_full, results_empty = barriers_of(GROUPS, 1), barriers_of(GROUPS, 1)
    loaded = (rows, grads, constants, bounds)
    loading = (rows_full, rows_empty, grads_full, grads_empty)
    given = (q, grad, numbers, mask_bounds, mask, loaded, loading, z)
    supplied = (k, v, key_tiles, values, pair_full, info, noted, careful, given)
    tiles = (rows, grads, key_tiles, values, constants, bounds, halves, results, info)
    barriers = (
        pair_full, cleaned, rows_full, rows_empty, grads_full, grads_empty, halves_full,
        halves_empty, results_full, results_empty,
    )  # fmt: skip
    call = (grad_k, grad_v, tiles, barriers, mask, z)
    adding = (grad_q, counts, results, results_full, results_empty, info, noted, mask, z)
    gl.warp_specialize(
        [
            (differentiate, (0, call, ROWS, STAGES, HALVES, ORDERED, PIECES)),
            (differentiate, (1, call, ROWS, STAGES, HALVES, ORDERED, PIECES)),
            (supply, (supplied, ROWS, STAGES, ORDERED, PIECES)),
            (add, (adding, ROWS, ORDERED, PIECES)),
        ],
        [4, 1, 1],  # warps of the second consumer, the producer and the adding warp
        [240, 24, 24],
    )
