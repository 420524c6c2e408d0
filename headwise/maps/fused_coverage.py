"""On a GPU: the functions of `headwise.maps.coverage` that ask for a row's largest weights."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals
from headwise.engines.triton.host.operands import outer_strides
from headwise.engines.triton.host.tile_shapes import Shape
from headwise.engines.triton.kernels.maps.map_held import held
from headwise.maps import coverage
from headwise.maps.fused import call_of, constants, fit_map, flags, kernel_totals
from headwise.maps.region import Region

CUTS = 8  # of the range of logarithms in one pass over the keys


def kept(region: Region, totals: RowTotals, counts: list[int]) -> Tensor:
    """The weight of each row's largest keys, (B, Hq, N, counts)."""
    if region.norms is not None or not all(region.box.shape):
        return coverage.kept(region, totals, counts)
    return torch.stack([_held(region, totals, count, None) for count in counts], -1)


def needed(region: Region, totals: RowTotals, share: float) -> Tensor:
    """How many of its largest weights make up a share of each row's sum, int64 (B, Hq, N)."""
    if region.norms is not None or not all(region.box.shape):
        return coverage.needed(region, totals, share)
    return _held(region, totals, 0, share).long()


def _held(region: Region, totals: RowTotals, count: int, share: float | None) -> Tensor:
    """The weight of the largest keys, or the number of keys that hold a share, (B, Hq, N)."""
    batch, heads, rows, _ = region.box.shape
    call, known, by_mass = call_of(region), kernel_totals(totals), share is not None
    dtype = torch.int32 if by_mass else torch.float32
    out = region.q.new_empty(batch, heads, rows, dtype=dtype)

    def launch(shape: Shape) -> None:
        held[(-(-rows // shape.rows), heads, batch)](
            call.q, call.k, known, out, out, outer_strides(call.q), outer_strides(call.k),
            call.given, *call.sizes, float(count), share or 0.0, CUTS=CUTS, BY_MASS=by_mass,
            **constants(shape), **flags(call),
        )  # fmt: skip

    fit_map(call, launch)
    return out
