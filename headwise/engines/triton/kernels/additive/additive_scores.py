"""Bahdanau's score of a tile, Σ_d w_d tanh(q_d + k_d).

With the powers from `powers`, each dimension of a pair adds the reciprocal of one sum. Four
dimensions share one reciprocal, by 1/x + 1/y = (x + y) / (x y) twice. So a dimension takes a
quarter of a special-function operation where a tanh takes one, and four dimensions take 13
instructions. It is exact up to float32 rounding. Tiles whose products could overflow use tanh.

A tile is spread over five axes: (rows per thread, keys per thread, warps, lanes along the rows,
lanes along the keys). So a thread holds a rectangle of pairs and loads little for each pair, and
the maximum or sum of a row takes few exchanges between threads.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.additive.powers import NEAR
from headwise.engines.triton.kernels.tile import INTERPRETED, reciprocal, tanh

ROW_LANES = tl.constexpr(4)  # of a warp's 32 lanes; the others lie along the keys
KEY_LANES = tl.constexpr(8)


@triton.jit
def spread_rows(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the rows of a tile, spread: (rows per thread, 1, warps, lanes, 1)."""
    COUNT: tl.constexpr = ROWS // (WARPS * ROW_LANES)
    place = tl.arange(0, WARPS)[:, None] * ROW_LANES + tl.arange(0, ROW_LANES)[None, :]
    rows = tl.arange(0, COUNT)[:, None, None] + place[None, :, :] * COUNT
    return rows[:, None, :, :, None]


@triton.jit
def spread_keys(KEYS: tl.constexpr):
    """Return the keys of a tile, spread: (1, keys per thread, 1, 1, lanes)."""
    keys = tl.arange(0, KEYS // KEY_LANES)[:, None] * KEY_LANES + tl.arange(0, KEY_LANES)[None, :]
    return keys[None, :, None, None, :]


@triton.jit
def as_tile(x, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Gather a spread tile into (ROWS, KEYS)."""
    return x.permute(2, 3, 0, 1, 4).reshape(ROWS, KEYS)


@triton.jit
def as_rows(x, ROWS: tl.constexpr):
    """Gather one number per row, (rows per thread, warps, lanes), into (ROWS,)."""
    return x.permute(1, 2, 0).reshape(ROWS)


@triton.jit
def four(at):
    """Load four consecutive numbers from each address, on a GPU in one instruction."""
    if INTERPRETED:
        found = tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        found = tl.inline_asm_elementwise(
            "ld.global.nc.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [at],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    return found


@triton.jit
def near_scores(a, c, inverse, ROWS: tl.constexpr, KEYS: tl.constexpr, WARPS: tl.constexpr,
                FOURS: tl.constexpr):  # fmt: skip
    """Return Σ_d 1 / (1/w_d + (a_d / w_d) c_d) of a block of rows and one of keys, spread."""
    at_a, at_c = a + spread_rows(ROWS, WARPS) * 4, c + spread_keys(KEYS) * 4
    total = tl.zeros(
        [ROWS // (WARPS * ROW_LANES), KEYS // KEY_LANES, WARPS, ROW_LANES, KEY_LANES], tl.float32
    )
    for _ in tl.range(0, FOURS // 4):
        a0, a1, a2, a3 = four(at_a)
        c0, c1, c2, c3 = four(at_c)
        x, y = tl.load(inverse) + a0 * c0, tl.load(inverse + 1) + a1 * c1
        z, t = tl.load(inverse + 2) + a2 * c2, tl.load(inverse + 3) + a3 * c3
        one, two = x * y, z * t
        total += ((x + y) * two + (z + t) * one) * reciprocal(one * two)
        at_a += 4 * ROWS
        at_c += 4 * KEYS
        inverse += 4
    return total


@triton.jit
def far_scores(q, k, qs, ks, weight, z, b, h, i0, j0, ROWS: tl.constexpr, KEYS: tl.constexpr,
               WARPS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """Return Σ_d w_d tanh(q_d + k_d) of the rows from i0 and the keys from j0 on, spread."""
    i = tl.minimum(i0 + spread_rows(ROWS, WARPS), z.queries - 1).to(tl.int64)
    j = tl.minimum(j0 + spread_keys(KEYS), z.keys - 1).to(tl.int64)
    line = q + b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1] + i * qs[2]
    column = k + b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1] + j * ks[2]
    weight += h * WIDTH
    total = tl.zeros(
        [ROWS // (WARPS * ROW_LANES), KEYS // KEY_LANES, WARPS, ROW_LANES, KEY_LANES], tl.float32
    )
    for d in tl.range(0, WIDTH):
        pair = tl.load(line + d).to(tl.float32) + tl.load(column + d).to(tl.float32)
        total += tl.load(weight + d).to(tl.float32) * tanh(pair)
    return total


@triton.jit
def scores(
    q, k, qs, ks, weight, powers, z, b, h, heads, block, key_block, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WARPS: tl.constexpr, WIDTH: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block of rows and a block of keys of a head, spread."""
    key_head = b * (heads // z.group) + h // z.group
    row_place = (b * heads + h) * tl.cdiv(z.queries, ROWS) + block
    key_place = key_head * tl.cdiv(z.keys, KEYS) + key_block
    reach = tl.load(powers.row_reach + 2 * row_place) + tl.load(powers.key_reach + 2 * key_place)
    if reach < NEAR:
        s = near_scores(
            powers.a + row_place.to(tl.int64) * (ROWS * FOURS),
            powers.c + key_place.to(tl.int64) * (KEYS * FOURS), powers.inverse + h * FOURS,
            ROWS, KEYS, WARPS, FOURS,
        )  # fmt: skip
        s = tl.load(powers.scale + 2 * h) - tl.load(powers.scale + 2 * h + 1) * s
    else:
        s = far_scores(
            q, k, qs, ks, weight, z, b, h, block * ROWS, key_block * KEYS, ROWS, KEYS, WARPS, WIDTH,
        )  # fmt: skip
    return s
