"""A map in plain PyTorch: each function loops over the blocks of a region.

Every loop works in one buffer of a block's size and skips blocks that the mask hides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.row_sums import HEAVY, RowTotals
from headwise.core.schedule import Segment
from headwise.engines.streaming.forward_loop import row_totals as streaming_totals
from headwise.engines.streaming.loop import LOG2_E, Loop, Selection
from headwise.maps.effect_totals import EffectTotals, PeakSums, Sums
from headwise.maps.pooling import Cells, Reduction, joined
from headwise.maps.region import Region

Totals = RowTotals | EffectTotals


class Tile(NamedTuple):
    """One block of a region and its numbers, which the next block overwrites."""

    unit: Unit
    rows: slice
    columns: slice
    numbers: Tensor  # (b, h, G, R, C)
    rank: Tensor | None  # what they are ranked by, if that was asked for; -inf for hidden keys

    def of(self, target: Tensor) -> Tensor:
        """The block's heads of a (B, Hkv, G, ...) tensor."""
        return target[self.unit.b0 : self.unit.b1, self.unit.h0 : self.unit.h1]


class RegionLoop(Loop):
    """The numbers of a region, block by block."""

    def __init__(
        self, region: Region, totals: Totals | None, selection: Selection | None = None
    ) -> None:
        beside = region.v if region.grad is not None else region.norms
        super().__init__(
            region.q,
            region.k,
            region.k[..., :0] if beside is None else beside,
            region.terms,
            selection,
        )
        self.weighted, self.grad = region.norms is not None, region.grad
        self.effects = totals if isinstance(totals, EffectTotals) else None
        if totals is not None:
            self.divide_by(totals.weights if isinstance(totals, EffectTotals) else totals)

    def tiles(self, ranked: bool) -> Iterator[Tile]:
        """Every block that the mask does not hide.

        Weights that are ranked are given as their logarithms to base 2, which tell apart weights
        too small for a float.
        """
        for unit, rows in self.row_blocks():
            yield from self.of_rows(unit, rows, ranked)

    def of_rows(self, unit: Unit, rows: slice, ranked: bool) -> Iterator[Tile]:
        """The blocks of some rows, from the first key to the last."""
        grad = self.grads(unit, rows)
        for segment, s, seen in self.segments(unit, rows):
            s = self.hide(unit, self.log_weights(unit, rows, s), seen)
            rank = None
            if grad is not None:
                hidden = s == -torch.inf if ranked else None
                s = self.effect(unit, rows, segment, s.exp2_(), grad)
                rank = None if hidden is None else s.abs().masked_fill_(hidden, -torch.inf)
            else:
                s = self.weight(segment, s, ranked)
                rank = s if ranked else None
            numbers = self.blocks.five(unit, s)
            rank = None if rank is None else self.blocks.five(unit, rank)
            yield Tile(unit, rows, segment.columns, numbers, rank)

    def weight(self, segment: Segment, s: Tensor, logarithm: bool) -> Tensor:
        """Weights from their logarithms to base 2, times the norms if there are any."""
        s = s if logarithm else s.exp2_()
        if self.weighted:
            norms = self.v[:, segment.columns].transpose(1, 2)
            s = s.add_(_log(norms)) if logarithm else s.mul_(norms)
        return s

    def effect(self, unit: Unit, rows: slice, segment: Segment, p: Tensor, grad: Tensor) -> Tensor:
        """p/(1 - p) · grad · (out - v) of a block of weights, in place."""
        assert self.effects is not None
        product, known = (
            self.per_row(unit, rows, x)[..., None]
            for x in (self.effects.product, self.effects.peak_effect)
        )
        heavy = p > HEAVY
        odds = p.div_(torch.sub(1, p, out=self.buffer(2, p.shape)))
        e = odds.mul_(self.products(segment, grad).neg_().add_(product))
        return torch.where(heavy, known, e, out=e)

    def grads(self, unit: Unit, rows: slice) -> Tensor | None:
        """These rows' gradients of the output, (heads, G·R, Dv)."""
        if self.grad is None:
            return None
        return self.per_row(unit, rows, self.grad).to(self.blocks.wide)

    def products(self, segment: Segment, grad: Tensor) -> Tensor:
        """grad · v of a block, (heads, G·R, C)."""
        v = self.v[:, segment.columns]
        out = self.buffer(1, (*grad.shape[:2], v.shape[1]))
        return torch.bmm(grad, v.transpose(1, 2), out=out)

    def peaks(self) -> Iterator[tuple[Unit, slice, PeakSums]]:
        """Each block of rows that sees a key, and the sums over all of its keys."""
        for unit, rows in self.row_blocks():
            grad = self.grads(unit, rows)
            assert grad is not None
            found: PeakSums | None = None
            for segment, s, seen in self.segments(unit, rows):
                self.hide(unit, s, seen)
                here = self.peak(s, self.products(segment, grad))
                found = here if found is None else found.join(here)
            if found is not None:
                yield unit, rows, found

    def peak(self, s: Tensor, product: Tensor) -> PeakSums:
        """The largest of a block's logits in each row, and the sums over the others."""
        best, at = s.max(-1)
        chosen = product.gather(-1, at[..., None])[..., 0]
        s.scatter_(-1, at[..., None], -torch.inf)
        base = s.amax(-1)
        s.sub_(base.masked_fill(base == -torch.inf, 0)[..., None]).mul_(LOG2_E)
        weight = s.exp2_()
        rest = Sums(base, weight.sum(-1), product.mul_(weight).sum(-1))
        return PeakSums(best, chosen.masked_fill_(best == -torch.inf, 0), rest)


