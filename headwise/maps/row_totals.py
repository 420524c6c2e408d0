"""lse of a map's rows, computed where it is first needed and never twice."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.maps.backends import backend_for
from headwise.maps.region import Box, Region


@dataclass(frozen=True, eq=False)
class LogSums:
    """lse (B, Hq, N) of a region's rows over all of its keys, and where it is known so far."""

    region: Region
    values: Tensor  # (B, Hq, N)
    known: Tensor  # (B, Hq, N) bool

    @staticmethod
    def of(region: Region, given: Tensor | None) -> LogSums:
        """Known where it is given, or not yet."""
        q, wide = region.q, region.wide
        known = torch.full(q.shape[:3], given is not None, device=q.device)
        if given is None:
            return LogSums(region, q.new_empty(q.shape[:3], dtype=wide), known)
        return LogSums(region, given.detach().to(q.device, wide), known)

    def cut(self, box: Box) -> LogSums:
        """Those of all keys for some heads: views, so that what one learns the other knows."""
        return LogSums(self.region.cut(box), _part(self.values, box), _part(self.known, box))

    def at(self, box: Box) -> Tensor:
        """lse of a box's rows, (B, Hq, N)."""
        unknown = _part(self.known, box).logical_not()
        if all(box.shape) and bool(unknown.any()):
            self._learn(box, unknown)
        return _part(self.values, box)

    def _learn(self, box: Box, unknown: Tensor) -> None:
        """Compute the smallest box that holds every unknown row."""
        places = unknown.nonzero()
        first, last = places.amin(0).tolist(), places.amax(0).tolist()
        batch, heads, rows = (
            range(part.start + low, part.start + high + 1)
            for part, low, high in zip(box[:3], first, last, strict=True)
        )
        needed = Box(batch, heads, rows, self.region.box.keys)
        for part in needed.aligned(self.region.group):
            region = self.region.cut(part)
            _part(self.values, part).copy_(backend_for(region).log_sums(region))
            _part(self.known, part).fill_(True)


def _part(tensor: Tensor, box: Box) -> Tensor:
    """A box's part of a (B, Hq, N) tensor, as a view."""
    batch, heads, rows, _ = (slice(part.start, part.stop) for part in box)
    return tensor[batch, heads, rows]
