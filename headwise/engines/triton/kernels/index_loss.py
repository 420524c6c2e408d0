"""The kernels of an indexer's loss: the main heads' weights, summed, beside the indexer's scores.

A program takes a block of rows, or of keys, and meets tiles of the other side one by one. In each
it adds up the weights of all main heads, T, and the indexer's scores, I; neither is stored. The
slope of a row's loss in I is softmax(I) − T / Σ T.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.maps.map_cells import row_totals, rows_of
from headwise.engines.triton.kernels.maps.map_held import weights_at
from headwise.engines.triton.kernels.tile import (
    LN2,
    LOG2E,
    LOOSE,
    NOTHING,
    Sizes,
    interval,
    marked,
    positions,
)


class Scorer(NamedTuple):
    """An indexer's tensors, contiguous."""

    q: Tensor  # (B, Hi, N, Di)
    k: Tensor  # (B, M, Di)
    weights: Tensor  # (B, Hi, N)


class Losses(NamedTuple):
    """The figures of the rows' losses, (B, N) float32 each; `grad` is given to the backward."""

    divergence: Tensor
    mass: Tensor
    index_lse: Tensor
    grad: Tensor | None


@triton.jit
def seen_keys(t, z, heads, b, i, PIECES: tl.constexpr):
    """Return the first key that any head of rows i sees, and the one after the last."""
    begin, end = z.keys * 0, z.keys
    if PIECES > 0:
        begin, end = z.keys, z.keys * 0
        for n in tl.range(0, tl.where(z.interval_head > 0, heads, 1)):
            h = tl.program_id(0) * 0 + n
            for piece in tl.static_range(PIECES):
                first, last = interval(t, z, piece, b, h, i)
                empty = first >= last
                begin = tl.minimum(begin, tl.min(tl.where(empty, z.keys, first), 0))
                end = tl.maximum(end, tl.max(tl.where(empty, 0, last), 0))
    return begin, end


@triton.jit
def any_marked(t, z, b, i, j):
    """Return whether any row of a tile keeps any of its keys; all heads keep the same."""
    here = marked(t, z, b, tl.program_id(1), i[:, None], j[None, :])
    return tl.max(tl.max(here.to(tl.int32), 1), 0) > 0


@triton.jit
def product_of(
    x, tile_k, z, heads, b, h, i, here, WIDE: tl.constexpr, PADDED_WIDE: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return q_h · k of a tile, (rows, keys), the tile of q_h, and the head's weights."""
    line = (b * heads + h).to(tl.int64) * z.queries
    tile = rows_of(x.q, line * WIDE, WIDE, i, here, WIDE, PADDED_WIDE)
    weights = tl.load(x.weights + line + i, mask=here, other=0.0).to(tl.float32)
    return tl.dot(tile, tile_k.T, input_precision=INDEX_PRECISION), tile, weights


@triton.jit
def tile_of(
    q, k, totals, x, qs, ks, t, z, main_heads, index_heads, b, i, here, j,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr,
    CAP: tl.constexpr, WIDE: tl.constexpr, PADDED_WIDE: tl.constexpr,
    INDEX_PRECISION: tl.constexpr,
):  # fmt: skip
    """Return T and I of a tile, (rows, keys), I is −inf where no head sees; and its index keys."""
    position = positions(t, z, b, i)
    target = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    shown = target
    for n in tl.range(0, main_heads):
        h = tl.program_id(0) * 0 + n
        start_q = b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1]
        start_k = b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1]
        tile_q = rows_of(q, start_q, qs[2], i, here, WIDTH, PADDED)
        line = (b * main_heads + h).to(tl.int64) * z.queries + i
        base, rest = row_totals(totals, line, here)
        e, _s = weights_at(
            tile_q, k, start_k, ks[2], t, z, b, h, i, position, base, rest, j, WIDTH, PADDED,
            PRECISION, PIECES, CAP, False,
        )  # fmt: skip
        target += tl.exp2(e)
        shown = tl.maximum(shown, (e > NOTHING).to(tl.float32))
    if t.words is not None:  # all heads keep the same keys
        kept = marked(t, z, b, tl.program_id(1), i[:, None], j[None, :])
        target, shown = tl.where(kept, target, 0.0), tl.where(kept, shown, 0.0)
    tile_k = rows_of(x.k, b.to(tl.int64) * z.keys * WIDE, WIDE, j, j < z.keys, WIDE, PADDED_WIDE)
    scores = tl.zeros([i.shape[0], j.shape[0]], tl.float32)
    for n in tl.range(0, index_heads):
        h = tl.program_id(0) * 0 + n
        found, _tile, weights = product_of(
            x, tile_k, z, index_heads, b, h, i, here, WIDE, PADDED_WIDE, INDEX_PRECISION
        )
        scores += tl.maximum(found, 0.0) * weights[:, None]
    return target, tl.where(shown > 0.0, scores, NOTHING), tile_k


@triton.jit
def slope_of(target, scores, rows, line, here):
    """Return the gradient of the rows' losses in I, (rows, keys)."""
    grad = tl.load(rows.grad + line, mask=here, other=0.0)
    mass = tl.load(rows.mass + line, mask=here, other=0.0)
    lse = tl.load(rows.index_lse + line, mask=here, other=float("inf"))
    share = tl.where(mass == 0.0, 0.0, grad / tl.where(mass == 0.0, 1.0, mass))
    shown = tl.exp2((scores - lse[:, None]) * LOG2E) * grad[:, None]
    return tl.where(scores == NOTHING, 0.0, shown - target * share[:, None])