def tiles(region: Region, totals: Totals, ranked: bool = False) -> Iterator[Tile]:
    """The blocks of a region that the mask does not hide; none if there are no pairs."""
    return RegionLoop(region, totals).tiles(ranked) if all(region.box.shape) else iter(())


def row_totals(region: Region) -> Totals:
    """The totals that every row's numbers need, over all keys of the region."""
    if region.grad is None:
        return streaming_totals(region.q, region.k, region.terms)
    rows = region.q.shape[2]
    best, product, base, total, value = (region.zeros(rows) for _ in range(5))
    best.fill_(-torch.inf), base.fill_(-torch.inf)
    if all(region.box.shape):
        loop = RegionLoop(region, None)
        for unit, block, found in loop.peaks():
            targets = (best, product, base, total, value)
            for target, part in zip(targets, (*found[:2], *found.rest), strict=True):
                loop.put(unit, block, target, part)
    best, product, *rest = (x.flatten(1, 2) for x in (best, product, base, total, value))
    sums = PeakSums(best, product, Sums(*rest))
    return sums.totals(region.terms.sinks, region.whole)


def fill(region: Region, totals: Totals) -> Tensor:
    """Every number, (B, Hq, N, M)."""
    out = region.zeros(*region.box.shape[2:])
    for tile in tiles(region, totals):
        tile.of(out)[..., tile.rows, tile.columns] = tile.numbers
    return out.flatten(1, 2)


def pool(region: Region, totals: Totals, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
    """One number for each cell, (B, Hq, row cells, key cells)."""
    out = region.zeros(len(rows), len(keys))
    for tile in tiles(region, totals):
        strip = rows.pooled(tile.numbers, -2, tile.rows, how)
        pooled = keys.pooled(strip, -1, tile.columns, how)
        target = tile.of(out)[..., rows.touched(tile.rows), keys.touched(tile.columns)]
        target.copy_(joined(target, pooled, how))
    if how == "mean":
        out /= out.new_tensor(rows.widths)[:, None] * out.new_tensor(keys.widths)
    return out.flatten(1, 2)


def received(region: Region, totals: Totals) -> Tensor:
    """The sum of each key's numbers over the rows, (B, Hq, M)."""
    out = region.zeros(region.k.shape[2])
    for tile in tiles(region, totals):
        tile.of(out)[..., tile.columns] += tile.numbers.sum(-2)
    return out.flatten(1, 2)


def top(region: Region, totals: Totals, count: int) -> tuple[Tensor, Tensor]:
    """The largest numbers of each row and their keys, (B, Hq, N, count) each; -1 for no key."""
    ranks = region.zeros(region.q.shape[2], count) - torch.inf
    numbers, found = torch.zeros_like(ranks), torch.full_like(ranks, -1, dtype=torch.int64)
    for tile in tiles(region, totals, ranked=True):
        assert tile.rank is not None
        new, index = tile.rank.topk(min(count, tile.rank.shape[-1]))
        number = tile.numbers.gather(-1, index)
        index = (index + tile.columns.start).masked_fill_(new == -torch.inf, -1)
        kept = [tile.of(x)[..., tile.rows, :] for x in (ranks, numbers, found)]
        both, choice = torch.cat([kept[0], new], -1).topk(count)
        for old, more in zip(kept[1:], (number, index), strict=True):
            old.copy_(torch.cat([old, more], -1).gather(-1, choice))
        kept[0].copy_(both)
    if region.grad is not None:
        return numbers.masked_fill_(found < 0, 0).flatten(1, 2), found.flatten(1, 2)
    # Vector instructions and what is left over may round equal numbers differently.
    return ranks.exp2_().cummin(-1).values.flatten(1, 2), found.flatten(1, 2)


def _log(norms: Tensor) -> Tensor:
    """log₂ of the norms, finite: a key whose value is 0 still has a rank."""
    return norms.clamp_min(torch.finfo(norms.dtype).tiny).log2()
