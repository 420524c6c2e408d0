"""The forward kernel: output and statistics of a block of rows in one pass over the keys it sees.

The online softmax is `headwise.core.partial.merge` written out for a tile. Statistics that were not
requested are None and cost nothing. `unit` turns scores into base 2, because the hardware's
exponential is 2^x.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.extents import edge_of, met, middle_of
from headwise.engines.triton.kernels.online import beside_sink, saw_nothing
from headwise.engines.triton.kernels.tile import (
    FAR,
    LN2,
    LOOSE,
    NOTHING,
    Sizes,
    kept,
    load_tile,
    logits,
    of_used,
    positions,
    row_hash,
    row_max,
    unit_of,
)


class Written(NamedTuple):
    """The outputs of the kernel, (B, Hq, N) float32 each; None if not requested."""

    lse: Tensor
    max_logit: Tensor
    entropy: Tensor | None
    distance: Tensor | None
    mean: Tensor | None
    variance: Tensor | None
    visible: Tensor | None


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
    acc, l, m, shifted, reach, count, mean, spread = state
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
    new = tl.maximum(m, row_max(s, i.shape[0], KEYS) * unit)
    # For a row that has seen no key, FAR - FAR must not be computed: in a fused multiply-add the
    # product is not rounded as `new` was, and the difference can be as large as 1e23.
    base = tl.where(new < unit * (0.5 * FAR), 0.0, new)
    e = s * unit - base[:, None]
    p = tl.exp2(e)
    shrink = tl.exp2(m - new)
    total = tl.sum(p, 1)
    if written.entropy is not None:
        moved = tl.where(m == NOTHING, 0.0, m - new)
        shifted = (shifted + l * moved) * shrink + tl.sum(p * e, 1)
    if written.distance is not None:
        # Counted from the block's first key, so that small distances stay exact.
        steps = tl.sum(p * tl.arange(0, KEYS).to(tl.float32)[None, :], 1)
        away = (position - (j0 + z.first_key)).to(tl.float32)
        reach = reach * shrink + (away * total - steps)
    if written.mean is not None and not APART:
        # About the running maximum, which is at most √n deviations from the mean.
        found = tl.full(m.shape, KEYS, tl.float32)
        if MASKED or t.bias is not None:
            there = (s <= 0.5 * FAR) == 0  # NaN counts as visible
            found = tl.sum(there.to(tl.float32), 1)
            e = tl.where(there, e, 0.0)
        off = tl.sum(e, 1) / tl.maximum(found, 1.0)
        here = tl.where(found == 0.0, 0.0, new + off)
        share = found / tl.maximum(count + found, 1.0)
        gap = here - mean
        squares = tl.sum(e * e, 1)
        about = tl.where(squares == float("inf"), squares, squares - found * off * off)
        spread += about + gap * gap * count * share
        mean += gap * share
        count += found
    l = l * shrink + total
    if t.seed is not None:
        p = tl.where(kept(hashed[:, None], (j + z.first_key)[None, :], z.threshold), p, 0.0)
    values = load_tile(v, vs, b, kh, j0, z.keys, KEYS, VALUES, PADDED_VALUES, TMA)
    if CLEAN:
        # A hidden key may hold NaN, and 0 · NaN is NaN.
        used = tl.max((s > 0.5 * FAR).to(tl.int32), 0)
        values = of_used(values, used)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION)
    return acc, l, new, shifted, reach, count, mean, spread


@triton.jit
def write(
    state, t, z, out, written, b, h, i, VALUES: tl.constexpr, PADDED_VALUES: tl.constexpr,
    PLAIN: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise the rows' sums, with the sink, and write the requested outputs."""
    acc, l, m, shifted, reach, count, mean, spread = state
    unseen = saw_nothing(l, m, unit_of(z, PLAIN, CAP))
    l, m = tl.where(unseen, 0.0, l), tl.where(unseen, NOTHING, m)
    base, top, sink = beside_sink(m, t.sinks, h)
    total = l * tl.exp2(m - base) + sink
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
    tl.store(written.lse + line + i, tl.where(empty, NOTHING, top + above * LN2), mask=here)
    tl.store(
        written.max_logit + line + i, tl.where((l == l) | (m == -NOTHING), m * LN2, l), mask=here
    )
    if written.entropy is not None:
        over = tl.where(m == NOTHING, 0.0, above + (base - m))
        entropy = weight * (l * over - shifted) * LN2
        # With a very large sink this is 0 · inf.
        tl.store(written.entropy + line + i, tl.where(weight == 0.0, 0.0, entropy), mask=here)
    if written.distance is not None:
        tl.store(written.distance + line + i, reach * weight, mask=here)
    if written.mean is not None:
        tl.store(written.mean + line + i, mean * LN2, mask=here)
        if BLOCK == 0:
            spread = spread / tl.maximum(count, 1.0)
        spread = tl.maximum(spread, 0.0) * (LN2 * LN2)
        tl.store(written.variance + line + i, spread, mask=here)
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
        hashed = row_hash(t.seed, b, h, position)

    # Starts before the rows' bounds, on which it does not depend.
    rows = load_tile(q, qs, b, h, i0, z.queries, ROWS, WIDTH, PADDED, TMA)
    one, two, dirty, counts = met(t, z, b, h, i, KEYS, PIECES)
    edges, all_edges, middle, all_middle = counts
    zero = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_VALUES], tl.float32)
    state = (acc, zero, zero + NOTHING, zero, zero, zero, zero, zero)
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
