"""The forward kernel: output and statistics of a block of rows in one pass over the keys it sees.

The online softmax is `headwise.core.partial.merge` written out for a tile. Statistics that were not
requested are None and cost nothing; so are values and output, for statistics alone.

The hardware's exponential is 2^x. For logits with a bias the exponent is (s - max) · log2 e, exact
for any size of the logits. PLAIN scores take one instruction less, s · unit - base, where base is
unit · max rounded (`base_of`); rows end with a correction for that rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headwise.engines.triton.kernels.extents import edge_of, met, middle_of
from headwise.engines.triton.kernels.online import (
    add_moments,
    add_sums,
    beside_sink,
    nothing_yet,
    put_sums,
)
from headwise.engines.triton.kernels.tile import (
    LOG2E,
    LOOSE,
    NOTHING,
    Sizes,
    kept,
    load_tile,
    logits,
    of_used,
    positions,
    product,
    row_hash,
    row_max,
    unit_of,
)

HUGE = tl.constexpr(2.0**28)  # base-2 logits from which float32 steps by 32: only ties share weight


@triton.jit
def base_of(m, unit):
    """Return the unit of a row, and unit · m rounded, where m is its largest score so far.

    From HUGE on the rounding would exceed the range of 2^x, so such rows take the next power of two
    as their unit, which rounds nothing. The base never decreases while m grows.
    """
    m = tl.where(m == NOTHING, 0.0, m)
    whole = tl.exp2(tl.ceil(tl.log2(unit) + 0.01))
    unit = tl.where(tl.abs(m) * unit < HUGE, unit, whole)
    return unit, product(m, unit)


@triton.jit
def absorb(
    state, q, tensors, t, z, written, b, h, i0, j0, first, last, position, hashed,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    PLAIN: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
    APART: tl.constexpr = False,
):  # fmt: skip
    """Merge the keys [j0, j0 + KEYS) into the rows' state.

    MASKED: some rows do not see some of them. CLEAN: some may be hidden from every row of the call.
    APART: another kernel takes their moments.
    """
    acc, rows = state
    l, m, sums, moments = rows
    k, v, ks, vs, bias, dense = tensors
    kh = h // z.group
    i, j = i0 + tl.arange(0, q.shape[0]), j0 + tl.arange(0, KEYS)
    tile = load_tile(k, ks, b, kh, j0, z.keys, KEYS, WIDTH, PADDED, TMA)
    s = tl.dot(q, tile.T, input_precision=PRECISION)
    s, _ = logits(
        s, t, z, b, h, i[:, None], j[None, :], position[:, None], first[:, None], last[:, None],
        PLAIN, CAP, MASKED, i0, j0, bias, dense,
    )  # fmt: skip
    unit = unit_of(z, PLAIN, CAP)
    new = tl.maximum(m, row_max(s, i.shape[0], KEYS))
    if PLAIN:
        row_unit, base = base_of(new, unit)
        e = tl.fma(s, row_unit[:, None], -base[:, None])
        _, before = base_of(m, unit)
        moved = tl.where(m == NOTHING, NOTHING, before - base)
    else:
        row_unit = tl.full(m.shape, LOG2E, tl.float32)
        base = tl.where(new == NOTHING, 0.0, new)
        e = (s - base[:, None]) * LOG2E
        moved = (m - base) * LOG2E
    p = tl.exp2(e)
    shrink = tl.exp2(moved)
    total = tl.sum(p, 1)
    sums = add_sums(
        sums, written, l, total, p, e, moved, shrink, position, j0, z.first_key, KEYS,
        PLAIN and not MASKED,
    )  # fmt: skip
    if written.logit_mean is not None and not APART:
        # About the running maximum, which is at most √n deviations from the mean.
        found = tl.full(m.shape, KEYS, tl.float32)
        if MASKED or t.bias is not None or t.least is not None or t.words is not None:
            there = s != NOTHING
            found = tl.sum(there.to(tl.float32), 1)
            e = tl.where(there, e, 0.0)
        off = tl.sum(e, 1) / (tl.maximum(found, 1.0) * row_unit)
        squares = tl.sum(e * e, 1) / (row_unit * row_unit)
        count, mean, spread = moments
        moments = add_moments(count, mean, spread, found, new, off, squares)
    l = l * shrink + total
    if v is not None:
        if t.seed is not None:
            p = tl.where(kept(hashed[:, None], (j + z.first_key)[None, :], z.threshold), p, 0.0)
        values = load_tile(v, vs, b, kh, j0, z.keys, KEYS, VALUES, PADDED_VALUES, TMA)
        if CLEAN:
            # A hidden key may hold NaN, and 0 · NaN is NaN.
            used = tl.max((s != NOTHING).to(tl.int32), 0)
            values = of_used(values, used)
        acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, (l, new, sums, moments)


@triton.jit
def write(
    state, t, z, out, written, b, h, i, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PLAIN: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise the rows' sums, with the sink, and write the requested outputs."""
    acc, rows = state
    l, m, sums, moments = rows
    factor, top, excess = 1.0, m, 0.0
    if PLAIN:
        factor = z.softcap if CAP else z.scale
        unit, base = base_of(m, unit_of(z, PLAIN, CAP))
        excess = tl.where(m == NOTHING, 0.0, tl.fma(m, unit, -base))  # of the largest exponent
        top = product(m, factor)
    shift = tl.exp2(-excess)
    weight, over, lse, log_total = beside_sink(top, l * shift, t.sinks, h)
    weight, over = weight * shift, over + excess
    line = (b * tl.num_programs(1) + h).to(tl.int64) * z.queries
    here = i < z.queries
    if out is not None:
        width = tl.arange(0, PADDED_VALUES)
        share = weight * z.kept_share
        tl.store(
            out + (line + i)[:, None] * VALUES + width[None, :],
            (acc * share[:, None]).to(out.dtype.element_ty),
            mask=here[:, None] & (width < VALUES)[None, :],
        )
    tl.store(written.lse + line + i, lse, mask=here)
    tl.store(written.max_logit + line + i, tl.where((l == l) | (m == -NOTHING), top, l), mask=here)
    if written.log_total is not None:
        tl.store(written.log_total + line + i, log_total, mask=here)
    put_sums(written, sums, l, weight, over, line + i, here)
    if written.logit_mean is not None:
        count, mean, spread = moments
        tl.store(written.logit_mean + line + i, mean * factor, mask=here)
        if BLOCK == 0:
            spread = spread / tl.maximum(count, 1.0)
        spread = tl.maximum(spread, 0.0) * (factor * factor)
        tl.store(written.logit_var + line + i, spread, mask=here)
        tl.store(written.visible + line + i, count, mask=here)


