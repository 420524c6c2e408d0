"""The forward kernel: output and statistics of a block of rows in one pass over the keys it sees.

The online softmax is `headwise.partial.merge` written out for a tile. Statistics that were not
asked for are None and leave no trace in the compiled kernel. Scores are kept in base 2 (`unit`
turns a score into one), because the exponential of the hardware is 2^x.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.tiles import (
    LN2,
    LOG2E,
    NOTHING,
    bend,
    dense_seen,
    extent,
    interval,
    kept,
    load_tile,
    positions,
    row_hash,
)


class Written(NamedTuple):
    """Where the kernel writes, (B, Hq, N) float32 each; None: not asked for."""

    lse: Tensor
    max_logit: Tensor
    entropy: Tensor | None
    distance: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    visible: Tensor | None


@triton.jit
def absorb(
    state, q, k, v, ks, vs, t, z, written, b, h, i, j0, first, last, position, hashed,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    PLAIN: tl.constexpr, CAP: tl.constexpr, FAST: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Merge the keys [j0, j0 + KEYS) into the rows' state; MASKED: not all rows see all of them."""
    acc, l, m, shifted, reach, count, mean, spread = state
    kh = h // z.group
    j = j0 + tl.arange(0, KEYS)
    tile = load_tile(k, ks, b, kh, j0, z.keys, KEYS, WIDTH, PADDED, TMA)
    s = tl.dot(q, tile.T, input_precision=PRECISION)
    unit = z.scale * LOG2E
    if not PLAIN:
        s, _ = bend(s, t, z, b, h, i[:, None], j[None, :], position[:, None], CAP, FAST)
        unit = LOG2E
    HIDES: tl.constexpr = MASKED or t.bias is not None  # a bias may hold -inf
    if MASKED:
        if t.dense is not None:
            seen = dense_seen(t, z, b, h, i[:, None], j[None, :])
        else:
            seen = (j[None, :] >= first[:, None]) & (j[None, :] < last[:, None])
        s = tl.where(seen, s, NOTHING)
    new = tl.maximum(m, tl.max(s, 1) * unit)
    base = tl.where(new == NOTHING, 0.0, new) if HIDES else new
    e = s * unit - base[:, None]
    p = tl.exp2(e)
    shrink = tl.exp2(m - base)
    total = tl.sum(p, 1)
    if written.entropy is not None:
        moved = tl.where(m == NOTHING, 0.0, m - base)
        if HIDES:
            e = tl.where(s == NOTHING, 0.0, e)
        shifted = (shifted + l * moved) * shrink + tl.sum(p * e, 1)
    if written.distance is not None:
        # From the block's first key, so that small distances stay exact.
        steps = tl.sum(p * tl.arange(0, KEYS).to(tl.float32)[None, :], 1)
        away = (position - (j0 + z.first_key)).to(tl.float32)
        reach = reach * shrink + (away * total - steps)
    if written.mean is not None:
        if HIDES:
            found = tl.sum((s != NOTHING).to(tl.float32), 1)
            here = tl.sum(tl.where(s == NOTHING, 0.0, s), 1) / tl.maximum(found, 1.0)
            off = tl.where(s == NOTHING, 0.0, s - here[:, None])
        else:
            found = tl.full(m.shape, KEYS, tl.float32)
            here = tl.sum(s, 1) * (1.0 / KEYS)
            off = s - here[:, None]
        share = found / tl.maximum(count + found, 1.0)
        gap = here - mean
        spread += tl.sum(off * off, 1) + gap * gap * count * share
        mean += gap * share
        count += found
    l = l * shrink + total
    if t.seed is not None:
        p = tl.where(kept(hashed[:, None], (j + z.first_key)[None, :], z.threshold), p, 0.0)
    values = load_tile(v, vs, b, kh, j0, z.keys, KEYS, VALUES, PADDED_VALUES, TMA)
    if MASKED and (t.intervals is not None or t.dense is not None):
        # A weight of zero does not silence a NaN, and a key that no row sees may hold one.
        used = tl.max(seen.to(tl.int32), 0)
        values = tl.where(used[:, None] != 0, values, 0.0).to(values.dtype)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, l, new, shifted, reach, count, mean, spread


