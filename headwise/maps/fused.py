"""An attention map on a GPU: the functions of `headwise.maps.blockwise` as fused kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.core.row_totals import RowTotals
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import launching
from headwise.engines.triton.host.operands import (
    Operands,
    on,
    operands,
    outer_strides,
    precision,
    tile_side,
    widened,
)
from headwise.engines.triton.host.tile_shapes import Shape, fit
from headwise.engines.triton.kernels.maps import map_lse as logsum
from headwise.engines.triton.kernels.maps.map_cells import Totals, cells
from headwise.engines.triton.kernels.maps.map_largest import largest
from headwise.maps import blockwise
from headwise.maps.pooling import Cells, Reduction
from headwise.maps.region import Region

MOST = 64  # largest weights per row that fit on chip


def row_totals(region: Region) -> RowTotals:
    """The totals that turn every row's logits into weights, over all keys of the region."""
    if not all(region.box.shape):
        found = blockwise.row_totals(region)
        assert isinstance(found, RowTotals)
        return found
    call = _call(region)
    batch, heads, rows, _ = region.box.shape
    sums = region.q.new_empty(3, batch, heads, rows, dtype=torch.float32)

    def launch(shape: Shape) -> None:
        logsum.log_sums[(-(-rows // shape.rows), heads, batch)](
            call.q, call.k, *sums, outer_strides(call.q), outer_strides(call.k), call.given,
            *call.sizes, **_constants(shape), **_flags(call),
        )  # fmt: skip

    _fit(call, launch)
    return RowTotals(*sums)


def fill(region: Region, totals: RowTotals) -> Tensor:
    """Every weight, (B, Hq, N, M)."""
    rows, keys = region.box.shape[2:]
    return _reduce(region, totals, Cells.every(rows, 1), Cells.every(keys, 1), "mean")


def pool(region: Region, totals: RowTotals, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
    """The mean or the largest weight of each cell, (B, Hq, row cells, key cells)."""
    out = _reduce(region, totals, rows, keys, how)
    if how == "mean":
        out /= out.new_tensor(rows.widths)[:, None] * out.new_tensor(keys.widths)
    return out


def received(region: Region, totals: RowTotals) -> Tensor:
    """The sum of each key's weights over the rows, (B, Hq, M)."""
    rows, keys = region.box.shape[2:]
    one = Cells.every(rows, max(1, rows))  # one cell of all rows, if there are any
    return _reduce(region, totals, one, Cells.every(keys, 1), "mean").sum(2)


def top(region: Region, totals: RowTotals, count: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, Hq, N, count) each; -1 for no key."""
    batch, heads, rows, _ = region.box.shape
    if count > MOST or not all(region.box.shape):
        return blockwise.top(region, totals, count)
    call, known = _call(region), _known(totals)
    kept = max(2, 1 << (count - 1).bit_length())
    best = known.base.new_empty(batch, heads, rows, kept)
    key = torch.empty_like(best, dtype=torch.int32)
    norms = _norms(region)

    def launch(shape: Shape) -> None:
        largest[(-(-rows // shape.rows), heads, batch)](
            call.q, call.k, norms, known, best, key, outer_strides(call.q), outer_strides(call.k),
            call.given, *call.sizes, count, *_norm_strides(region), KEPT=kept, **_constants(shape),
            **_flags(call),
        )  # fmt: skip

    _fit(call, launch)
    best, order = best[..., :count].sort(descending=True)
    return best.exp2_(), key[..., :count].gather(-1, order).long()


def _reduce(region: Region, totals: RowTotals, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
    """The sum or the largest weight of each cell, (B, Hq, row cells, key cells)."""
    batch, heads, *_ = region.box.shape
    out = region.q.new_zeros(batch, heads, len(rows), len(keys), dtype=torch.float32)
    if not all(region.box.shape):
        return out
    call, known = _call(region), _known(totals)
    norms = _norms(region)

    def launch(shape: Shape) -> None:
        row_part, row_groups, row_steps = _cut(rows, shape.rows)
        key_part, key_groups, key_steps = _cut(keys, shape.keys)
        cells[(row_groups * key_groups, heads, batch)](
            call.q, call.k, norms, known, out, outer_strides(call.q), outer_strides(call.k),
            call.given, *call.sizes, len(rows), len(keys), rows.width, keys.width, row_steps,
            key_steps, *_norm_strides(region), ROW_PART=row_part, KEY_PART=key_part,
            LARGEST=how == "max", **_constants(shape), **_flags(call),
        )  # fmt: skip

    _fit(call, launch)
    return out


def _cut(axis: Cells, block: int) -> tuple[int, int, int]:
    """The division of a tile's side among cells: part of a cell, groups of cells, steps.

    The largest part that leaves almost nothing of a tile unused.
    """
    widest, found = max(axis.widths), {}
    part = 1
    while part <= block:
        groups, steps = -(-len(axis) * part // block), -(-widest // part)
        found[part] = (groups, steps)
        part *= 2
    least = min(groups * steps for groups, steps in found.values())
    part = max(p for p, (groups, steps) in found.items() if groups * steps <= 1.03 * least)
    return part, *found[part]


def _call(region: Region) -> Operands:
    q, k = widened(region.q, region.k)
    return operands(q, k, k, region.terms)


def _flags(call: Operands) -> dict[str, object]:
    flags = call.flags()
    kept = {name: flags[name] for name in ("WIDTH", "PIECES", "CAP")}
    padded = tile_side(call.q.shape[-1])
    return kept | {"PADDED": padded, "PRECISION": precision(call.q.dtype)}


def _fit(call: Operands, launch: Callable[[Shape], None]) -> None:
    """Launch on the call's GPU with a tile shape that fits it."""
    q = call.q
    with on(q.device), launching("of a map"):
        fit("map", call.padded[0], q.itemsize, card(q.device), launch)


def _constants(shape: Shape) -> dict[str, int]:
    return {
        "ROWS": shape.rows,
        "KEYS": shape.keys,
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }


def _known(totals: RowTotals) -> Totals:
    """The totals as kernels take them."""
    return Totals(totals.safe_base().contiguous(), totals.log_total.contiguous())


def _norms(region: Region) -> Tensor | None:
    return None if region.norms is None else region.norms[..., 0].contiguous()


def _norm_strides(region: Region) -> tuple[int, int]:
    if region.norms is None:
        return 0, 0
    _, heads, keys, _ = region.norms.shape
    return heads * keys, keys
