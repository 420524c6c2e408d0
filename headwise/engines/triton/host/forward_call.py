"""A call of the forward kernel."""

from __future__ import annotations

from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import MOMENTS, RowResults
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.moments_call import cut_of, run_moments
from headwise.engines.triton.host.operands import (
    described,
    exposed,
    narrow,
    on,
    operands,
    outer_strides,
    pair_tiles,
)
from headwise.engines.triton.host.tile_shapes import Shape, fit, loads_pairs
from headwise.engines.triton.host.tile_shapes import shape as shape_of
from headwise.engines.triton.kernels.forward import forward
from headwise.engines.triton.kernels.kept_runs import Marks
from headwise.engines.triton.kernels.maps.map_held import Bounds

NO_MOMENTS: dict[str, None] = dict.fromkeys(("logit_mean", "logit_var", "visible"))
FEW_ROWS = 64  # those of sampled statistics: more rows per tile would be computed for nothing


def run_forward(
    launches: Launches,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    wants: int,
    largest: Bounds | None = None,
    marks: Marks | None = None,
) -> RowResults:
    """Return the output and the results that `wants` names, perhaps over some keys only."""
    found = launches.empty_results(q, v, wants)
    if found.lse.numel() == 0:
        return found
    valued = v.shape[-1] > 0  # if not, no values are loaded: the keys only stand in for them
    call = operands(q, k, v if valued else k, terms, largest, marks)
    flags = call.flags()
    wide = max(flags["PADDED"], flags["PADDED_VALUES"])
    kernel = "capped" if terms.softcap else "forward"
    rows = shape_of(kernel, wide, q.itemsize, card(q.device)).rows
    if narrow(terms) or q.shape[2] <= FEW_ROWS < rows:
        kernel = "narrow"
    if loads_pairs(call.given):
        kernel = "biased"
    written = found.rows()
    cut = cut_of(call) if wants & MOMENTS else None
    rest, block = None, 0  # for moments of the keys past the last whole block
    if cut is not None and flags["PIECES"] == 0:
        written, wants = found.rows(**NO_MOMENTS), wants - MOMENTS
    elif cut is not None:
        rest, block = found.lse.new_empty(2, *found.lse.shape), cut.block
        launches.allocated(rest)
        written = found.rows(logit_mean=rest[0], logit_var=rest[1])
    tensors, kind = (call.q, call.k, call.v), kind_of(call, (), wants, valued)
    clean = exposed(q, k, terms)

    def launch(shape: Shape) -> None:
        tma, (q_, k_, v_) = described(tensors, call.steps, (shape.rows, shape.keys, shape.keys))
        strides = (None,) * 3 if tma else tuple(map(outer_strides, tensors))
        v_, out = (v_, found.out) if valued else (None, None)
        launches.start(
            forward, (-(-q.shape[2] // shape.rows), q.shape[1], q.shape[0]), kind,
            (q_, k_, v_, *strides, *pair_tiles(call, shape.rows, shape.keys), call.given,
            *call.sizes, out, written), shape.warps,
            shape.stages, ROWS=shape.rows, KEYS=shape.keys, TMA=tma, CLEAN=clean, BLOCK=block,
            **flags,
        )  # fmt: skip

    with on(q.device):
        shape = fit(kernel, wide, q.itemsize, card(q.device), launch, launches)
        if cut is not None:
            run_moments(launches, call, flags, cut, rest, shape.rows, found)
    return found