@triton.jit(do_not_specialize=[*LOOSE, "main_heads", "index_heads"])
def index_rows(
    q, k, totals, x, rows, grad_q, grad_weights, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share, main_heads, index_heads,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    PADDED_WIDE: tl.constexpr, INDEX_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the losses of a block of rows, or with grad_q the gradients of its index queries.

    grad_q (B, Hi, N, Di) and grad_weights (B, Hi, N) are float32, and zero at first: all index
    heads of a block do not fit on chip, so every tile adds to them.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, b = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(2)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < queries
    i = tl.minimum(i, queries - 1)
    line = b.to(tl.int64) * queries + i
    begin, end = seen_keys(t, z, main_heads, b, i, PIECES)
    zero = tl.zeros([ROWS], tl.float32)
    mass, surprise, cross, total, highest = zero, zero, zero, zero, zero + NOTHING
    width = tl.arange(0, PADDED_WIDE)[None, :]
    for n in tl.range(0, tl.maximum(tl.cdiv(end - begin, KEYS), 0)):
        j = begin + n * KEYS + tl.arange(0, KEYS)
        some = n >= 0
        if t.words is not None:
            some = any_marked(t, z, b, i, j)
        if some:
            target, scores, tile_k = tile_of(
                q, k, totals, x, qs, ks, t, z, main_heads, index_heads, b, i, here, j, WIDTH,
                PADDED, PRECISION, PIECES, CAP, WIDE, PADDED_WIDE, INDEX_PRECISION,
            )  # fmt: skip
            if grad_q is None:
                mass += tl.sum(target, 1)
                logs = tl.log2(tl.where(target > 0.0, target, 1.0))
                surprise += tl.sum(target * logs, 1) * LN2
                cross += tl.sum(target * tl.where(scores == NOTHING, 0.0, scores), 1)
                top = tl.maximum(highest, tl.max(scores, 1))
                base = tl.where(top == NOTHING, 0.0, top)
                total = total * tl.exp2((highest - base) * LOG2E)
                total += tl.sum(tl.exp2((scores - base[:, None]) * LOG2E), 1)
                highest = top
            else:
                slope = slope_of(target, scores, rows, line, here)
                for m in tl.range(0, index_heads):
                    h = tl.program_id(0) * 0 + m
                    found, _tile, weights = product_of(
                        x, tile_k, z, index_heads, b, h, i, here, WIDE, PADDED_WIDE, INDEX_PRECISION
                    )
                    each = tl.where(found > 0.0, slope * weights[:, None], 0.0).to(tile_k.dtype)
                    at = (b * index_heads + h).to(tl.int64) * queries + i
                    place = grad_q + at[:, None] * WIDE + width
                    inside = here[:, None] & (width < WIDE)
                    sums = tl.load(place, mask=inside, other=0.0)
                    sums += tl.dot(each, tile_k, input_precision=INDEX_PRECISION)
                    tl.store(place, sums, mask=inside)
                    more = tl.load(grad_weights + at, mask=here, other=0.0)
                    more += tl.sum(tl.maximum(found, 0.0) * slope, 1)
                    tl.store(grad_weights + at, more, mask=here)
                tl.debug_barrier()  # the next tile reads these sums
    if grad_q is None:
        empty = (mass == 0.0) | (total == 0.0)
        safe = tl.where(empty, 1.0, mass)
        lse = tl.where(empty, float("inf"), highest + tl.log2(tl.where(empty, 1.0, total)) * LN2)
        loss = (surprise - cross) / safe - tl.log2(safe) * LN2 + lse
        tl.store(rows.divergence + line, tl.where(empty, 0.0, loss), mask=here)
        tl.store(rows.mass + line, tl.where(empty, 0.0, mass), mask=here)
        tl.store(rows.index_lse + line, lse, mask=here)


@triton.jit(do_not_specialize=[*LOOSE, "main_heads", "index_heads"])
def index_keys(
    q, k, totals, x, rows, grad_k, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share, main_heads, index_heads,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr, WIDE: tl.constexpr,
    PADDED_WIDE: tl.constexpr, INDEX_PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of index keys, (B, M, Di) float32."""
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, b = tl.program_id(0), tl.program_id(2)
    j0 = block * KEYS
    j = j0 + tl.arange(0, KEYS)
    grad = tl.zeros([KEYS, PADDED_WIDE], tl.float32)
    for i0 in tl.range(0, queries, ROWS):
        i = i0 + tl.arange(0, ROWS)
        here = i < queries
        i = tl.minimum(i, queries - 1)
        begin, end = seen_keys(t, z, main_heads, b, i, PIECES)
        some = (begin < j0 + KEYS) & (end > j0)
        if t.words is not None:
            some = some & any_marked(t, z, b, i, j)
        if some:
            line = b.to(tl.int64) * queries + i
            target, scores, tile_k = tile_of(
                q, k, totals, x, qs, ks, t, z, main_heads, index_heads, b, i, here, j, WIDTH,
                PADDED, PRECISION, PIECES, CAP, WIDE, PADDED_WIDE, INDEX_PRECISION,
            )  # fmt: skip
            slope = slope_of(target, scores, rows, line, here)
            for m in tl.range(0, index_heads):
                h = tl.program_id(0) * 0 + m
                found, tile, weights = product_of(
                    x, tile_k, z, index_heads, b, h, i, here, WIDE, PADDED_WIDE, INDEX_PRECISION
                )
                each = tl.where(found > 0.0, slope * weights[:, None], 0.0).to(tile.dtype)
                grad = tl.dot(each.T, tile, grad, input_precision=INDEX_PRECISION)
    width = tl.arange(0, PADDED_WIDE)[None, :]
    place = (b.to(tl.int64) * keys + j)[:, None] * WIDE + width
    tl.store(grad_k + place, grad, mask=(j < keys)[:, None] & (width < WIDE))
