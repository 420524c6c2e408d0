"""The loops of an attention map: over the blocks of a region, each block's weights from lse.

Every loop works in a buffer of a block's size and skips what the mask hides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.loop import LOG2_E, Loop
from headwise.maps.region import Region

How = Literal["mean", "max"]


class Cells:
    """How an axis is pooled: cell c holds the positions edges[c] <= i < edges[c + 1]."""

    def __init__(self, edges: list[int]) -> None:
        self.edges = edges
        self.widths = [last - first for first, last in pairwise(edges)]
        regular = len(set(self.widths[:-1])) <= 1 and self.widths[-1:] <= self.widths[:1]
        self.width = self.widths[0] if regular and self.widths else 0  # 0: they differ

    @staticmethod
    def evenly(n: int, size: int) -> Cells:
        """At most `size` cells, their edges at floor(c · n / size)."""
        size = min(n, size)
        return Cells([c * n // size for c in range(size + 1)] if size else [0])

    @staticmethod
    def every(n: int, width: int) -> Cells:
        """Cells of `width`; the last holds what is left."""
        return Cells([*range(0, n, width), n])

    def __len__(self) -> int:
        return len(self.widths)

    def touched(self, part: slice) -> slice:
        """The cells that some position of the part is in."""
        first = bisect_right(self.edges, part.start) - 1
        return slice(first, bisect_left(self.edges, part.stop))

    def pooled(self, x: Tensor, axis: int, part: slice, how: How) -> Tensor:
        """The sum or the largest of each touched cell's entries along axis -1 or -2 of x."""
        width = self.width
        if width == 1:
            return x
        if width and part.start % width == part.stop % width == 0:
            cells: Tensor = x.unflatten(axis, (-1, width))
            return cells.sum(axis) if how == "mean" else cells.amax(axis)
        # Cell by cell: a product with zeros and ones would carry a NaN from one to the others.
        parts = x.split(self._cut(part), axis)
        pooled = [cell.sum(axis) if how == "mean" else cell.amax(axis) for cell in parts]
        return torch.stack(pooled, axis)

    def _cut(self, part: slice) -> list[int]:
        """How much of each touched cell lies in the part."""
        cells = self.touched(part)
        inner = self.edges[cells.start + 1 : cells.stop]
        return [last - first for first, last in pairwise([part.start, *inner, part.stop])]


class Tile(NamedTuple):
    """One block of a region and its weights, which the next block overwrites."""

    unit: Unit
    rows: slice
    columns: slice
    weights: Tensor  # (b, h, G, R, C)

    def of(self, target: Tensor) -> Tensor:
        """The block's heads of a (B, Hkv, G, ...) tensor."""
        return target[self.unit.b0 : self.unit.b1, self.unit.h0 : self.unit.h1]


class Weights(Loop):
    """The weights of a region, block by block."""

    def __init__(self, region: Region, lse: Tensor) -> None:
        norms = region.k[..., :0] if region.norms is None else region.norms
        super().__init__(region.q, region.k, norms, region.terms)
        self.weighted = region.norms is not None
        # Where a row sees nothing, +inf makes its weights 0.
        self.lse = (lse * LOG2_E).masked_fill_(lse == -torch.inf, torch.inf)

    def tiles(self, logarithm: bool) -> Iterator[Tile]:
        """Every block that the mask does not hide: weights, or their logarithms to base 2."""
        for unit in self.schedule.units():
            self.enter(unit)
            for rows in self.schedule.row_blocks():
                q, lse = self.queries(unit, rows), self.per_row(unit, rows, self.lse)
                for segment in self.schedule.segments(unit, rows):
                    s = self.logits(unit, rows, segment, q).sub_(lse[..., None])
                    s.clamp_max_(0)  # a weight is at most 1, whatever rounding says
                    self.hide(unit, s, self.seen(unit, rows, segment))
                    s = s if logarithm else s.exp2_()
                    if self.weighted:
                        norms = self.v[:, segment.columns].transpose(1, 2)
                        s = s.add_(_log(norms)) if logarithm else s.mul_(norms)
                    yield Tile(unit, rows, segment.columns, self.blocks.five(unit, s))


def tiles(region: Region, lse: Tensor, logarithm: bool = False) -> Iterator[Tile]:
    """The blocks of a region that the mask does not hide, none where there is no pair."""
    return Weights(region, lse).tiles(logarithm) if all(region.box.shape) else iter(())


def log_sums(region: Region) -> Tensor:
    """lse of every row over the region's keys, (B, Hq, N)."""
    return Forward(region.q, region.k, region.k[..., :0], region.terms, 0).run().lse


def fill(region: Region, lse: Tensor) -> Tensor:
    """Every weight, (B, Hq, N, M)."""
    out = _zeros(region, *region.box.shape[2:])
    for tile in tiles(region, lse):
        tile.of(out)[..., tile.rows, tile.columns] = tile.weights
    return out.flatten(1, 2)


def pool(region: Region, lse: Tensor, rows: Cells, keys: Cells, how: How) -> Tensor:
    """The mean or the largest weight of each cell, (B, Hq, row cells, key cells)."""
    out = _zeros(region, len(rows), len(keys))
    for tile in tiles(region, lse):
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


def received(region: Region, lse: Tensor) -> Tensor:
    """The sum of each key's weights over the rows, (B, Hq, M)."""
    out = _zeros(region, region.k.shape[2])
    for tile in tiles(region, lse):
        tile.of(out)[..., tile.columns] += tile.weights.sum(-2)
    return out.flatten(1, 2)


def top(region: Region, lse: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest weights of each row and their keys, (B, Hq, N, count) each; -1 for no key."""
    weights = _zeros(region, region.q.shape[2], count) - torch.inf
    found = torch.full_like(weights, -1, dtype=torch.int64)
    for tile in tiles(region, lse, logarithm=True):
        # Ranked by logarithms: they order weights that are too small for a float.
        new, index = tile.weights.topk(min(count, tile.weights.shape[-1]))
        index = (index + tile.columns.start).masked_fill_(new == -torch.inf, -1)
        best, key = tile.of(weights)[..., tile.rows, :], tile.of(found)[..., tile.rows, :]
        both, choice = torch.cat([best, new], -1).topk(count)
        key.copy_(torch.cat([key, index], -1).gather(-1, choice))
        best.copy_(both)
    return weights.exp2_().flatten(1, 2), found.flatten(1, 2)


def _zeros(region: Region, *shape: int) -> Tensor:
    """(B, Hkv, G, *shape)."""
    batch, heads = region.k.shape[:2]
    return region.q.new_zeros(batch, heads, region.group, *shape, dtype=region.wide)


def _log(norms: Tensor) -> Tensor:
    """Finite: a key whose value is 0 is still a key."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny).log2()
