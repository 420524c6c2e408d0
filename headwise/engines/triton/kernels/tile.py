"""Device functions for one tile of the score matrix: loads, softcap, biases, masks, dropout.

Most tiles are (rows, keys); the backward of the keys uses (keys, rows). The functions here take row
and key indices that broadcast, so they serve both.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.cap import capped
from headwise.engines.triton.kernels.interpreter import INTERPRETING

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
GOLDEN = tl.constexpr(0x9E3779B9)
NOTHING = tl.constexpr(float("-inf"))  # the logit of a hidden key
INTERPRETED = tl.constexpr(INTERPRETING)


class Given(NamedTuple):
    """Masks, biases, sinks and dropout seed, as kernels take them. None costs a kernel nothing.

    Strides that may be 1 stand by themselves: Triton 3.6 loses a 1 in a tuple inside of this one.
    """

    intervals: Tensor | None  # (P, 2, B|1, Hq|1, N) int32, contiguous
    dense: Tensor | None  # (B|1, Hq|1, N|1, M|1) as int8
    dense_strides: tuple[int, ...] | None
    bias: Tensor | None
    bias_strides: tuple[int, ...] | None
    position: Tensor | None  # (B|1, N) int32; if None, row i is at i + shift
    slopes: Tensor | None  # (Hq,)
    relative: Tensor | None  # (Hq, 2R + 1)
    sinks: Tensor | None  # (Hq,)
    seed: Tensor | None  # () int64
    origin: Tensor | None  # (2,) int64: the numbers of the first batch entry and head, if not 0
    least: Tensor | None = None  # (B, Hq, N) float32: a row keeps only logits from this one on
    above: Tensor | None = None  # (B, Hq, N) float32: of those below it, keys up to `last`
    last: Tensor | None = None  # (B, Hq, N) int32
    row_batch: int | None = None  # strides of these three
    row_head: int | None = None
    words: Tensor | None = None  # (B|1, Hq|1, N|1, W) int32: a bit for each run that a row keeps
    word_batch: int | None = None  # its strides
    word_head: int | None = None
    word_row: int | None = None
    run: int | None = None  # keys per bit


class Sizes(NamedTuple):
    """The numbers of a call, as device functions take them.

    A kernel takes them one by one, so that LOOSE can exempt them from Triton's specialisation:
    otherwise it would be compiled again when one of them becomes 1 or a multiple of 16.
    """

    queries: int
    keys: int
    group: int  # query heads per key head
    first_key: int
    reach: int  # R of the relative table
    shift: int  # position of row 0, if there is no position tensor
    low: int  # row i sees at most the keys [i + low, i + high)
    high: int
    interval_step: int  # stride from `first` to `last`, and on to the next piece
    interval_batch: int
    interval_head: int
    position_batch: int
    threshold: int  # the smallest hash that dropout keeps
    scale: float
    softcap: float
    kept_share: float  # 1 / (1 - dropout)


LOOSE = [*Sizes._fields]


@triton.jit
def load_tile(
    x, strides, b, h, first, limit, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load rows [first, first + ROWS) of x[b, h], (ROWS, PADDED); zeros outside (limit, WIDTH)."""
    if TMA:
        tile = x.load([b, h, first, 0]).reshape(ROWS, PADDED)
    else:
        start = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
        start += first.to(tl.int64) * strides[2]
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, PADDED)[None, :]
        inside = (row < limit - first) & (column < WIDTH)
        tile = tl.load(start + row * strides[2] + column, mask=inside, other=0.0)
    return tile


