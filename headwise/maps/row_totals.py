"""The totals of a map's rows: computed when they are first needed, and never twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals
from headwise.maps.backends import backend_for
from headwise.maps.blockwise import Totals
from headwise.maps.effect_totals import EffectTotals
from headwise.maps.region import Box, Region


@dataclass(frozen=True, eq=False)
class LazyTotals:
    """The totals of a region's rows over all of its keys, filled in row by row."""

    region: Region
    totals: Totals  # (B, Hq, N) each
    known: Tensor  # (B, Hq, N) bool: the rows that are filled in

    @staticmethod
    def of(region: Region, lse: Tensor | None = None) -> LazyTotals:
        """Totals from lse if it is given, else unknown in every row."""
        q, wide = region.q, region.wide
        kind = RowTotals if region.grad is None else EffectTotals
        with torch.inference_mode(False):  # they will be written to, perhaps outside of that mode
            known = torch.full(q.shape[:3], lse is not None, device=q.device)
            if lse is None:
                types = (torch.int32 if name == "peak" else wide for name in kind._fields)
                empty = (q.new_empty(q.shape[:3], dtype=dtype) for dtype in types)
                return LazyTotals(region, kind(*empty), known)
        return LazyTotals(region, RowTotals.of_lse(lse.detach().to(q.device, wide)), known)

    def cut(self, box: Box) -> LazyTotals:
        """The same for some heads: views, so that both know what one of them computes."""
        return LazyTotals(self.region.cut(box), self._part(box), _part(self.known, box))

    def of_rows(self, region: Region, rows: Tensor) -> LazyTotals:
        """The totals of some rows, by their numbers, as far as they are known; their `region`."""
        totals = type(self.totals)(*(x.index_select(2, rows) for x in self.totals))
        return LazyTotals(region, totals, self.known.index_select(2, rows))

    def at(self, box: Box) -> Totals:
        """The totals of a box's rows, (B, Hq, N) each."""
        unknown = _part(self.known, box).logical_not()
        if all(box.shape) and bool(unknown.any()):
            self._compute(box, unknown)
        return self._part(box)

    def _compute(self, box: Box, unknown: Tensor) -> None:
        """Fill in the smallest box that holds every unknown row."""
        places = unknown.nonzero()
        first, last = places.amin(0).tolist(), places.amax(0).tolist()
        batch, heads, rows = (
            range(part.start + low, part.start + high + 1)
            for part, low, high in zip(box[:3], first, last, strict=True)
        )
        needed = Box(batch, heads, rows, self.region.box.keys)
        for part in needed.aligned(self.region.group):
            region = self.region.cut(part)
            found = backend_for(region).row_totals(region)
            for target, value in zip(self._part(part), found, strict=True):
                target.copy_(value)
            _part(self.known, part).fill_(True)

    def _part(self, box: Box) -> Totals:
        return type(self.totals)(*(_part(x, box) for x in self.totals))


def _part(tensor: Tensor, box: Box) -> Tensor:
    """A box's part of a (B, Hq, N) tensor, as a view."""
    batch, heads, rows, _ = (slice(part.start, part.stop) for part in box)
    return tensor[batch, heads, rows]
