"""The map kernel: sums or maxima of the numbers in each cell, from q, k and the rows' totals.

The numbers are weights, or with gradients and values the effects of edges.

A program owns a rectangle of cells. Its tile takes a few rows of each of its row cells and a few
keys of each of its key cells, and steps through them. An entry of the tile always belongs to the
same cell, so nothing is summed across a tile before the end. Pooled maps, tiles of a pyramid and
column sums use this one kernel: a column sum is a cell of all rows by one key.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.core.row_sums import HEAVY
from headwise.engines.triton.kernels.tile import (
    LOG2E,
    LOOSE,
    NOTHING,
    Sizes,
    bend,
    dense_seen,
    interval,
    marked,
    positions,
    reciprocal,
)

HEAVIEST = tl.constexpr(HEAVY)


class Totals(NamedTuple):
    """The totals of each row, (B, Hq, N) float32 each, as `headwise.core.row_sums.RowTotals`."""

    base: Tensor  # +inf if the row sees no key, so that its weights are 0
    log_total: Tensor


class Effects(NamedTuple):
    """The rows and values that turn weights into effects, as `maps.effect_totals.EffectTotals`."""

    grad: Tensor  # (B, Hq, N, Dv)
    v: Tensor  # (B, Hkv, M, Dv)
    grad_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    product: Tensor  # (B, Hq, N) float32 each: grad · out
    peak_effect: Tensor


@triton.jit
def edge_of(cell, count, length, width):
    """Return a cell's first position: cells are `width` long, or if 0, evenly divided."""
    even = (cell.to(tl.int64) * length // tl.maximum(count, 1)).to(tl.int32)
    return tl.minimum(tl.where(width > 0, cell * width, even), length)


@triton.jit
def cell_of(place, count, length, width):
    """Return a cell that begins at or before a position, and ends after it or just there."""
    even = (place.to(tl.int64) * count // tl.maximum(length, 1)).to(tl.int32)
    return tl.where(width > 0, place // tl.maximum(width, 1), even)


@triton.jit
def rows_of(x, start, row_step, at, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load x[at], (rows, PADDED); zeros outside."""
    column = tl.arange(0, PADDED)
    address = x + start + at.to(tl.int64)[:, None] * row_step + column[None, :]
    return tl.load(address, mask=inside[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def seen_pairs(t, z, b, h, i, j, PIECES: tl.constexpr, MARKED: tl.constexpr = True):
    """Return True where a row of i (rows, 1) sees a key of j (1, keys).

    MARKED: and keeps it, if rows keep some of their keys.
    """
    seen = (j >= 0) & (i >= 0)
    if t.dense is not None:
        seen = dense_seen(t, z, b, h, i, j)
    if PIECES > 0:
        first, last = interval(t, z, 0, b, h, i)
        seen = (j >= first) & (j < last)
    if PIECES == 2:
        first, last = interval(t, z, 1, b, h, i)
        seen = seen | ((j >= first) & (j < last))
    if MARKED and t.words is not None:
        seen = seen & marked(t, z, b, h, i, j)
    return seen


@triton.jit
def seen_range(t, z, b, h, i, inside, PIECES: tl.constexpr):
    """Return the first key that any of the rows sees, and the one after the last."""
    begin, end = z.keys * 0, z.keys
    if PIECES > 0:
        begin, end = z.keys, z.keys * 0
        for piece in tl.static_range(PIECES):
            first, last = interval(t, z, piece, b, h, i)
            empty = (first >= last) | (inside == 0)
            begin = tl.minimum(begin, tl.min(tl.where(empty, z.keys, first), 0))
            end = tl.maximum(end, tl.max(tl.where(empty, 0, last), 0))
    return begin, end


@triton.jit
def touched(t, z, b, h, i, inside, low, high, PIECES: tl.constexpr):
    """Return whether any row sees any key of [low, high), and whether all rows see all of them."""
    some, whole = high > low, high > low
    if t.dense is not None:
        whole = high < low
    if PIECES > 0:
        first, last = interval(t, z, 0, b, h, i)
        meets = (first < high) & (last > low) & (first < last)
        spans = (first <= low) & (last >= high)
        if PIECES == 2:
            first, last = interval(t, z, 1, b, h, i)
            meets = meets | ((first < high) & (last > low) & (first < last))
            spans = spans | ((first <= low) & (last >= high))
        some = tl.max((meets & inside).to(tl.int32), 0) > 0
        whole = tl.min((spans | (inside == 0)).to(tl.int32), 0) > 0
    return some, whole


@triton.jit
def row_totals(totals, line, here):
    """Load base and log_total, the latter in base 2; rows that are not here have no weights."""
    base = tl.load(totals.base + line, mask=here, other=float("inf"))
    return base, tl.load(totals.log_total + line, mask=here, other=0.0) * LOG2E


@triton.jit
def log_weights(s, base, rest):
    """Return log2 of the weights of logits; a weight is at most 1, despite rounding."""
    below = tl.minimum(s - base[:, None], 0.0, propagate_nan=tl.PropagateNan.ALL)
    return tl.fma(below, LOG2E, -rest[:, None])


@triton.jit
def grads_of(w, b, h, i, inside, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr):
    """Load the gradients of rows i, (rows, PADDED_VALUES)."""
    start = b.to(tl.int64) * w.grad_strides[0] + h.to(tl.int64) * w.grad_strides[1]
    return rows_of(w.grad, start, w.grad_strides[2], i, inside, VALUES, PADDED_VALUES)


@triton.jit
def products(
    w, tile_g, b, kh, at, inside, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return grad · v of the rows and the keys `at`."""
    start = b.to(tl.int64) * w.v_strides[0] + kh.to(tl.int64) * w.v_strides[1]
    tile_v = rows_of(w.v, start, w.v_strides[2], at, inside, VALUES, PADDED_VALUES)
    return tl.dot(tile_g, tile_v.T, input_precision=PRECISION)


@triton.jit
def marks_of(w, line, here):
    """Load what `effects` needs of each row: grad · out, and the effect of its peak."""
    product = tl.load(w.product + line, mask=here, other=0.0)
    return product, tl.load(w.peak_effect + line, mask=here, other=0.0)


@triton.jit
def effects(e, c, marks):
    """Return p/(1 - p) · (grad · out - c) for log2 of p, c = grad · v; a heavy key's is known."""
    product, known = marks
    p = tl.exp2(e)
    x = p * reciprocal(1.0 - p) * (product[:, None] - c)
    return tl.where(p > HEAVIEST, known[:, None], x)


@triton.jit
def weigh(
    acc, tile_q, k, norms, start_k, k_row, start_norms, t, z, b, h, i, totals, position, at, inside,
    w, tile_g, marks, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    PIECES: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr, VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr, VALUE_PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the weights of the rows on the keys `at`, or keep the largest of their logarithms.

    With w, add effects, or keep the one that is furthest from zero.
    """
    tile_k = rows_of(k, start_k, k_row, at, inside, WIDTH, PADDED)
    s = tl.dot(tile_q, tile_k.T, input_precision=PRECISION)
    s, _ = bend(s, t, z, b, h, i[:, None], at[None, :], position[:, None], CAP)
    base, rest = totals
    e = log_weights(s, base, rest)
    if w is not None:
        c = products(w, tile_g, b, h // z.group, at, inside, VALUES, PADDED_VALUES, VALUE_PRECISION)
        x = effects(e, c, marks)
        if MASKED:
            seen = seen_pairs(t, z, b, h, i[:, None], at[None, :], PIECES)
            x = tl.where(seen & inside[None, :] & (base != float("inf"))[:, None], x, 0.0)
        if LARGEST:
            acc = tl.where((tl.abs(x) > tl.abs(acc)) | (x != x), x, acc)
        else:
            acc += x
    elif LARGEST:
        if norms is not None:
            norm = tl.load(norms + start_norms + at, mask=inside, other=0.0)
            e += tl.log2(norm)[None, :]
        if MASKED:
            seen = seen_pairs(t, z, b, h, i[:, None], at[None, :], PIECES)
            seen = seen & inside[None, :] & (base != float("inf"))[:, None]
            e = tl.where(seen, e, NOTHING)
        acc = tl.maximum(acc, e, propagate_nan=tl.PropagateNan.ALL)
    else:
        p = tl.exp2(e)
        if norms is not None:
            p *= tl.load(norms + start_norms + at, mask=inside, other=0.0)[None, :]
        if MASKED:
            seen = seen_pairs(t, z, b, h, i[:, None], at[None, :], PIECES)
            p = tl.where(seen & inside[None, :] & (base != float("inf"))[:, None], p, 0.0)
        acc += p
    return acc


@triton.jit
def put_cells(
    out, acc, line, row, column, row_cells, key_cells, pieces, piece, ROWS: tl.constexpr,
    KEYS: tl.constexpr, ROW_PART: tl.constexpr, KEY_PART: tl.constexpr, LARGEST: tl.constexpr,
    SIGNED: tl.constexpr,
):  # fmt: skip
    """Write the sums or the largest numbers of a tile's cells, of which `row` and `column` start.

    They are a `piece` of the rows of a cell. SIGNED: effects, not logarithms of weights.
    """
    found = tl.reshape(acc, (ROWS // ROW_PART, ROW_PART, KEYS // KEY_PART, KEY_PART))
    if LARGEST:
        lost = tl.max(tl.max((found != found).to(tl.int32), 3), 1)  # a maximum would drop NaN
        highest = tl.max(tl.max(found, 3), 1)
        if SIGNED:
            lowest_of = tl.min(tl.min(found, 3), 1)
            best = tl.where(highest >= -lowest_of, highest, lowest_of)
        else:
            best = tl.exp2(highest)
        found = tl.where(lost > 0, float("nan"), best)
    else:
        found = tl.sum(tl.sum(found, 3), 1)
    row = row + tl.arange(0, ROWS // ROW_PART)
    column = column + tl.arange(0, KEYS // KEY_PART)
    tl.store(
        out + (line + row * pieces + piece)[:, None] * key_cells + column[None, :],
        found,
        mask=(row < row_cells)[:, None] & (column < key_cells)[None, :],
    )


@triton.jit
def sweep(
    acc, none, n0, n1, end, tile_q, k, norms, start_k, k_row, start_norms, t, z, b, h, i, totals,
    position, w, tile_g, marks, out, out_line, out_row, row_cells, key_cells, key_width, key_steps,
    pieces, piece, ROWS: tl.constexpr, KEYS: tl.constexpr, ROW_PART: tl.constexpr,
    KEY_PART: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr,
    PIECES: tl.constexpr, CAP: tl.constexpr, LARGEST: tl.constexpr, VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr, VALUE_PRECISION: tl.constexpr, EVEN: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Go through the tiles [n0, n1) of some rows, and write each cell that is done; `end` ends all.

    EVEN: tiles are neighbouring keys, all of which exist.
    """
    across: tl.constexpr = KEYS // KEY_PART
    for n in tl.range(n0, n1):
        column, step = n // key_steps, n % key_steps
        if EVEN:
            at = n * KEYS + tl.arange(0, KEYS)
            inside = at >= 0
        else:
            key_cell = column * across + tl.arange(0, KEYS) // KEY_PART
            at = edge_of(key_cell, key_cells, z.keys, key_width) + step * KEY_PART
            at += tl.arange(0, KEYS) % KEY_PART
            inside = at < edge_of(key_cell + 1, key_cells, z.keys, key_width)
            at = tl.minimum(at, z.keys - 1)
        acc = weigh(
            acc, tile_q, k, norms, start_k, k_row, start_norms, t, z, b, h, i, totals, position, at,
            inside, w, tile_g, marks, WIDTH, PADDED, PRECISION, PIECES, CAP, LARGEST, VALUES,
            PADDED_VALUES, VALUE_PRECISION, MASKED,
        )  # fmt: skip
        done = (step == key_steps - 1) | (n == end - 1)
        if done:
            put_cells(
                out, acc, out_line, out_row, column * across, row_cells, key_cells, pieces, piece,
                ROWS, KEYS, ROW_PART, KEY_PART, LARGEST, w is not None,
            )  # fmt: skip
        acc = tl.where(done, none, acc)
    return acc


@triton.jit
def clean_tiles(t, z, b, h, i, n0, n1, KEYS: tl.constexpr, PIECES: tl.constexpr):
    """Return the part of the tiles [n0, n1) in which every row sees every key."""
    first, last = n0, n0
    if t.dense is None and t.words is None:
        if PIECES == 0:
            last = n1
        if PIECES == 1:
            seen_first, seen_last = interval(t, z, 0, b, h, i)
            first = tl.minimum(tl.maximum(tl.cdiv(tl.max(seen_first, 0), KEYS), n0), n1)
            last = tl.minimum(tl.maximum(tl.min(seen_last, 0) // KEYS, first), n1)
    return first, last


@triton.jit(do_not_specialize=[
    *LOOSE, "row_cells", "key_cells", "row_width", "key_width", "row_steps", "key_steps",
    "stripes", "norm_batch", "norm_head",
])  # fmt: skip
def cells(
    q, k, norms, totals, w, out, qs, ks, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    row_cells, key_cells, row_width, key_width, row_steps, key_steps, stripes,
    norm_batch, norm_head,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROW_PART: tl.constexpr, KEY_PART: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr, PIECES: tl.constexpr,
    CAP: tl.constexpr, LARGEST: tl.constexpr, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    VALUE_PRECISION: tl.constexpr, STRIPED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute ROWS // ROW_PART row cells by KEYS // KEY_PART key cells; a tile has a PART of each.

    out is (B, Hq, row_cells, key_cells). STRIPED: a tile's rows stay the same; one of `stripes`
    programs takes many tiles beside each other, and cells that no row sees stay 0. If a cell has
    more rows, out is (B, Hq, row_cells · row_steps, key_cells), a line for each part of a cell.
    EVEN: tiles are neighbouring keys, all of which exist.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    across: tl.constexpr = KEYS // KEY_PART
    columns = tl.cdiv(key_cells, across)
    if not STRIPED:
        stripes = columns
    group_of_rows, group_of_keys = tl.program_id(0) // stripes, tl.program_id(0) % stripes
    if PIECES > 0:  # late rows of a causal mask see the most keys
        group_of_rows = tl.num_programs(0) // stripes - 1 - group_of_rows
    pieces, piece = 1, 0
    if STRIPED:
        pieces, piece = row_steps, group_of_rows % row_steps
        group_of_rows = group_of_rows // row_steps
    h, b = tl.program_id(1), tl.program_id(2)
    row_cell = group_of_rows * (ROWS // ROW_PART) + tl.arange(0, ROWS) // ROW_PART
    row_first = edge_of(row_cell, row_cells, queries, row_width)
    row_last = edge_of(row_cell + 1, row_cells, queries, row_width)
    row_offset, key_offset = tl.arange(0, ROWS) % ROW_PART, tl.arange(0, KEYS) % KEY_PART

    kh = h // group
    start_q = b.to(tl.int64) * qs[0] + h.to(tl.int64) * qs[1]
    start_k = b.to(tl.int64) * ks[0] + kh.to(tl.int64) * ks[1]
    start_norms = b.to(tl.int64) * norm_batch + kh.to(tl.int64) * norm_head
    line = (b * tl.num_programs(1) + h).to(tl.int64) * queries
    out_line = (b * tl.num_programs(1) + h).to(tl.int64) * row_cells * pieces
    out_row = group_of_rows * (ROWS // ROW_PART)
    none = tl.zeros([ROWS, KEYS], tl.float32)
    if LARGEST and w is None:
        none += NOTHING
    acc = none
    if STRIPED:
        i = row_first + piece * ROW_PART + row_offset
        here = i < row_last
        i = tl.minimum(i, queries - 1)
        tile_q = rows_of(q, start_q, qs[2], i, here, WIDTH, PADDED)
        sums = row_totals(totals, line + i, here)
        position = positions(t, z, b, i)
        tile_g, marks = tile_q, sums
        if w is not None:
            tile_g = grads_of(w, b, h, i, here, VALUES, PADDED_VALUES)
            marks = marks_of(w, line + i, here)
        begin, end = seen_range(t, z, b, h, i, here, PIECES)
        per_stripe = tl.cdiv(columns, stripes)
        n0 = group_of_keys * per_stripe * key_steps
        n1 = tl.minimum((group_of_keys + 1) * per_stripe, columns) * key_steps
        first = cell_of(begin, key_cells, keys, key_width)
        last = tl.minimum(cell_of(end, key_cells, keys, key_width), key_cells - 1)
        if across == 1:  # a cell's tiles lie in a row: start and end inside of a cell
            ahead = tl.maximum(begin - edge_of(first, key_cells, keys, key_width), 0) // KEYS
            past = tl.maximum(end - edge_of(last, key_cells, keys, key_width), 0)
            n0 = tl.maximum(n0, first * key_steps + ahead)
            n1 = tl.minimum(n1, last * key_steps + tl.cdiv(past, KEYS))
        else:
            n0 = tl.maximum(n0, first // across * key_steps)
            n1 = tl.minimum(n1, (last // across + 1) * key_steps)
        n1 = tl.where(begin < end, n1, n0)
        first, last = n0, n0
        if EVEN:
            first, last = clean_tiles(t, z, b, h, i, n0, n1, KEYS, PIECES)
            acc = sweep(
                acc, none, n0, first, n1, tile_q, k, norms, start_k, ks[2], start_norms, t, z, b, h,
                i, sums, position, w, tile_g, marks, out, out_line, out_row, row_cells, key_cells,
                key_width, key_steps, pieces, piece, ROWS, KEYS, ROW_PART, KEY_PART, WIDTH, PADDED,
                PRECISION, PIECES, CAP, LARGEST, VALUES, PADDED_VALUES, VALUE_PRECISION, EVEN, True,
            )  # fmt: skip
            acc = sweep(
                acc, none, first, last, n1, tile_q, k, norms, start_k, ks[2], start_norms, t, z, b,
                h, i, sums, position, w, tile_g, marks, out, out_line, out_row, row_cells,
                key_cells, key_width, key_steps, pieces, piece, ROWS, KEYS, ROW_PART, KEY_PART,
                WIDTH, PADDED, PRECISION, PIECES, CAP, LARGEST, VALUES, PADDED_VALUES,
                VALUE_PRECISION, EVEN, False,
            )  # fmt: skip
        acc = sweep(
            acc, none, last, n1, n1, tile_q, k, norms, start_k, ks[2], start_norms, t, z, b, h, i,
            sums, position, w, tile_g, marks, out, out_line, out_row, row_cells, key_cells,
            key_width, key_steps, pieces, piece, ROWS, KEYS, ROW_PART, KEY_PART, WIDTH, PADDED,
            PRECISION, PIECES, CAP, LARGEST, VALUES, PADDED_VALUES, VALUE_PRECISION, EVEN, True,
        )  # fmt: skip
    else:
        key_cell = group_of_keys * across + tl.arange(0, KEYS) // KEY_PART
        key_first = edge_of(key_cell, key_cells, keys, key_width)
        key_last = edge_of(key_cell + 1, key_cells, keys, key_width)
        lowest, highest = tl.min(key_first, 0), tl.max(key_last, 0)
        full = tl.min(key_last - key_first, 0) // KEY_PART  # steps: every cell has a whole part
        for row_step in tl.range(0, row_steps):
            i = row_first + row_step * ROW_PART + row_offset
            here = i < row_last
            i = tl.minimum(i, queries - 1)
            some, whole = touched(t, z, b, h, i, here, lowest, highest, PIECES)
            if some:
                tile_q = rows_of(q, start_q, qs[2], i, here, WIDTH, PADDED)
                sums = row_totals(totals, line + i, here)
                position = positions(t, z, b, i)
                tile_g, marks = tile_q, sums
                if w is not None:
                    tile_g = grads_of(w, b, h, i, here, VALUES, PADDED_VALUES)
                    marks = marks_of(w, line + i, here)
                clean = tl.where(whole, tl.minimum(full, key_steps), 0)
                for step in tl.range(0, clean):
                    at = key_first + step * KEY_PART + key_offset
                    acc = weigh(
                        acc, tile_q, k, norms, start_k, ks[2], start_norms, t, z, b, h, i, sums,
                        position, at, at >= 0, w, tile_g, marks, WIDTH, PADDED, PRECISION, PIECES,
                        CAP, LARGEST, VALUES, PADDED_VALUES, VALUE_PRECISION, False,
                    )  # fmt: skip
                for step in tl.range(clean, key_steps):
                    at = key_first + step * KEY_PART + key_offset
                    inside = at < key_last
                    acc = weigh(
                        acc, tile_q, k, norms, start_k, ks[2], start_norms, t, z, b, h, i, sums,
                        position, tl.minimum(at, keys - 1), inside, w, tile_g, marks, WIDTH, PADDED,
                        PRECISION, PIECES, CAP, LARGEST, VALUES, PADDED_VALUES, VALUE_PRECISION,
                        True,
                    )  # fmt: skip
        put_cells(
            out, acc, out_line, out_row, group_of_keys * across, row_cells, key_cells, pieces,
            piece, ROWS, KEYS, ROW_PART, KEY_PART, LARGEST, w is not None,
        )  # fmt: skip
