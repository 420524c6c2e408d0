"""A call of the Hopper backward: row numbers, one kernel for all products, gradients of queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headwise.core.problem import Terms
from headwise.engines.gradients import BackwardInputs, Gradients, sink_share
from headwise.engines.triton.host.hopper_tiles import flat, tiles
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.operands import (
    WORD,
    Operands,
    leaves_keys,
    loadable,
    on,
    operands,
    outer_strides,
    pad,
    stride_unit,
)
from headwise.engines.triton.kernels.hopper_backward import (
    KEYS,
    REGISTERS,
    BackwardMask,
    BackwardSizes,
    backward,
)
from headwise.engines.triton.kernels.hopper_rows import (
    PART,
    STEP,
    finish_queries,
    key_visits,
    prepare_rows,
    row_bounds,
)
from headwise.engines.triton.kernels.hopper_softmax import GROUP, numbers_of_cap

NARROWEST = 64  # padded width of heads
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
TOGETHER = 24 << 20  # bytes of the heads that programs work on at once, so that they stay in L2


Start = Callable[..., None]


@dataclass(frozen=True)
class BackwardShape:
    """Pipeline stages of rows, and buffers of the gradients of logits."""

    stages: int
    halves: int


SHAPES = {64: BackwardShape(2, 2), 128: BackwardShape(2, 2)}  # by the padded width of heads


def differentiate_hopper(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    """Return the gradients of every input from those of out, lse and entropy."""
    with on(q.device):
        return _differentiated(q, k, v, terms, given)


def _differentiated(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    start = Launches().start
    call = operands(q, k, v, terms)
    grad_out, grad_steps = loadable(given.grad_out.to(q.dtype))
    batch, heads, queries, wide = q.shape
    width = max(pad(q), NARROWEST)
    rows = STEP.value // width
    blocks = -(-queries // rows)
    kinds = 4 if given.grad_entropy is None else 5
    numbers = q.new_empty(kinds, batch, heads, blocks * rows, dtype=torch.float32)
    sums = q.new_empty(batch * heads * blocks * STEP.value // 256, 256, dtype=torch.float32)
    counts, careful = (q.new_empty(batch * heads * blocks, dtype=torch.int32) for _ in range(2))
    a, c = (x if x.stride(-1) == 1 else x.contiguous() for x in (grad_out, given.out))
    strides = (*outer_strides(a), *outer_strides(c))
    unit = stride_unit(strides, 8)
    totals = given.totals
    loaded = (a, c, totals.base, totals.log_total)
    aligned = all(x.data_ptr() % 16 == 0 for x in loaded) and max(strides) < WORD
    start(
        prepare_rows, (blocks, heads, batch), (a.dtype, c.dtype) if aligned else None,
        (a, c, *(stride // unit for stride in strides), totals.base, totals.log_total, numbers,
        careful, sums, counts, queries), 4, 1,
        ROWS=rows, WIDTH=a.shape[-1], PADDED=width, UNIT=unit,
    )  # fmt: skip
    share = sink_share(terms.sinks, totals)
    _, grad_sinks = given.row_constants(numbers[1, ..., :queries], share)
    if given.grad_entropy is not None:
        numbers[4, ..., queries:] = 0
        torch.mul(given.grad_entropy, -LN2, out=numbers[4, ..., :queries])
    mask, bounds, pieces, mask_strides = _tables(start, call, rows, blocks)
    z = call.sizes
    key_heads, keys = k.shape[1:3]
    key_blocks, lines = -(-keys // KEYS.value), batch * key_heads
    bytes_of_line = z.group * queries * width * 8
    factor = z.softcap or z.scale
    sizes = BackwardSizes(
        queries, keys, key_heads, z.group, z.low, z.high, blocks * rows, lines,
        max(1, min(lines, TOGETHER // bytes_of_line)), key_blocks, *mask_strides, factor,
        factor * LOG2E, z.scale, numbers_of_cap(z.scale / z.softcap) if z.softcap else None,
    )  # fmt: skip
    grad_k, grad_v = k.new_empty(k.shape), v.new_empty(v.shape)
    side, shape = GROUP.value, SHAPES[width]
    arguments = (
        tiles(call.q, call.steps[0], rows, width), tiles(grad_out, grad_steps, rows, width),
        tiles(call.k, call.steps[1], side, width), tiles(call.v, call.steps[2], side, width),
        flat(numbers.view(-1), [rows]), bounds, careful, flat(sums, [16, 256]), counts,
        *(tiles(x, list(x.stride()), side, width) for x in (grad_k, grad_v)), mask,
    )  # fmt: skip
    start(
        backward, (lines * key_blocks, 1, 1), kind_of(call, (), width, sizes.cap is None),
        (*arguments, *sizes), 4, 1, STAGES=shape.stages, HALVES=shape.halves, KINDS=kinds,
        ORDERED=torch.are_deterministic_algorithms_enabled(), PIECES=pieces, maxnreg=REGISTERS,
    )  # fmt: skip
    grad_q = q.new_empty(q.shape)
    start(
        finish_queries, (blocks * STEP.value // PART.value, heads, batch), (q.dtype,),
        (sums, grad_q, queries, z.scale), 4, 1, WIDTH=wide, ROWS=rows,
    )  # fmt: skip
    return Gradients(grad_q, grad_k, grad_v, None, None, None, None, grad_sinks)


def _tables(
    start: Start, call: Operands, rows: int, blocks: int
) -> tuple[BackwardMask, TensorDescriptor | None, int, tuple[int, int]]:
    """Return a mask's tables, the bounds of rows, its intervals per row, and the heads' strides.

    A band needs none, unless there are keys that no row sees, which may hold anything.
    """
    terms, intervals = call.terms, call.given.intervals
    bare = intervals is None and (terms.band is None or not leaves_keys(call.q, call.k, terms.band))
    if bare:
        return BackwardMask(), None, 0, (0, 0)
    pieces, entries, heads = 1, 1, 1
    if intervals is not None:
        pieces, _, entries, heads, _ = intervals.shape
    key_blocks = -(-call.k.shape[2] // KEYS.value)

    def table(*shape: int) -> Tensor:
        return call.q.new_empty(entries, heads, *shape, dtype=torch.int32)

    bounds, seen = table(pieces, 2, blocks * rows), table(pieces, 4, blocks)
    visits, unseen = table(key_blocks, pieces, 4), table(key_blocks * KEYS.value)
    start(
        row_bounds, (blocks, heads, entries), kind_of(call, ()),
        (call.given, *call.sizes, bounds, seen, blocks), 4, 1, ROWS=rows, PIECES=pieces,
    )  # fmt: skip
    start(
        key_visits, (key_blocks, heads, entries), (),
        (bounds, seen, visits, unseen, call.k.shape[2], blocks), 4, 1,
        ROWS=rows, KEYS=KEYS.value, PIECES=pieces,
    )  # fmt: skip
    strides = heads if entries > 1 else 0, 1 if heads > 1 else 0
    return BackwardMask(seen, visits, unseen), flat(bounds.view(-1), [rows]), pieces, strides