@triton.jit
def of_pairs(
    x, strides, tiles, z, b, h, i, j, i0, j0, SHAPE: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Load a bias tensor or dense mask at rows i and keys j, which start at i0 and j0.

    tiles is its TMA descriptor; if None, addresses are computed.
    """
    if tiles is None:
        inside = (i < z.queries) & (j < z.keys)
        tile = tl.load(_entry(x, strides, b, h, i, j), mask=inside, other=0)
    else:
        entry, head = tl.where(strides[0] == 0, 0, b), tl.where(strides[1] == 0, 0, h)
        tile = tiles.load([entry, head, i0, j0])
        if KEYS_FIRST:
            tile = tile.reshape(SHAPE[1], SHAPE[0]).T
        else:
            tile = tile.reshape(SHAPE[0], SHAPE[1])
    return tile


@triton.jit
def of_used(x, used):
    """Return the rows of x whose `used` is 1, and 0 for those whose `used` is 0, even for NaN.

    By bits, not by `where`: before Hopper, Triton 3.9 can't compile booleans that share the layout
    of a product's operand.
    """
    word: tl.constexpr = tl.int32 if x.dtype.primitive_bitwidth == 32 else tl.int16
    kept = (0 - used).to(word)[:, None]  # all bits or none
    return (x.to(word, bitcast=True) & kept).to(x.dtype, bitcast=True)


@triton.jit
def tanh(x):
    """Return tanh x from one exponential and one reciprocal, with an error below 2.5e-7."""
    return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x * (2.0 * LOG2E)))


@triton.jit
def reciprocal(x):
    """Return 1 / x to within a bit, in one instruction; a division takes six."""
    if INTERPRETED:
        found = 1.0 / x
    else:
        found = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def product(x, y):
    """Return x · y rounded to float32; the compiler may not fuse it with a sum that follows."""
    if INTERPRETED:
        found = x * y
    else:
        found = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def bend(
    s, t, z, b, h, i, j, position, CAP: tl.constexpr, i0=0, j0=0, bias=None,
    KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Return cap(scale · s) + bias for rows i and keys j, and the tanh of the cap, if any."""
    bent, factor = s, z.scale
    if CAP:
        bent, factor = capped(s, z.scale / z.softcap, CAP), z.softcap
    # Written so that no sum can be fused or not: every kernel must compute the same logit.
    if t.bias is not None:
        added = of_pairs(t.bias, t.bias_strides, bias, z, b, h, i, j, i0, j0, s.shape, KEYS_FIRST)
        s = tl.fma(bent, factor, added.to(tl.float32))
    else:
        s = product(bent, factor)
    if t.slopes is not None:
        away = tl.abs(position - (j + z.first_key)).to(tl.float32)
        s = tl.fma(-tl.load(t.slopes + h).to(tl.float32), away, s)
    if t.relative is not None:
        index = tl.minimum(tl.maximum(position - (j + z.first_key), -z.reach), z.reach) + z.reach
        s += tl.load(t.relative + h * (2 * z.reach + 1) + index).to(tl.float32)
    return s, bent


@triton.jit
def unit_of(z, PLAIN: tl.constexpr, CAP: tl.constexpr):
    """Return the factor that turns a result of `logits` into a base-2 logit."""
    unit = LOG2E
    if PLAIN:
        unit = (z.softcap if CAP else z.scale) * LOG2E
    return unit


@triton.jit
def logits(
    s, t, z, b, h, i, j, position, first, last,
    PLAIN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, i0=0, j0=0, bias=None,
    dense=None, KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Return the logits of raw scores, NOTHING where a key is hidden, and the tanh of the cap.

    PLAIN scores, without any bias, stay raw, or the tanh of the cap: `unit_of` has their factor.
    MASKED: some rows do not see some keys of the tile. bias, dense: TMA descriptors or None.
    """
    bent = s
    if not PLAIN:
        s, bent = bend(s, t, z, b, h, i, j, position, CAP, i0, j0, bias, KEYS_FIRST)
    elif CAP:
        bent = capped(s, z.scale / z.softcap, CAP)
        s = bent
    if MASKED:
        if t.dense is not None:
            seen = dense_seen(t, z, b, h, i, j, i0, j0, dense, s.shape, KEYS_FIRST)
            s = tl.where(seen, s, NOTHING)
        else:
            # one comparison instead of two: as unsigned, a negative difference is large
            length = tl.maximum(last - first, 0).to(tl.uint32)
            s = tl.where((j - first).to(tl.uint32) < length, s, NOTHING)
    return kept_only(s, t, z, b, h, i, j), bent


@triton.jit
def kept_only(s, t, z, b, h, i, j):
    """Hide logits that are not among those that their row keeps; NaN stays."""
    if t.least is not None:
        line = b.to(tl.int64) * t.row_batch + h.to(tl.int64) * t.row_head
        line += tl.minimum(i, z.queries - 1)
        late = (s < tl.load(t.above + line)) & (j > tl.load(t.last + line))
        s = tl.where((s < tl.load(t.least + line)) | late, NOTHING, s)
    if t.words is not None:
        s = tl.where(marked(t, z, b, h, i, j), s, NOTHING)
    return s


@triton.jit
def marked(t, z, b, h, i, j):
    """Return True where the bit of key j is set for row i."""
    line = b.to(tl.int64) * t.word_batch + h.to(tl.int64) * t.word_head
    line += tl.minimum(i, z.queries - 1).to(tl.int64) * t.word_row
    number = j // t.run
    word = tl.load(t.words + line + (number >> 5), mask=(j >= 0) & (j < z.keys) & (i >= 0), other=0)
    return ((word >> (number & 31)) & 1) != 0


@triton.jit
def row_max(s, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Return the maximum of each row, first across its four quarters, then along the row.

    One reduction would be a single chain of comparisons, each waiting for the one before.
    """
    return tl.max(tl.max(tl.reshape(s, [ROWS, 4, KEYS // 4]), 1), 1)


@triton.jit
def _entry(x, strides, b, h, i, j):
    """Return the address of x[b, h, i, j]; broadcast axes have stride 0."""
    start = x + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]
    return start + i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]


@triton.jit
def dense_seen(
    t, z, b, h, i, j, i0=0, j0=0, dense=None, SHAPE: tl.constexpr = None,
    KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Load the dense mask for rows i and keys j."""
    tile = of_pairs(t.dense, t.dense_strides, dense, z, b, h, i, j, i0, j0, SHAPE, KEYS_FIRST)
    return tile != 0


@triton.jit
def interval(t, z, piece: tl.constexpr, b, h, i):
    """Return each row's keys [first, last) in one piece; rows past the end repeat the last one."""
    row = tl.minimum(i, z.queries - 1)
    first, last = row + z.low, row + z.high
    if t.intervals is not None:
        start = t.intervals + b.to(tl.int64) * z.interval_batch + h.to(tl.int64) * z.interval_head
        start += row + 2 * piece * z.interval_step
        first = tl.maximum(first, tl.load(start))
        last = tl.minimum(last, tl.load(start + z.interval_step))
    first = tl.minimum(tl.maximum(first, 0), z.keys)
    last = tl.minimum(tl.maximum(last, 0), z.keys)
    return first, last


@triton.jit
def positions(t, z, b, i):
    """Return the position of each row i in the sequence of keys."""
    row = tl.minimum(i, z.queries - 1)
    if t.position is not None:
        position = tl.load(t.position + b.to(tl.int64) * z.position_batch + row)
    else:
        position = row + z.shift
    return position


@triton.jit
def mix(x):
    """The mixer of headwise.dropout, on 32-bit words."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def row_hash(t, b, h, position):
    """headwise.dropout.row_hash for the rows at these positions."""
    golden = tl.full([], GOLDEN, tl.uint32)
    whole = tl.load(t.seed)
    if t.origin is not None:
        b = b + tl.load(t.origin)
        h = h + tl.load(t.origin + 1)
    word = mix(whole.to(tl.uint32) ^ mix((whole >> 32).to(tl.uint32)))
    place = mix(word ^ (mix(b.to(tl.uint32) * golden) + h.to(tl.uint32)))
    return mix(place + position.to(tl.uint32) * golden)


@triton.jit
def kept(rows, j, threshold):
    """headwise.dropout.keep for hashed rows and key positions j."""
    return mix(rows ^ (j.to(tl.uint32) * tl.full([], GOLDEN, tl.uint32))) >= threshold
