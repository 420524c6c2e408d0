"""A map on a GPU: the functions of `blockwise`, and two of `coverage`, as fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals
from headwise.engines.triton.host.map_call import (
    Side,
    constants,
    fit_map,
    flags,
    known_totals,
    log_totals,
    map_call,
    norm_strides,
    reduce_cells,
    run_held,
    value_flags,
)
from headwise.engines.triton.host.operands import (
    Operands,
    loadable,
    outer_strides,
    widened,
)
from headwise.engines.triton.host.tile_shapes import Shape
from headwise.engines.triton.kernels.maps.map_cells import Effects
from headwise.engines.triton.kernels.maps.map_cells import Totals as Known
from headwise.engines.triton.kernels.maps.map_largest import largest
from headwise.engines.triton.kernels.maps.map_peaks import peaks
from headwise.maps import blockwise, coverage
from headwise.maps.blockwise import Totals
from headwise.maps.effect_totals import EffectTotals, PeakSums, Sums
from headwise.maps.pooling import Cells, Reduction
from headwise.maps.region import Region

MOST = 64  # largest numbers per row that fit on chip


def row_totals(region: Region) -> Totals:
    """The totals that every row's numbers need, over all keys of the region."""
    if not all(region.box.shape):
        return blockwise.row_totals(region)
    return log_totals(_call_of(region)) if region.grad is None else _effect_totals(region)


def _effect_totals(region: Region) -> EffectTotals:
    call, effects = _call_of(region), _effects(region, None)
    batch, heads, rows, _ = region.box.shape
    best, product, *rest = region.q.new_empty(5, batch, heads, rows, dtype=torch.float32)

    def launch(shape: Shape) -> None:
        peaks[(-(-rows // shape.rows), heads, batch)](
            call.q, call.k, effects, best, product, *rest, outer_strides(call.q),
            outer_strides(call.k), call.given, *call.sizes, **constants(shape), **flags(call),
            **value_flags(effects),
        )  # fmt: skip

    fit_map(call, launch, effects, "peaks")
    return PeakSums(best, product, Sums(*rest)).totals(region.terms.sinks, region.whole)


def fill(region: Region, totals: Totals) -> Tensor:
    """Every number, (B, Hq, N, M)."""
    rows, keys = region.box.shape[2:]
    return _reduce(region, totals, Cells.every(rows, 1), Cells.every(keys, 1), "mean")


def pool(region: Region, totals: Totals, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
    """One number for each cell, (B, Hq, row cells, key cells)."""
    out = _reduce(region, totals, rows, keys, how)
    if how == "mean":
        for cells, shape in ((rows, (-1, 1)), (keys, (-1,))):
            even = isinstance(cells.edges, range)
            out /= cells.width if even else out.new_tensor(cells.widths).view(shape)
    return out


def received(region: Region, totals: Totals) -> Tensor:
    """The sum of each key's numbers over the rows, (B, Hq, M)."""
    rows, keys = region.box.shape[2:]
    one = Cells.every(rows, max(1, rows))  # one cell of all rows, if there are any
    return _reduce(region, totals, one, Cells.every(keys, 1), "mean").sum(2)


def top(region: Region, totals: Totals, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and their keys, (B, Hq, N, count) each; -1 for no key."""
    batch, heads, rows, _ = region.box.shape
    if count > MOST or not all(region.box.shape):
        return blockwise.top(region, totals, count)
    call, known, effects = _call_of(region), _kernel_totals(totals), _effects(region, totals)
    kept = max(2, 1 << (count - 1).bit_length())
    best = known.base.new_empty(batch, heads, rows, kept)
    key = torch.empty_like(best, dtype=torch.int32)
    norms = _norms(region)

    def launch(shape: Shape) -> None:
        largest[(-(-rows // shape.rows), heads, batch)](
            call.q, call.k, norms, known, effects, best, key, outer_strides(call.q),
            outer_strides(call.k), call.given, *call.sizes, count, *norm_strides(norms),
            KEPT=kept, **constants(shape), **flags(call), **value_flags(effects),
        )  # fmt: skip

    fit_map(call, launch, effects)
    best, order = best[..., :count].sort(descending=True)
    key = key[..., :count].gather(-1, order).long()
    if effects is None:
        return best.exp2_(), key
    signed = torch.where(key % 2 == 1, -best, best).masked_fill_(key < 0, 0)
    return signed, torch.where(key < 0, key, key // 2)


def kept(region: Region, totals: RowTotals, counts: list[int]) -> Tensor:
    """The weight of each row's largest keys, (B, Hq, N, counts)."""
    if region.norms is not None or not all(region.box.shape):
        return coverage.kept(region, totals, counts)
    return torch.stack([_largest_mass(region, totals, count, None) for count in counts], -1)


def needed(region: Region, totals: RowTotals, share: float) -> Tensor:
    """How many of its largest weights make up a share of each row's sum, int64 (B, Hq, N)."""
    if region.norms is not None or not all(region.box.shape):
        return coverage.needed(region, totals, share)
    return _largest_mass(region, totals, 0, share).long()


def _largest_mass(region: Region, totals: RowTotals, count: int, share: float | None) -> Tensor:
    """The weight of the largest keys, or the number of keys that hold a share, (B, Hq, N)."""
    dtype = torch.float32 if share is None else torch.int32
    out = region.q.new_empty(region.q.shape[:3], dtype=dtype)
    run_held(_call_of(region), totals, out, None, float(count), share or 0.0)
    return out


def _reduce(region: Region, totals: Totals, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
    """The sum or an extreme number of each cell, (B, Hq, row cells, key cells)."""
    batch, heads, *_ = region.box.shape
    out = region.q.new_zeros(batch, heads, len(rows), len(keys), dtype=torch.float32)
    if not all(region.box.shape):
        return out
    one, two = (Side(len(axis), axis.width, axis.widest) for axis in (rows, keys))
    reduce_cells(
        _call_of(region), _kernel_totals(totals), out, one, two, how in ("max", "furthest"),
        _effects(region, totals), _norms(region),
    )  # fmt: skip
    return out


def _call_of(region: Region) -> Operands:
    """The tensors and sizes of a region as kernels take them."""
    return map_call(region.q, region.k, region.terms)


def _kernel_totals(found: Totals) -> Known:
    """The totals as kernels take them."""
    return known_totals(found if isinstance(found, RowTotals) else found.weights)


def _effects(region: Region, totals: Totals | None) -> Effects | None:
    """The tensors that turn weights into effects, as kernels take them; None for weights.

    The totals are not known yet when they are computed.
    """
    if region.grad is None:
        return None
    dtype = torch.promote_types(region.grad.dtype, region.v.dtype)
    grad, v = (loadable(x)[0] for x in widened(region.grad.to(dtype), region.v.to(dtype)))
    if not isinstance(totals, EffectTotals):
        return Effects(grad, v, outer_strides(grad), outer_strides(v), grad, grad)
    rows = totals.product, totals.peak_effect
    return Effects(grad, v, outer_strides(grad), outer_strides(v), *(x.contiguous() for x in rows))


def _norms(region: Region) -> Tensor | None:
    return None if region.norms is None else region.norms[..., 0].contiguous()
