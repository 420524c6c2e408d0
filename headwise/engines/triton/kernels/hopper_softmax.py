"""The softmax of a tile on Hopper: weights, running sums, and statistics from them.

It computes what the Triton kernel `forward` does for plain and for capped scores, in the same
units, but without its unit for huge rows: base-2 logits up to 2^28 are exact. After a matrix
product a thread holds two of every eight keys, of two rows. Sums stay per thread until the end, so
that threads exchange nothing in the loop.
"""

# A kernel is Gluon's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from headwise.engines.triton.kernels.cap import LIMIT, SERIES, TWO_LOG2E, assembly, operands

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(float("-inf"))
HIDDEN = gl.constexpr(-(2.0**105))  # the score of a hidden key: finite, so 0 · its exponent is 0
LOWEST = gl.constexpr(-(2.0**100))  # the largest score of a row that has seen no key
GROUP = gl.constexpr(64)  # rows per warpgroup: those of one matrix instruction
TOGETHER = gl.constexpr(16)  # scores for which a thread chooses one formula of the cap at once


@gluon.jit
def product(x, y):
    """Return x · y rounded to float32; the compiler may not fuse it with a sum that follows."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def in_eighths(s):
    """Reshape (rows, keys) scores to (rows, keys / 8, 8): a thread's keys lie along axis 1."""
    return s.reshape([GROUP, s.shape[1] // 8, 8])


@gluon.jit
def row_max(s):
    """Return the maximum of each row of scores in eighths."""
    return gl.max(gl.max(s, 1), 1)


@gluon.jit
def along(x, LIKE: gl.constexpr):
    """Broadcast one number per row along the columns of a layout."""
    return gl.convert_layout(x, gl.SliceLayout(1, LIKE))[:, None]


@gluon.jit
def steps(LAYOUT: gl.constexpr, COUNT: gl.constexpr):
    """Return 0, 1, 2, … along axis 1 of scores in eighths."""
    return gl.arange(0, COUNT, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]


@gluon.jit
def visible(s, j0, first, last):
    """Return True for the keys of a tile in eighths that each row sees.

    A thread's keys of a row are the bits of one word, so that each key costs one test.
    """
    LAYOUT: gl.constexpr = s.type.layout
    COUNT: gl.constexpr = s.shape[1]
    EIGHTHS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    eighth = gl.arange(0, 8, gl.SliceLayout(0, EIGHTHS))[None, :]
    begin = gl.minimum(gl.maximum((along(first, EIGHTHS) - j0 - eighth + 7) >> 3, 0), COUNT)
    end = gl.minimum(gl.maximum((along(last, EIGHTHS) - j0 - eighth + 7) >> 3, 0), COUNT)
    bits = ((1 << end) - 1) & ~((1 << begin) - 1)
    return (bits[:, None, :] & (1 << steps(LAYOUT, COUNT))) != 0


def numbers_of_cap(ratio: float) -> tuple[float, ...]:
    """Return the constants of `capped`; a kernel that computed them would spill registers."""
    series = (c * ratio ** (2 * n + 1) for n, c in enumerate(SERIES.value))
    return (LIMIT.value / ratio) ** 2, TWO_LOG2E.value * ratio, *series


@gluon.jit
def capped(s, cap):
    """Return the tanh of a cap by the assembly of `cap`, with the numbers of `numbers_of_cap`."""
    limit, factor, one, three, five, seven = cap
    return gl.inline_asm_elementwise(
        assembly(TOGETHER), operands(TOGETHER), [s, limit, factor, one, three, five, seven],
        dtype=gl.float32, is_pure=True, pack=TOGETHER,
    )  # fmt: skip


@gluon.jit
def packed(p, TYPE: gl.constexpr):
    """Round weights in eighths to 16 bits and pack two per word: (rows, keys / 2).

    As a 16-bit tensor they would be unpacked and packed again on their way to the next step, and
    unrounded they would take twice the registers.
    """
    low, high = gl.split(p.reshape([GROUP, p.shape[1] * 4, 2]))
    ROUND: gl.constexpr = "bf16x2" if TYPE.is_bf16() else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{ROUND}.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@gluon.jit
def unpacked(words, TYPE: gl.constexpr):
    """Return packed weights as (rows, keys), in place: the assembler sees that nothing moves."""
    low, high = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True,
        pack=1,
    )  # fmt: skip
    return gl.join(low, high).reshape([GROUP, 2 * words.shape[1]]).to(TYPE, bitcast=True)


@gluon.jit
def soften(
    s, before, j0, bounds, z, written,
    TYPE: gl.constexpr, FIRST: gl.constexpr, MASKED: gl.constexpr, MOMENTS: gl.constexpr,
):  # fmt: skip
    """Merge a tile into the rows' state; return its weights, the state, and the rescale factor.

    The weights are `packed`, of the type TYPE.
    """
    if z.cap is not None:
        s = capped(s, z.cap)
    s = in_eighths(s)
    first, last, position = bounds
    seen, unit = s, z.unit
    if MASKED:
        seen = visible(s, j0, first, last)
        s = gl.where(seen, s, HIDDEN)
    new = row_max(s)
    if FIRST:
        new = gl.maximum(new, LOWEST)
    else:
        new = gl.maximum(before[0], new)
    base = product(new, unit)
    e = gl.fma(s, unit, -base[:, None][:, None, :])
    p = gl.exp2(e)
    l = gl.sum(p, 1)
    SUMS: gl.constexpr = l.type.layout
    shifted, reach, squared, count, off, squares = l, l, l, l, l, l
    if written.entropy is not None:
        shifted = gl.sum(p * e, 1)
    if written.distance is not None:
        # Counted from the block's first key, so that small distances stay exact.
        TILE: gl.constexpr = s.type.layout
        beyond = gl.sum(p * (8 * steps(TILE, s.shape[1])).to(gl.float32), 1)
        reach = along((position - j0).to(gl.float32), SUMS) * l - beyond
    if written.participation is not None:
        squared = gl.sum(p * p, 1)
    if MOMENTS:
        # About the running maximum, which is at most √n deviations from the mean.
        count = gl.full([GROUP, 8], s.shape[1], gl.float32, SUMS)
        if MASKED:
            count = gl.sum(gl.where(seen, 1.0, 0.0), 1)
            e = gl.where(seen, e, 0.0)
        off, squares = gl.sum(e, 1), gl.sum(e * e, 1)
    shrink = new
    if not FIRST:
        m, old_l, old_sums, old_moments = before
        old_shifted, old_reach, old_squared = old_sums
        moved = product(m, unit) - base
        shrink = gl.exp2(moved)
        less, moved = along(shrink, SUMS), along(moved, SUMS)
        if written.entropy is not None:
            shifted += (old_shifted + old_l * moved) * less
        if written.distance is not None:
            reach += old_reach * less
        if written.participation is not None:
            squared += old_squared * (less * less)
        if MOMENTS:
            old_count, old_off, old_squares = old_moments
            moved = gl.where(old_count > 0.0, moved, 0.0)
            off += old_off + old_count * moved
            squares += old_squares + moved * (2.0 * old_off + old_count * moved)
            count += old_count
        l += old_l * less
    return packed(p, TYPE), (new, l, (shifted, reach, squared), (count, off, squares)), shrink


@gluon.jit
def put_moments(state, some, b, h, i, z, written, ROWS: gl.constexpr):
    """Write mean and sum of squares of the logits so far; return the state without them.

    If the number of visible keys is asked for too, these are all logits, and the variance follows.
    """
    m, l, sums, moments = state
    count, off, squares = moments
    base = product(m, z.unit)
    count = gl.convert_layout(gl.sum(count, 1), ROWS)
    off = gl.convert_layout(gl.sum(off, 1), ROWS)
    squares = gl.convert_layout(gl.sum(squares, 1), ROWS)
    there = (count > 0.0) & some
    about = off / gl.maximum(count, 1.0)
    line = (b * z.heads + h).to(gl.int64) * z.queries + i
    here = i < z.queries
    gl.store(written.logit_mean + line, gl.where(there, (base + about) * LN2, 0.0), mask=here)
    spread = gl.where(there, gl.maximum(squares - off * about, 0.0), 0.0) * (LN2 * LN2)
    if written.visible is not None:
        gl.store(written.visible + line, count, mask=here)
        spread = spread / gl.maximum(count, 1.0)
    gl.store(written.logit_var + line, spread, mask=here)
    return m, l, sums, (l, l, l)


@gluon.jit
def finish(state, b, h, i, z, sinks, written, ROWS: gl.constexpr):
    """Write the rows' statistics; return the factor that normalises the accumulators."""
    m, l_parts, sums, _ = state
    shifted, reach, squared = sums
    l = gl.convert_layout(gl.sum(l_parts, 1), ROWS)
    unseen = l == 0.0
    excess = gl.fma(m, z.unit, -product(m, z.unit))  # of the largest exponent
    shift = gl.exp2(-excess)
    top = gl.where(unseen, NOTHING, product(m, z.factor))
    base = gl.where(unseen, 0.0, top)
    total, keys = l * shift, shift
    if sinks is not None:
        sink = gl.load(sinks + h).to(gl.float32)
        rules = sink > top
        keys = gl.where(rules, gl.exp2((top - sink) * LOG2E), 1.0) * shift
        own = gl.where(rules, 1.0, gl.exp2((sink - base) * LOG2E))
        base = gl.where(rules, sink, base)
        total = l * keys + own
    empty = total == 0.0
    weight = gl.where(empty, 0.0, keys / gl.where(empty, 1.0, total))
    above = gl.log2(gl.where(empty, 1.0, total))
    gap = gl.where(unseen, 0.0, base - top)
    line = (b * z.heads + h).to(gl.int64) * z.queries + i
    here = i < z.queries
    gl.store(written.lse + line, gl.where(empty, NOTHING, base + above * LN2), mask=here)
    gl.store(written.max_logit + line, gl.where((l == l) | (m == -NOTHING), top, l), mask=here)
    if written.log_total is not None:
        log_total = gl.where(unseen, 0.0, gap + above * LN2)
        gl.store(written.log_total + line, log_total, mask=here)
    if written.entropy is not None:
        over = above + gap * LOG2E + excess
        shifted = gl.convert_layout(gl.sum(shifted, 1), ROWS)
        entropy = weight * (l * over - shifted) * LN2  # 0 · inf with a very large sink
        gl.store(written.entropy + line, gl.where(weight == 0.0, 0.0, entropy), mask=here)
    if written.distance is not None:
        step = gl.arange(0, 8, gl.SliceLayout(0, reach.type.layout)).to(gl.float32)
        reach = gl.convert_layout(gl.sum(reach - step[None, :] * l_parts, 1), ROWS)
        gl.store(written.distance + line, reach * weight, mask=here)
    if written.participation is not None:
        squared = gl.convert_layout(gl.sum(squared, 1), ROWS)
        share = l * l / gl.where(unseen, 1.0, squared)
        gl.store(written.participation + line, share, mask=here)
    return weight
