"""A call of the Hopper forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import MOMENTS, RowResults
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.operators import Operators
from headwise.engines.triton.host.attention_call import differentiate, once
from headwise.engines.triton.host.forward_call import NO_MOMENTS, run_forward
from headwise.engines.triton.host.hopper_backward_call import differentiate_hopper, serves
from headwise.engines.triton.host.hopper_tiles import tiles
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.moments_call import cut_of, run_moments
from headwise.engines.triton.host.operands import on, operands, pad, pieces
from headwise.engines.triton.kernels.hopper_forward import REGISTERS, HopperSizes, forward
from headwise.engines.triton.kernels.hopper_softmax import numbers_of_cap
from headwise.engines.triton.limits import LIBRARY_ON

LOG2E = 1.4426950408889634
ROWS = 128  # per work item: 64 for each of two warpgroups
LEAST_KEYS = 8  # per head dimension: with fewer, the Triton loop takes moments as fast


@dataclass(frozen=True)
class HopperTile:
    """The keys of a tile, and the pipeline stages."""

    keys: int
    stages: int


TILES = {64: HopperTile(128, 3), 128: HopperTile(128, 2)}  # by the padded width of heads


def run_hopper_forward(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int
) -> RowResults:
    """Return the output and the results that `wants` names."""
    valued = v.shape[-1] > 0
    call = operands(q, k, v if valued else k, terms)
    cut = cut_of(call, LEAST_KEYS) if wants & MOMENTS else None
    if wants & MOMENTS and cut is None:  # few keys, or a cap: the Triton loop takes moments
        return run_forward(launches, q, k, v, terms, wants)
    found = launches.empty_results(q, v, wants)
    if found.lse.numel() == 0:
        return found
    z, width = call.sizes, pad(q)
    shape = TILES[width]
    q_, k_, v_ = (
        tiles(x, steps, rows, width)
        for x, steps, rows in zip(
            (call.q, call.k, call.v), call.steps, (ROWS // 2, shape.keys, shape.keys), strict=True
        )
    )
    out = tiles(found.out, list(found.out.stride()), ROWS // 2, width) if valued else None
    banded = pieces(terms) == 1
    block = 0 if cut is None or not banded else cut.block
    rest = found.lse.new_empty(2, *found.lse.shape) if block else None
    written = found.rows(**NO_MOMENTS)
    if rest is not None:
        launches.allocated(rest)
        written = written._replace(logit_mean=rest[0], logit_var=rest[1])
    items = -(-q.shape[2] // ROWS) * q.shape[1] * q.shape[0]
    factor = z.softcap or z.scale
    sizes = HopperSizes(
        z.queries, z.keys, q.shape[1], z.group, z.low, z.high, z.shift - z.first_key, items,
        factor, factor * LOG2E, numbers_of_cap(z.scale / z.softcap) if z.softcap else None,
    )  # fmt: skip
    with on(q.device):
        launches.start(
            forward, (min(items, multiprocessors(q.device)), 1, 1),
            kind_of(call, (), wants, width, sizes.cap is None, valued),
            (q_, k_, v_ if valued else None, out, written, call.given.sinks, *sizes),
            4, 1, STAGES=shape.stages, BANDED=banded, BLOCK=block, maxnreg=REGISTERS,
        )  # fmt: skip
        if cut is not None:
            run_moments(launches, call, call.flags(), cut, rest, ROWS, found)
    return found


def differentiate_by_hopper(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    """Return the gradients of every input, from the Hopper kernel where it serves."""
    kernels = differentiate_hopper if serves(q, k, v, terms, given) else differentiate
    return kernels(q, k, v, terms, given)


FORWARD = Operators("hopper", once(run_hopper_forward), differentiate_by_hopper, LIBRARY_ON)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors: the kernel runs one program on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count
