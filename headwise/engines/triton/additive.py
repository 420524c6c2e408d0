"""Bahdanau's score in a kernel, Σ_d w_d tanh(q_d + k_d), and the forward pass that uses it.

With a = e^{2q} and c = e^{2k}, tanh(q + k) = 1 - 2 / (1 + a c): what is left for a pair and a
dimension is one reciprocal. Two dimensions share it, u/x + w/y = (u y + w x) / (x y), so the
special-function unit, which bounds this score, does half an operation where a tanh would be one.
It is exact to float32's rounding. Where q + k may pass FAR_APART the products could overflow, and a
head is computed from its sums instead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.online import bounds, leave, nothing_yet, take_in
from headwise.engines.triton.tiles import (
    FAR,
    LOG2E,
    LOOSE,
    Sizes,
    kept,
    load_tile,
    logits,
    positions,
    reciprocal,
    row_hash,
    tanh,
)

FAR_APART = tl.constexpr(20.0)  # (1 + e^{2·20})² < 2^127


class Factors(NamedTuple):
    """The additive score's operands, float32, dimensions first and their number even."""

    a: Tensor  # (B, Hq, D, N): e^{2q}
    c: Tensor  # (B, Hkv, D, M): e^{2k}
    weight: Tensor  # (Hq, D)
    size: Tensor  # (B, Hq): no |q + k| of the head is larger


@triton.jit
def spread_rows(ROWS: tl.constexpr):
    """The tile's rows as `scores` spreads them."""
    inner = tl.arange(0, ROWS // 4)[:, None, None, None]
    return tl.arange(0, 4)[None, None, :, None] * (ROWS // 4) + inner


@triton.jit
def spread_keys(KEYS: tl.constexpr):
    """The tile's keys as `scores` spreads them."""
    outer = tl.arange(0, KEYS // 32)[None, :, None, None] * 32
    return outer + tl.arange(0, 32)[None, None, None, :]


@triton.jit
def pair_terms(at_a, at_c, queries, keys):
    """1 + a c for two dimensions, and the reciprocal of their product."""
    x = 1.0 + tl.load(at_a) * tl.load(at_c)
    y = 1.0 + tl.load(at_a + queries) * tl.load(at_c + keys)
    return x, y, reciprocal(x * y)


@triton.jit
def scores(
    q, k, qs, ks, a, c, weight, z, b, h, i0, j0, near, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WIDTH: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Σ_d w_d tanh(q_d + k_d) of the rows from i0 and the keys from j0 on, (ROWS, KEYS).

    a, c and weight are those of the head. `near`: no sum passes FAR_APART. The tile has four axes,
    (rows a thread, keys a thread, warps, lanes), so that a thread holds a square of pairs and loads
    little for each of them; only when it is done is it made a tile of rows and keys.
    """
    i = tl.minimum(i0 + spread_rows(ROWS), z.queries - 1)
    j = tl.minimum(j0 + spread_keys(KEYS), z.keys - 1)
    s = tl.zeros([ROWS // 4, KEYS // 32, 4, 32], tl.float32)
    if near:
        at_a, at_c, total = a + i, c + j, 0.0
        for n in tl.range(0, EVEN // 2):
            u, w = tl.load(weight + 2 * n), tl.load(weight + 2 * n + 1)
            x, y, shared = pair_terms(at_a, at_c, z.queries, z.keys)
            s += (u * y + w * x) * shared
            total += u + w
            at_a += 2 * z.queries
            at_c += 2 * z.keys
        s = total - 2.0 * s
    else:
        line = q + b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1] + i.to(tl.int64) * qs[2]
        column = k + b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1]
        column += j.to(tl.int64) * ks[2]
        for d in tl.range(0, WIDTH):
            pair = tl.load(line + d).to(tl.float32) + tl.load(column + d).to(tl.float32)
            s += tl.load(weight + d) * tanh(pair)
    return s.permute(2, 0, 1, 3).reshape(ROWS, KEYS)


@triton.jit(do_not_specialize=LOOSE)
def additive_forward(
    q, k, v, qs, ks, vs, factors, t, parts,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr,
    VALUES: tl.constexpr, PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One block of ROWS query rows of one head: its sums over the keys it sees, for `merge`."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    block = tl.num_programs(0) - 1 - block  # late rows of a causal mask see most
    heads, kh = tl.num_programs(1), h // group
    i = block * ROWS + tl.arange(0, ROWS)
    there = i < queries
    row = tl.minimum(i, queries - 1)
    position = positions(t, z, b, row)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t.seed, b, h, position)
    a = factors.a + (b * heads + h).to(tl.int64) * queries * EVEN
    c = factors.c + (b * (heads // group) + kh).to(tl.int64) * keys * EVEN
    weight = factors.weight + h * EVEN
    near = tl.load(factors.size + b * heads + h) < FAR_APART  # a NaN is not

    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    sums = nothing_yet(ROWS)
    for piece in tl.static_range(PIECES if PIECES > 0 else 1):
        first, last, lowest, highest = bounds(t, z, piece, b, h, row, PIECES)
        for n in tl.range(0, tl.maximum(tl.cdiv(highest - lowest, KEYS), 0)):
            j0 = lowest + n * KEYS
            j = j0 + tl.arange(0, KEYS)
            s = scores(
                q, k, qs, ks, a, c, weight, z, b, h, block * ROWS, j0, near, ROWS, KEYS, WIDTH,
                EVEN,
            )  # fmt: skip
            s, _ = logits(
                s, t, z, b, h, row[:, None], j[None, :], position[:, None], first[:, None],
                last[:, None], False, CAP, True,
            )  # fmt: skip
            sums, p, shrink = take_in(
                sums, s, LOG2E, position, j0, first_key, KEYS, parts.shifted is not None,
                parts.reach is not None, parts.seen is not None,
            )  # fmt: skip
            if t.seed is not None:
                keep = kept(hashed[:, None], (j + first_key)[None, :], threshold)
                p = tl.where(keep, p * kept_share, 0.0)
            values = load_tile(v, vs, b, kh, j0, highest, KEYS, VALUES, PADDED_VALUES, False)
            used = tl.max((s > 0.5 * FAR).to(tl.int32), 0)  # an unseen key may hold a NaN
            values = tl.where(used[:, None] != 0, values, 0.0).to(values.dtype)
            acc = tl.dot(
                p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION
            )

    line = (b * heads + h).to(tl.int64) * queries + i
    leave(
        parts, sums, acc, LOG2E, line, there, VALUES, PADDED_VALUES, parts.shifted is not None,
        parts.reach is not None, parts.seen is not None,
    )  # fmt: skip
