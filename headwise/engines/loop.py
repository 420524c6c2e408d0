"""What the streaming engine's forward and backward share: blocks, their order, and room to work in."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.block import Blocks, Unit
from headwise.problem import Terms
from headwise.schedule import BLOCK, Schedule, Segment, Shape


class Loop:
    """What forward and backward share: the blocks, their order, and two buffers to work in."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> None:
        k, v = hide_unseen(terms, k, v)
        self.blocks, self.v, self.terms = Blocks(q, k, terms), v, terms
        blocks = self.blocks
        shape = Shape(q.shape[0], blocks.heads, blocks.group, q.shape[2], k.shape[2])
        self.schedule = Schedule(shape, terms.intervals, terms.dense is not None)
        self.clean = terms.bias is None  # nothing but a mask can hide a key
        self._buffers: list[Tensor] = []

    def buffer(self, number: int, *shape: int) -> Tensor:
        """Working memory that blocks use in turn."""
        size = 1
        for axis in shape:
            size *= axis
        while len(self._buffers) <= number:
            self._buffers.append(self.v.new_empty(0, dtype=self.blocks.wide))
        if self._buffers[number].numel() < size:
            self._buffers[number] = self.v.new_empty(max(size, BLOCK), dtype=self.blocks.wide)
        return self._buffers[number][:size].view(shape)

    def values(self, unit: Unit, columns: slice) -> Tensor:
        return unit.flat(self.v[..., columns, :]).to(self.blocks.wide)

    def logits(self, unit: Unit, rows: slice, segment: Segment, q: Tensor, k: Tensor) -> Tensor:
        """The block's logits, -inf where a row does not see a key, (heads, G·R, C)."""
        shape = q.shape[0], q.shape[1], k.shape[1]
        s = self.blocks.raw(unit, q, k, out=self.buffer(0, *shape))
        return self.bend(unit, rows, segment, s)

    def bend(self, unit: Unit, rows: slice, segment: Segment, s: Tensor) -> Tensor:
        if not self.terms.plain:
            self.blocks.bend(unit, rows, segment.columns, s)
        if segment.masked:
            seen = self.blocks.visible(unit, rows, segment.columns)
            if seen is not None:
                self.blocks.five(unit, s).masked_fill_(~seen, -torch.inf)
        return s

    def per_row(self, unit: Unit, rows: slice, tensor: Tensor) -> Tensor:
        """A (B, Hq, N, ...) tensor's part as (heads, G·R, ...)."""
        five = unit.of(self.blocks.grouped(tensor))[:, :, :, rows]
        return five.flatten(0, 1).flatten(1, 2)

    def put(self, unit: Unit, rows: slice, target: Tensor, part: Tensor) -> None:
        """Write (heads, G·R, ...) into a (B, Hq, N, ...) tensor."""
        place = unit.of(self.blocks.grouped(target))[:, :, :, rows]
        place.copy_(part.view(place.shape))


def hide_unseen(terms: Terms, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros for keys that no row sees, where such a key shares a block with seen ones.

    A weight of zero does not silence a NaN, and the unwritten part of a cache may hold one.
    """
    seen = seen_keys(terms, k)
    if seen is None or bool(seen.all()):
        return k, v
    used = seen.flatten(0, 1).any(0).nonzero()
    if len(used) and bool(seen[..., int(used[0]) : int(used[-1]) + 1].all()):
        return k, v  # the schedule never reaches outside that stretch
    return k.masked_fill(~seen[..., None], 0), v.masked_fill(~seen[..., None], 0)


def seen_keys(terms: Terms, k: Tensor) -> Tensor | None:
    """Which keys some row sees, bool (B|1, Hkv|1, M); None: all of them."""
    heads, keys = k.shape[1], k.shape[2]
    if terms.dense is not None:
        seen = terms.dense.any(-2).expand(-1, -1, keys)
    elif terms.intervals is not None:
        # +1 where an interval starts, -1 where it ends: the running sum counts the rows that see a key
        first, last = (bound.long() for bound in terms.intervals.unbind(1))  # (P, B|1, Hq|1, N)
        step = torch.ones_like(first, dtype=torch.int32).masked_fill_(first >= last, 0)
        edges = step.new_zeros(*first.shape[:-1], keys + 1)
        edges.scatter_add_(-1, first, step).scatter_add_(-1, last, -step)
        seen = edges.sum(0, dtype=torch.int32).cumsum(-1)[..., :keys] > 0
    else:
        return None
    if seen.shape[1] > 1:  # a key head serves a group of query heads
        seen = seen.unflatten(1, (heads, -1)).any(2)
    return seen
