"""A call of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headwise.core.problem import Terms
from headwise.core.row_sums import MOMENTS, RowResults
from headwise.engines.operators import Operators
from headwise.engines.triton.host.attention_call import differentiate, once
from headwise.engines.triton.host.backward_choice import ahead
from headwise.engines.triton.host.forward_call import NO_MOMENTS
from headwise.engines.triton.host.hopper_tiles import tiles
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.moments_call import cut_of, run_moments
from headwise.engines.triton.host.operands import (
    WORD,
    Steps,
    exposed,
    on,
    operands,
    outer_strides,
)
from headwise.engines.triton.kernels.extents import FIELDS, item_blocks
from headwise.engines.triton.kernels.hopper_forward import EVERYWHERE, REGISTERS, forward
from headwise.engines.triton.kernels.hopper_items import HopperMask, HopperSizes
from headwise.engines.triton.kernels.hopper_loads import EIGHT
from headwise.engines.triton.kernels.hopper_softmax import numbers_of_cap
from headwise.engines.triton.limits import LIBRARY_ON

LOG2E = 1.4426950408889634
GROUP = 64  # rows of an item per consumer warpgroup
LEAST_BLOCKS = 16  # of rows: with fewer, the table takes longer than it saves
LEAST_KEYS = 96  # per head dimension: with fewer, the loop over keys takes moments faster


@dataclass(frozen=True)
class HopperTile:
    """The keys of a tile, the pipeline stages, the consumer warpgroups.

    `direct`: the output is not written through shared memory, which has no room for it.
    """

    keys: int
    stages: int
    groups: int = 2
    direct: bool = False


TILES = {  # by the padded widths of queries and of values
    (64, 64): HopperTile(128, 3),
    (64, 128): HopperTile(128, 2),
    (64, 256): HopperTile(64, 2),
    (128, 64): HopperTile(128, 2),
    (128, 128): HopperTile(128, 2),
    (128, 256): HopperTile(64, 2),
    (192, 64): HopperTile(128, 2),
    (192, 128): HopperTile(128, 2, direct=True),
    (192, 256): HopperTile(64, 2, direct=True),
    (256, 64): HopperTile(64, 2),
    (256, 128): HopperTile(64, 2),
    (256, 256): HopperTile(64, 2, direct=True),
}


def widths(q: Tensor, v: Tensor) -> tuple[int, int]:
    """Return the padded widths of queries and values."""
    query = next(width for width in (64, 128, 192, 256) if q.shape[-1] <= width)
    return query, next(width for width in (64, 128, 256) if v.shape[-1] <= width)


def run_hopper_forward(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int
) -> RowResults:
    """Return the output and the results that `wants` names."""
    found = launches.empty_results(q, v, wants)
    if found.lse.numel() == 0:
        return found
    valued = v.shape[-1] > 0
    call = operands(q, k, v if valued else k, terms)
    lines = q.shape[0] * q.shape[1]
    z, (width, value_width) = call.sizes, widths(q, v)
    shape = TILES[width, value_width]
    rows = GROUP * shape.groups
    blocks = -(-q.shape[2] // rows)
    items = blocks * lines
    programs = min(items, multiprocessors(q.device))
    exposing = exposed(q, k, terms)
    pieces = 0 if terms.intervals is None else terms.intervals.shape[0]
    if not pieces and (exposing or (items > programs and _uneven(q, terms, blocks))):
        pieces = 1
    cut = cut_of(call, LEAST_KEYS) if wants & MOMENTS else None
    cut = None if cut is None or cut.block % shape.keys else cut
    banded = terms.band is not None and len(terms.band) == 3
    block = 0 if not wants & MOMENTS else EVERYWHERE.value
    written, rest = found.rows(), None
    if cut is not None:  # kernels that visit no pairs take the moments of whole blocks of keys
        block, written = 0, found.rows(**NO_MOMENTS)
        if banded:
            block, rest = cut.block, found.lse.new_empty(2, *found.lse.shape)
            launches.allocated(rest)
            written = written._replace(logit_mean=rest[0], logit_var=rest[1])
    kept = call.v if valued else None
    table, strides, entries, heads = None, (0, 0), 1, 1
    if pieces:
        if terms.intervals is not None:
            entries, heads = terms.intervals.shape[2:4]
        count = entries * heads * blocks * pieces + 1
        table = q.new_empty(count * FIELDS.value, dtype=torch.int32)
        launches.allocated(table)
        strides = (heads * blocks if entries > 1 else 0, blocks if heads > 1 else 0)
    factor = z.softcap or z.scale
    batch, head, row = outer_strides(call.v)
    steps = batch // EIGHT.value, head // EIGHT.value, row // EIGHT.value
    sizes = HopperSizes(
        z.queries, z.keys, q.shape[1], z.group, v.shape[-1], z.low, z.high, z.shift - z.first_key,
        items, *strides, z.interval_step, z.interval_batch, z.interval_head, z.position_batch,
        *steps, factor, factor * LOG2E,
        numbers_of_cap(z.scale / z.softcap) if z.softcap else None,
    )  # fmt: skip
    cleaned = kept if exposing else None
    mask = HopperMask(call.given.intervals, call.given.position, table, cleaned)
    first = min(width, 128) if width == 192 else width
    q_, q_rest = _parts(call.q, call.steps[0], GROUP, first, width - first)
    k_, k_rest = _parts(call.k, call.steps[1], shape.keys, first, width - first)
    v_, out = None, None
    if kept is not None:
        v_ = tiles(kept, call.steps[2], shape.keys, value_width)
        out = found.out
        if not shape.direct:
            out = tiles(out, list(out.stride()), GROUP, value_width)
    simple = max(steps) < WORD
    with on(q.device):
        if table is not None:
            launches.start(
                item_blocks, (blocks, heads, entries), kind_of(call, ()),
                (call.given, *z, table, blocks), 4, 1, ROWS=rows,
                PADDED=1 << (rows - 1).bit_length(), KEYS=shape.keys, PIECES=pieces,
            )  # fmt: skip
        launches.start(
            forward, (programs, 1, 1),
            kind_of(call, (), wants, width, value_width, shape, sizes.cap is None, valued, exposing)
            if simple else None,
            (q_, k_, v_, q_rest, k_rest, out, written, call.given.sinks, mask, *sizes),
            4, 1, GROUPS=shape.groups, STAGES=shape.stages, BANDED=banded, PIECES=pieces,
            BLOCK=block, DIRECT=shape.direct or not valued, maxnreg=REGISTERS[shape.groups],
        )  # fmt: skip
        if cut is not None:
            run_moments(launches, call, call.flags(), cut, rest, rows, found)
    return found


FORWARD = Operators("hopper", once(run_hopper_forward), differentiate, LIBRARY_ON, ahead)


def _uneven(q: Tensor, terms: Terms, blocks: int) -> bool:
    """Return whether blocks of rows differ so much that each program should take the next one.

    Programs that take a fixed share of a causal mask can end at very different times.
    """
    if terms.band is None or len(terms.band) < 3 or blocks < LEAST_BLOCKS:
        return False
    return 4 * (terms.band[2] - terms.band[1]) > q.shape[2]


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: the kernel runs one program on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _parts(
    x: Tensor, steps: Steps, rows: int, first: int, rest: int
) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Return TMA descriptors of the first part of a head, and of the rest if there is one."""
    return tiles(x, steps, rows, first), tiles(x, steps, rows, rest) if rest else None
