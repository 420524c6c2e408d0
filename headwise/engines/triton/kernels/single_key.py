"""Statistics outside the loop over keys: weights on single keys, and the norm of the output.

Once a row's totals are known, a weight is one dot product: one short pass over the rows.
"""

# A kernel is Triton's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.grad_small import visible
from headwise.engines.triton.kernels.tile import (
    LOG2E,
    LOOSE,
    NOTHING,
    Sizes,
    bend,
    load_tile,
    positions,
)


class Known(NamedTuple):
    """The forward's results for each row, (B, Hq, N) float32; None if not needed."""

    max_logit: Tensor
    log_total: Tensor | None  # lse - max_logit before rounding
    entropy: Tensor | None


class Single(NamedTuple):
    """The outputs of the kernel, (B, Hq, N) float32 each; None if not requested."""

    top_prob: Tensor | None
    effective_keys: Tensor | None
    sink_mass: Tensor | None
    self_mass: Tensor | None
    previous_mass: Tensor | None
    output_norm: Tensor | None


@triton.jit
def power(s, base, log_total):
    """Return exp((s - base) - log_total), at most 1 despite rounding.

    Whole powers of two are split off first: a weight of 1e-20 is as precise as one near 1.
    """
    x = (s - base) - log_total
    x = tl.where(x < -200.0, -200.0, x)  # keeps NaN, which a maximum would drop
    whole = tl.floor(tl.fma(x, LOG2E, 0.5))
    rest = tl.fma(whole, 2.12194440e-4, tl.fma(whole, -0.693359375, x))  # ln 2 in two parts
    found = tl.exp2(whole) * tl.exp2(rest * LOG2E)
    return tl.where(found > 1.0, 1.0, found)


@triton.jit
def weight_on(
    column, rows, k, ks, t, z, b, h, i, position, base, log_total,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Return the weight of each row on the key `column`, 0 if the call has no such key."""
    seen = visible(t, z, b, h, i, column, i, PIECES)
    wide = tl.arange(0, PADDED)[None, :]
    start = k + b.to(tl.int64) * ks[0] + (h // z.group).to(tl.int64) * ks[1]
    keys = tl.load(
        start + column.to(tl.int64)[:, None] * ks[2] + wide,
        mask=seen[:, None] & (wide < WIDTH),
        other=0.0,
    )
    s = tl.sum(rows * keys.to(tl.float32), 1)
    s, _ = bend(s, t, z, b, h, i, tl.minimum(tl.maximum(column, 0), z.keys - 1), position, CAP)
    return tl.where(seen & (s != NOTHING), power(s, base, log_total), 0.0)


@triton.jit
def put_masses(
    found, line, here, starts, start_strides, first, sink_keys, rows, k, ks, t, z, b, h, i,
    position, base, log_total,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PIECES: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Store the weights on a row's own key, on the one before it, and on the sequence's first."""
    own = position - z.first_key
    if found.self_mass is not None:
        weight = weight_on(
            own, rows, k, ks, t, z, b, h, i, position, base, log_total, WIDTH, PADDED, PIECES, CAP,
        )  # fmt: skip
        tl.store(found.self_mass + line, weight, mask=here)
    if found.previous_mass is not None:
        weight = weight_on(
            own - 1, rows, k, ks, t, z, b, h, i, position, base, log_total, WIDTH, PADDED, PIECES,
            CAP,
        )  # fmt: skip
        tl.store(found.previous_mass + line, weight, mask=here)
    if found.sink_mass is not None:
        at = tl.zeros([ROWS], tl.int32) + first
        if starts is not None:
            place = starts + b.to(tl.int64) * start_strides[0] + h * start_strides[1]
            at = tl.load(place + tl.minimum(i, z.queries - 1) * start_strides[2])
        total = tl.zeros([ROWS], tl.float32)
        for step in tl.range(0, sink_keys):
            total += weight_on(
                at + step, rows, k, ks, t, z, b, h, i, position, base, log_total, WIDTH, PADDED,
                PIECES, CAP,
            )  # fmt: skip
        tl.store(found.sink_mass + line, total, mask=here)


_STRIDES = ["q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row"]


@triton.jit(do_not_specialize=[*LOOSE, *_STRIDES, "first", "sink_keys"])
def single(
    q, k, out, q_batch, q_head, q_row, k_batch, k_head, k_row, t,
    queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
    interval_head, position_batch, threshold, scale, softcap, kept_share,
    known, found, starts, start_strides, first, sink_keys,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, VALUES: tl.constexpr, PADDED: tl.constexpr,
    PADDED_VALUES: tl.constexpr, PIECES: tl.constexpr, CAP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Compute ROWS query rows of one head, whose sequence starts at key `first` or `starts`.

    Strides are in multiples of UNIT, so that the compiler can use wide loads.
    """
    qs = (q_batch * UNIT, q_head * UNIT, q_row * UNIT)
    ks = (k_batch * UNIT, k_head * UNIT, k_row * UNIT)
    z = Sizes(
        queries, keys, group, first_key, reach, shift, low, high, interval_step, interval_batch,
        interval_head, position_batch, threshold, scale, softcap, kept_share,
    )  # fmt: skip
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i = block * ROWS + tl.arange(0, ROWS)
    here = i < z.queries
    line = (b * tl.num_programs(1) + h).to(tl.int64) * z.queries + i
    position = positions(t, z, b, i)
    top = tl.load(known.max_logit + line, mask=here, other=0.0)
    base = tl.where(top == NOTHING, -NOTHING, top)  # a row that sees no key has no weight
    log_total = base
    if known.log_total is not None:
        log_total = tl.load(known.log_total + line, mask=here, other=0.0)
    if found.top_prob is not None:
        tl.store(found.top_prob + line, power(top, base, log_total), mask=here)
    if found.effective_keys is not None:
        entropy = tl.load(known.entropy + line, mask=here, other=0.0)
        tl.store(found.effective_keys + line, tl.exp(entropy), mask=here)
    if found.output_norm is not None:
        wide = tl.arange(0, PADDED_VALUES)[None, :]
        inside = here[:, None] & (wide < VALUES)
        values = tl.load(out + line[:, None] * VALUES + wide, mask=inside, other=0.0)
        squares = values.to(tl.float32) * values.to(tl.float32)
        tl.store(found.output_norm + line, tl.sqrt(tl.sum(squares, 1)), mask=here)
    if (
        (found.sink_mass is not None)
        or (found.self_mass is not None)
        or (found.previous_mass is not None)
    ):
        rows = load_tile(q, qs, b, h, block * ROWS, z.queries, ROWS, WIDTH, PADDED, False)
        rows = rows.to(tl.float32)
        put_masses(
            found, line, here, starts, start_strides, first, sink_keys, rows, k, ks, t, z, b, h, i,
            position, base, log_total, ROWS, WIDTH, PADDED, PIECES, CAP,
        )  # fmt: skip
