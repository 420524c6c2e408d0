"""The loop over blocks that the streaming engine's forward, backward and maps share."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from headwise.core.blocks import Blocks, Unit
from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.core.schedule import BLOCK, GroupedShape, Schedule, Segment, hide_unseen

LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453
NO_WEIGHT = -1e4  # 2 to this power is 0 in every dtype, and times 0 it is 0, unlike -inf


class Selection(Protocol):
    """The keys that each row keeps, of those that it sees."""

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        """True for the kept keys of a block; broadcasts to its logits s (b, h, G, R, C)."""


class Loop:
    """The blocks of a problem, their order, and the buffers that they reuse.

    Exponentials are taken in base 2: PyTorch's exp2 takes the same time for any argument, while its
    exp takes up to a hundred times as long for arguments that underflow.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, selection: Selection | None = None
    ) -> None:
        k, v = hide_unseen(terms, k, v)
        self.blocks, self._values, self.terms = Blocks(q, k, terms), v, terms
        self.selection = selection
        blocks = self.blocks
        shape = GroupedShape(q.shape[0], blocks.heads, blocks.group, q.shape[2], k.shape[2])
        self.schedule = Schedule(shape, terms.intervals, terms.dense is not None, q.is_cuda)
        self.clean = terms.bias is None  # only the mask hides keys
        self.k = self.v = self.nothing = q.new_zeros((), dtype=blocks.wide)
        self.hidden = self.nothing - torch.inf
        self.base: Tensor | None = None
        self.rest = self.nothing
        self._buffers: dict[int, Tensor] = {}
        self._views: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def enter(self, unit: Unit) -> None:
        """Lay out a unit's keys and values, (heads, M, D) and (heads, M, Dv), for its blocks."""
        self.k = unit.flat(self.blocks.k).to(self.blocks.wide)
        self.v = unit.flat(self._values).to(self.blocks.wide)

    def row_blocks(self) -> Iterator[tuple[Unit, slice]]:
        """Every block of rows, unit by unit, each of which is entered first."""
        for unit in self.schedule.units():
            self.enter(unit)
            for rows in self.schedule.row_blocks():
                yield unit, rows

    def buffer(self, number: int, shape: tuple[int, ...]) -> Tensor:
        """Working memory, reused by every block."""
        view = self._views.get((number, shape))
        if view is None:
            size = math.prod(shape)
            if number not in self._buffers or self._buffers[number].numel() < size:
                self._buffers[number] = self.nothing.new_empty(max(size, BLOCK))
                self._views = {key: x for key, x in self._views.items() if key[0] != number}
            view = self._views[number, shape] = self._buffers[number][:size].view(shape)
        return view

    def logits(self, unit: Unit, rows: slice, segment: Segment, q: Tensor) -> Tensor:
        """Return the block's logits before the mask, (heads, G·R, C)."""
        k = self.k[:, segment.columns]
        s = self.blocks.raw(unit, q, k, out=self.buffer(0, (*q.shape[:2], k.shape[1])))
        return self.blocks.capped_and_biased(unit, rows, segment.columns, s)

    def segments(self, unit: Unit, rows: slice) -> Iterator[tuple[Segment, Tensor, Tensor | None]]:
        """The keys of a block of rows, their logits before the mask, and what is `seen` of them."""
        q = self.blocks.queries(unit, rows)
        for segment in self.schedule.segments(unit, rows):
            s = self.logits(unit, rows, segment, q)
            yield segment, s, self.seen(unit, rows, segment, s)

    def divide_by(self, totals: RowTotals) -> None:
        """Set what `log_weights` subtracts: lse at once, or its parts if it is too coarse."""
        self.base = totals.safe_base() if totals.coarse() else None
        lse = totals.lse.masked_fill(totals.lse == -torch.inf, torch.inf)  # weights of 0
        self.rest = (lse if self.base is None else totals.log_total) * -LOG2_E

    def log_weights(self, unit: Unit, rows: slice, s: Tensor) -> Tensor:
        """log₂ p of a block's logits, in place."""
        if self.base is not None:
            s.sub_(self.per_row(unit, rows, self.base)[..., None])
        rest = self.per_row(unit, rows, self.rest)[..., None]
        torch.add(rest, s, alpha=LOG2_E, out=s)
        return s.clamp_max_(0)  # no weight is above 1, whatever rounding does

    def seen(self, unit: Unit, rows: slice, segment: Segment, s: Tensor) -> Tensor | None:
        """The keys that the mask shows and the selection keeps, broadcastable to (b, h, G, R, C).

        None if nothing is hidden. s are the block's logits, (heads, G·R, C).
        """
        columns = segment.columns
        seen = self.blocks.visible(unit, rows, columns) if segment.masked else None
        if self.selection is None:
            return seen
        kept = self.selection.kept(self, unit, rows, columns, self.blocks.five(unit, s))
        return kept if seen is None else kept & seen

    def hide(self, unit: Unit, s: Tensor, seen: Tensor | None) -> Tensor:
        """Add -inf where a row does not see a key, which is far faster than to fill it in."""
        if seen is not None:
            self.blocks.five(unit, s).add_(torch.where(seen, self.nothing, self.hidden))
        return s

    def per_row(self, unit: Unit, rows: slice, tensor: Tensor) -> Tensor:
        """The block's part of a (B, Hq, N, ...) tensor as (heads, G·R, ...)."""
        five = unit.of(self.blocks.grouped(tensor))[:, :, :, rows]
        return five.flatten(0, 1).flatten(1, 2)

    def put(self, unit: Unit, rows: slice, target: Tensor, part: Tensor) -> None:
        """Write (heads, G·R, ...) into a (B, Hkv, G, N, ...) tensor."""
        place = target[unit.b0 : unit.b1, unit.h0 : unit.h1, :, rows]
        place.copy_(part.view(place.shape))