@triton.jit(do_not_specialize=LOOSE)
def forward(
    q, k, v, qs, ks, vs, bias, dense, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    out, written,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr,
    PADDED: tl.constexpr, PADDED_VALUES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, PLAIN: tl.constexpr, CAP: tl.constexpr,
    CLEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one block of ROWS query rows of one head of one batch entry.

    bias, dense: TMA descriptors or None. If BLOCK is not 0, moments cover only the keys past the
    last whole BLOCK that all of these rows see, and the variance stays a sum of squares:
    `row_moments` joins those of the other keys.
    """
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if PIECES > 0:  # late rows of a causal mask see the most keys: they start first
        block = tl.num_programs(0) - 1 - block
    i0 = block * ROWS
    i = i0 + tl.arange(0, ROWS)
    tensors = (k, v, ks, vs, bias, dense)
    position = positions(t, z, b, i)
    hashed = position
    if t.seed is not None:
        hashed = row_hash(t, b, h, position)

    # Starts before the rows' bounds, on which it does not depend.
    rows = load_tile(q, qs, b, h, i0, z.queries, ROWS, WIDTH, PADDED, TMA)
    one, two, dirty, counts = met(t, z, b, h, i, KEYS, PIECES)
    edges, all_edges, middle, all_middle = counts
    zero = tl.zeros([ROWS], tl.float32)
    acc = zero
    if v is not None:
        acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    state = (acc, nothing_yet(zero))
    # Separate loops: unmasked middle blocks, and edges without cleaning, save more time than one
    # pipelined loop over all blocks would.
    cleaned = 0
    if CLEAN:
        cleaned = tl.where(dirty, all_edges, 0)
        for n in tl.range(0, cleaned):
            j0, now_first, now_last = edge_of(n, one, two, edges, KEYS, PIECES)
            state = absorb(
                state, rows, tensors, t, z, written, b, h, i0, j0, now_first, now_last, position,
                hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA, PRECISION, PLAIN, CAP,
                True, True,
            )  # fmt: skip
    for n in tl.range(cleaned, all_edges):
        j0, now_first, now_last = edge_of(n, one, two, edges, KEYS, PIECES)
        state = absorb(
            state, rows, tensors, t, z, written, b, h, i0, j0, now_first, now_last, position,
            hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA, PRECISION, PLAIN, CAP, True,
            False,
        )  # fmt: skip
    whole = 0
    if BLOCK > 0:
        whole = tl.minimum(one[6] * KEYS // BLOCK * (BLOCK // KEYS), middle)
    for n in tl.range(whole, all_middle):
        j0 = middle_of(n, one, two, middle, KEYS, PIECES)
        state = absorb(
            state, rows, tensors, t, z, written, b, h, i0, j0, position, position, position, hashed,
            KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA, PRECISION, PLAIN, CAP, False, False,
        )  # fmt: skip
    if BLOCK > 0:
        for n in tl.range(0, whole):
            state = absorb(
                state, rows, tensors, t, z, written, b, h, i0, one[2] + n * KEYS, position,
                position, position, hashed, KEYS, WIDTH, VALUES, PADDED, PADDED_VALUES, TMA,
                PRECISION, PLAIN, CAP, False, False, True,
            )  # fmt: skip

    write(state, t, z, out, written, b, h, i, VALUES, PADDED_VALUES, PLAIN, CAP, BLOCK)