@triton.jit(do_not_specialize=["z"])
def forward(
    q, k, v, qs, ks, vs, t, z, out, written,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, PLAIN: tl.constexpr, CAP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One block of ROWS query rows of one head of one batch entry."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PIECES > 0:  # late rows of a causal mask see most: they start first
        block = tl.num_programs(0) - 1 - block
    i = block * ROWS + tl.arange(0, ROWS)
    position = positions(t, z, b, i)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t.seed, b, h, position)

    # Which blocks of keys there are: of the first interval, then of the second.
    first = tl.zeros([ROWS], tl.int32)
    last = first + z.keys
    if PIECES > 0:
        first, last = interval(t, z, 0, b, h, i)
    low, blocks, inner, outer = extent(first, last, z.keys, KEYS)
    if t.dense is not None:
        inner, outer = blocks, blocks
    edges = inner + blocks - outer
    more_edges, more_first, more_last = 0, first, last
    low2, inner2, outer2 = low, inner, inner
    if PIECES == 2:
        more_first, more_last = interval(t, z, 1, b, h, i)
        low2, blocks2, inner2, outer2 = extent(more_first, more_last, z.keys, KEYS)
        more_edges = inner2 + blocks2 - outer2

    queries = load_tile(q, qs, b, h, block * ROWS, z.queries, ROWS, WIDTH, PADDED, TMA)
    zero = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    state = (acc, zero, zero + NOTHING, zero, zero, zero, zero, zero)
    for n in tl.range(0, edges + more_edges):
        number = tl.where(n < inner, n, n - inner + outer)
        j0 = low + number * KEYS
        now_first, now_last = first, last
        if PIECES == 2:
            late = n - edges
            number = tl.where(late < inner2, late, late - inner2 + outer2)
            j0 = tl.where(n < edges, j0, low2 + number * KEYS)
            now_first = tl.where(n < edges, first, more_first)
            now_last = tl.where(n < edges, last, more_last)
        state = absorb(
            state, queries, k, v, ks, vs, t, z, written, b, h, i, j0, now_first, now_last,
            position, hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA, PRECISION,
            PLAIN, CAP, FAST, True,
        )  # fmt: skip
    for n in tl.range(0, outer - inner + outer2 - inner2):
        j0 = low + (inner + n) * KEYS
        if PIECES == 2:
            late = n - (outer - inner)
            j0 = tl.where(late < 0, j0, low2 + (inner2 + late) * KEYS)
        state = absorb(
            state, queries, k, v, ks, vs, t, z, written, b, h, i, j0, first, last,
            position, hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA, PRECISION,
            PLAIN, CAP, FAST, False,
        )  # fmt: skip

    acc, l, m, shifted, reach, count, mean, spread = state
    base = tl.where(m == NOTHING, 0.0, m)
    total = l
    if t.sinks is not None:
        sink = tl.load(t.sinks + h).to(tl.float32) * LOG2E
        base = tl.maximum(m, sink)
        base = tl.where(base == NOTHING, 0.0, base)
        total = l * tl.exp2(m - base) + tl.exp2(sink - base)
    empty = total == 0.0
    weight = tl.where(empty, 0.0, tl.exp2(m - base) / tl.where(empty, 1.0, total))
    above = tl.log2(tl.where(empty, 1.0, total))
    line = (b * tl.num_programs(1) + h).to(tl.int64) * z.queries
    here = i < z.queries
    width = tl.arange(0, PADDED_VALUES)
    share = weight * z.kept_share
    tl.store(
        out + (line + i)[:, None] * VALUES + width[None, :],
        (acc * share[:, None]).to(out.dtype.element_ty),
        mask=here[:, None] & (width < VALUES)[None, :],
    )
    tl.store(written.lse + line + i, tl.where(empty, NOTHING, (base + above) * LN2), mask=here)
    tl.store(written.max_logit + line + i, m * LN2, mask=here)
    if written.entropy is not None:
        over = tl.where(m == NOTHING, 0.0, above + base - m)
        tl.store(written.entropy + line + i, weight * (l * over - shifted) * LN2, mask=here)
    if written.distance is not None:
        tl.store(written.distance + line + i, reach * weight, mask=here)
    if written.mean is not None:
        one = z.scale if PLAIN else 1.0
        tl.store(written.mean + line + i, mean * one, mask=here)
        spread = spread / tl.maximum(count, 1.0) * (one * one)
        tl.store(written.variance + line + i, spread, mask=here)
        tl.store(written.visible + line + i, count, mask=here)
