"""The inputs of the additive kernels, e^{2q} and e^{2k} instead of q and k, from one short kernel.

With a = e^{2q} and c = e^{2k}, tanh(q + k) = 1 - 2 / (1 + a c). The weight w of a dimension is
folded in, w / (1 + a c) = 1 / (1/w + (a/w) c), so that each dimension of a pair adds the reciprocal
of one sum.

Weights are first divided by the largest of their head. One below 2^-24 is less than the rounding
of the score: its dimension, like those that pad the width to a multiple of four, adds 2^-24 to
every pair, which is subtracted again.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import LOG2E, load_tile

FAINT = tl.constexpr(2.0**-24)  # relative to the largest weight
STEEP = tl.constexpr(40.0)  # |x| above which e^{2x} is out of range for products in float32
NEVER = tl.constexpr(1e9)  # the reach of blocks that must not be computed from powers
NEAR = tl.constexpr(120.0)  # if the reaches of rows and keys sum to less, products stay below 2^126


class Powers(NamedTuple):
    """Float32 each. Dimensions come in fours, (…, D / 4, rows of a block, 4), for vector loads."""

    a: Tensor  # (B, Hq, blocks, D / 4, ROWS, 4): e^{2q} / w
    c: Tensor  # (B, Hkv, blocks, D / 4, KEYS, 4): e^{2k}
    inverse: Tensor  # (Hq, D): 1 / w
    scale: Tensor  # (Hq, 2): a score is the first number - the second · Σ reciprocals
    row_reach: Tensor  # (B, Hq, blocks, 2): a block's largest log2 of a product of four, and |q|
    key_reach: Tensor  # (B, Hkv, blocks, 2)
    rows: Tensor | None  # (B, Hq, N, D): e^{2q}, as the gradients take it
    keys: Tensor | None  # (B, Hkv, M, D)


@triton.jit
def power(x):
    """Return e^{2x} for |x| < 40, by range reduction, so that the error does not grow with x."""
    whole = tl.floor(x * (2.0 * LOG2E) + 0.5)
    rest = (2.0 * x - whole * 0.693359375) + whole * 2.12194440e-4  # together ln 2
    return tl.exp2(rest * LOG2E) * tl.exp2(whole)


@triton.jit
def leave_powers(
    to, reach, plain, x, inverse, bits, line, rows, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    FOURS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write e^{2x} · inverse of a block x (ROWS, PADDED), its reach, and e^{2x} itself to `plain`.

    bits is the weight's part of the reach. A block with NaN gets the reach NEVER. It has `rows`
    rows, the first of which is row `line` of `plain`.
    """
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, PADDED)[None, :]
    x = x.to(tl.float32)
    usable = tl.abs(x) < STEEP
    found = power(tl.where(usable, x, 0.0))
    at = to + (column // 4) * (4 * ROWS) + row * 4 + column % 4
    tl.store(at, found * inverse, mask=(column < FOURS) & (row >= 0))
    if plain is not None:
        at = plain + (line + row) * WIDTH + column
        tl.store(at, found, mask=(column < WIDTH) & (row < rows))
    bits = tl.where(usable, tl.maximum(x * (2.0 * LOG2E), 0.0) + bits, NEVER)
    bits = tl.where(column < FOURS, bits, 0.0)
    tl.store(reach, tl.max(tl.sum(bits.reshape(ROWS * PADDED // 4, 4), 1), 0))
    tl.store(reach + 1, tl.max(tl.max(tl.where(usable, tl.abs(x), NEVER), 1), 0))


@triton.jit
def leave_weight(powers, weight, h, first, WIDTH: tl.constexpr, FOURS: tl.constexpr,
                 PADDED: tl.constexpr):  # fmt: skip
    """Return the factors of a head's powers, and log2 of 1 / w, (PADDED,) each.

    The first program of the head also writes 1 / w itself.
    """
    column = tl.arange(0, PADDED)
    w = tl.load(weight + h * WIDTH + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(w), 0)
    w = w / tl.maximum(largest, 1e-30)
    faint = tl.abs(w) < FAINT
    inverse = 1.0 / tl.where(faint, FAINT, w)
    if first:
        tl.store(powers.inverse + h * FOURS + column, inverse, mask=column < FOURS)
        total = tl.sum(tl.where(column < FOURS, tl.where(faint, 2.0 * FAINT, w), 0.0), 0)
        tl.store(powers.scale + 2 * h, largest * total)
        tl.store(powers.scale + 2 * h + 1, largest * 2.0)
    return tl.where(faint, 0.0, inverse), tl.log2(tl.abs(inverse))


@triton.jit(do_not_specialize=["queries", "keys", "heads", "key_heads"])
def prepare(
    q, k, qs, ks, weight, powers, queries, keys, heads, key_heads,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FOURS: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """Write the powers of one block of queries or, after all of those, one block of keys."""
    number, b = tl.program_id(0), tl.program_id(1)
    blocks, key_blocks = tl.cdiv(queries, ROWS), tl.cdiv(keys, KEYS)
    if number < blocks * heads:
        h, block = number // blocks, number % blocks
        inverse, bits = leave_weight(
            powers, weight, h, (block == 0) & (b == 0), WIDTH, FOURS, PADDED,
        )  # fmt: skip
        place = (b * heads + h) * blocks + block
        leave_powers(
            powers.a + place.to(tl.int64) * (ROWS * FOURS), powers.row_reach + 2 * place,
            powers.rows,
            load_tile(q, qs, b, h, block * ROWS, queries, ROWS, WIDTH, PADDED, False),
            inverse[None, :], bits[None, :], (b * heads + h).to(tl.int64) * queries + block * ROWS,
            queries - block * ROWS, ROWS, WIDTH, FOURS, PADDED,
        )  # fmt: skip
    else:
        number -= blocks * heads
        h, block = number // key_blocks, number % key_blocks
        place = (b * key_heads + h) * key_blocks + block
        leave_powers(
            powers.c + place.to(tl.int64) * (KEYS * FOURS), powers.key_reach + 2 * place,
            powers.keys,
            load_tile(k, ks, b, h, block * KEYS, keys, KEYS, WIDTH, PADDED, False),
            1.0, 0.0, (b * key_heads + h).to(tl.int64) * keys + block * KEYS, keys - block * KEYS,
            KEYS, WIDTH, FOURS, PADDED,
        )  # fmt: skip
