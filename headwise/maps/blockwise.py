"""An attention map in plain PyTorch: each function loops over the blocks of a region.

Every loop works in one buffer of a block's size and skips blocks that the mask hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.row_totals import RowTotals
from headwise.engines.streaming.forward_loop import row_totals as streaming_totals
from headwise.engines.streaming.loop import Loop
from headwise.maps.pooling import Cells, How
from headwise.maps.region import Region


class Tile(NamedTuple):
    """One block of a region and its weights, which the next block overwrites."""

    unit: Unit
    rows: slice
    columns: slice
    weights: Tensor  # (b, h, G, R, C)

    def of(self, target: Tensor) -> Tensor:
        """The block's heads of a (B, Hkv, G, ...) tensor."""
        return target[self.unit.b0 : self.unit.b1, self.unit.h0 : self.unit.h1]


class RegionWeights(Loop):
    """The weights of a region, block by block."""

    def __init__(self, region: Region, totals: RowTotals) -> None:
        norms = region.k[..., :0] if region.norms is None else region.norms
        super().__init__(region.q, region.k, norms, region.terms)
        self.weighted = region.norms is not None
        self.divide_by(totals)

    def tiles(self, logarithm: bool) -> Iterator[Tile]:
        """Every block that the mask does not hide: its weights, or their logarithms to base 2."""
        for unit in self.schedule.units():
            self.enter(unit)
            for rows in self.schedule.row_blocks():
                q = self.blocks.queries(unit, rows)
                for segment in self.schedule.segments(unit, rows):
                    s = self.logits(unit, rows, segment, q)
                    s = self.log_weights(unit, rows, s)
                    self.hide(unit, s, self.seen(unit, rows, segment))
                    s = s if logarithm else s.exp2_()
                    if self.weighted:
                        norms = self.v[:, segment.columns].transpose(1, 2)
                        s = s.add_(_log(norms)) if logarithm else s.mul_(norms)
                    yield Tile(unit, rows, segment.columns, self.blocks.five(unit, s))


def tiles(region: Region, totals: RowTotals, logarithm: bool = False) -> Iterator[Tile]:
    """The blocks of a region that the mask does not hide; none if there are no pairs."""
    return RegionWeights(region, totals).tiles(logarithm) if all(region.box.shape) else iter(())


def row_totals(region: Region) -> RowTotals:
    """The totals that turn every row's logits into weights, over all keys of the region."""
    return streaming_totals(region.q, region.k, region.terms)


def fill(region: Region, totals: RowTotals) -> Tensor:
    """Every weight, (B, Hq, N, M)."""
    out = _zeros(region, *region.box.shape[2:])
    for tile in tiles(region, totals):
        tile.of(out)[..., tile.rows, tile.columns] = tile.weights
    return out.flatten(1, 2)


def pool(region: Region, totals: RowTotals, rows: Cells, keys: Cells, how: How) -> Tensor:
    """The mean or the largest weight of each cell, (B, Hq, row cells, key cells)."""
    out = _zeros(region, len(rows), len(keys))
    for tile in tiles(region, totals):
        strip = rows.pooled(tile.weights, -2, tile.rows, how)
        pooled = keys.pooled(strip, -1, tile.columns, how)
        target = tile.of(out)[..., rows.touched(tile.rows), keys.touched(tile.columns)]
        if how == "mean":
            target.add_(pooled)
        else:
            torch.maximum(target, pooled, out=target)
    if how == "mean":
        out /= out.new_tensor(rows.widths)[:, None] * out.new_tensor(keys.widths)
    return out.flatten(1, 2)


def received(region: Region, totals: RowTotals) -> Tensor:
    """The sum of each key's weights over the rows, (B, Hq, M)."""
    out = _zeros(region, region.k.shape[2])
    for tile in tiles(region, totals):
        tile.of(out)[..., tile.columns] += tile.weights.sum(-2)
    return out.flatten(1, 2)


def top(region: Region, totals: RowTotals, count: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, Hq, N, count) each; -1 for no key."""
    weights = _zeros(region, region.q.shape[2], count) - torch.inf
    found = torch.full_like(weights, -1, dtype=torch.int64)
    for tile in tiles(region, totals, logarithm=True):
        # Ranked by logarithm, which tells apart weights too small for a float.
        new, index = tile.weights.topk(min(count, tile.weights.shape[-1]))
        index = (index + tile.columns.start).masked_fill_(new == -torch.inf, -1)
        best, key = tile.of(weights)[..., tile.rows, :], tile.of(found)[..., tile.rows, :]
        both, choice = torch.cat([best, new], -1).topk(count)
        key.copy_(torch.cat([key, index], -1).gather(-1, choice))
        best.copy_(both)
    # Vector instructions and what is left over may round equal numbers differently.
    return weights.exp2_().cummin(-1).values.flatten(1, 2), found.flatten(1, 2)


def _zeros(region: Region, *shape: int) -> Tensor:
    """(B, Hkv, G, *shape)."""
    batch, heads = region.k.shape[:2]
    return region.q.new_zeros(batch, heads, region.group, *shape, dtype=region.wide)


def _log(norms: Tensor) -> Tensor:
    """log₂ of the norms, finite: a key whose value is 0 still has a rank."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny).log2()
