"""The streaming engine's forward: `Partial` and `merge` over the blocks of a problem."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.block import Unit
from headwise.engines.loop import LN_2, LOG2_E, NO_WEIGHT, Loop
from headwise.engines.moments import KeyMoments, logit_moments
from headwise.partial import Moments, Partial, join_moments, merge
from headwise.problem import Terms
from headwise.schedule import Segment
from headwise.sums import DISTANCE, ENTROPY, MOMENTS, Sums, room

HEADROOM = 30.0  # how far above its base a logit may rise: 2 ** 30 is far from overflow


class Forward(Loop):
    """Output and statistics of every row."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> None:
        super().__init__(q, k, v, terms)
        self.wants = wants
        self.sums = room(q, v, wants)
        group = self.blocks.grouped
        self.places = Sums(*(group(x) if x.ndim > 1 else x for x in self.sums))  # to write into
        self.key_moments = KeyMoments(self.k)
        self.numbers = torch.arange(k.shape[2], device=k.device, dtype=self.blocks.wide)

    def run(self) -> Sums:
        """Every row, unit by unit."""
        for unit in self.schedule.units():
            self.enter(unit)
            self.key_moments = KeyMoments(self.k)
            for rows in self.schedule.row_blocks():
                self.finish(unit, rows, _Rows(self, unit, rows).run())
        return self.sums

    def finish(self, unit: Unit, rows: slice, seen: _Rows) -> None:
        """Divide, and write the rows' results."""
        sums, part = self.places, seen.finished()
        if self.terms.sinks is not None:
            part = replace(part, sinks=self.sinks(unit, part.total))
        weight = part.weight()
        place = sums.out[unit.b0 : unit.b1, unit.h0 : unit.h1, :, rows]
        torch.mul(part.values.view(place.shape), weight.view(*place.shape[:-1], 1), out=place)
        self.put(unit, rows, sums.lse, part.lse())
        self.put(unit, rows, sums.max_logit, part.maximum)
        if self.wants & ENTROPY:
            self.put(unit, rows, sums.entropy, part.entropy())
        if self.wants & DISTANCE:
            assert part.reach is not None
            self.put(unit, rows, sums.distance, part.reach * weight)
        if self.wants & MOMENTS:
            assert seen.moments is not None
            count, mean, spread = seen.moments
            self.put(unit, rows, sums.visible, count)
            self.put(unit, rows, sums.logit_mean, mean * LN_2)
            self.put(unit, rows, sums.logit_var, spread / count.clamp_min(1) * LN_2**2)

    def sinks(self, unit: Unit, like: Tensor) -> Tensor:
        """The sink of each row, (heads, G·R)."""
        assert self.terms.sinks is not None
        sinks = self.terms.sinks.to(like.dtype).unflatten(0, (self.blocks.heads, -1))
        five = self.blocks.five(unit, like[..., None])[..., 0]  # (b, h, G, R)
        per_row: Tensor = sinks[unit.h0 : unit.h1, :, None].expand_as(five).reshape(like.shape)
        return per_row


class _Rows:
    """One block of rows on its way over the keys. Sums are as in `Partial`, in units of log 2."""

    def __init__(self, loop: Forward, unit: Unit, rows: slice) -> None:
        self.loop, self.unit, self.rows = loop, unit, rows
        self.q = loop.queries(unit, rows)
        # Distances are counted from a key near the rows, so that small ones stay exact.
        self.origin = rows.start + loop.k.shape[1] - loop.blocks.q.shape[3]
        self.steps = self.origin - loop.numbers if loop.wants & DISTANCE else loop.numbers
        self.moments: Moments | None = None
        self.part: Partial | None = None
        self.base = self.limit = self.q  # both set with the first part

    def run(self) -> _Rows:
        """Meet every key that some of the rows see."""
        for segment in self.loop.schedule.segments(self.unit, self.rows):
            self.meet(segment)
        return self

    def meet(self, segment: Segment) -> None:
        """Merge the block of these keys into the part."""
        loop, wants = self.loop, self.loop.wants
        s = loop.logits(self.unit, self.rows, segment, self.q)
        seen = loop.seen(self.unit, self.rows, segment)
        clean = loop.clean and seen is None
        if wants & MOMENTS:
            self.count_moments(segment, s, seen)
        loop.hide(self.unit, s, seen)
        maximum = s.amax(-1)
        shared = self.part is not None and bool((maximum <= self.limit).all())
        if not shared:
            self.base = maximum if clean else maximum.masked_fill(maximum == -torch.inf, 0)
        s.sub_(self.base[..., None])
        weight = torch.exp2(s, out=loop.buffer(1, s.shape))
        total = weight.sum(-1)
        shifted = reach = None
        if wants & ENTROPY:
            s = s if clean else s.clamp_min_(NO_WEIGHT)
            shifted = s.mul_(weight).sum(-1)
        if wants & DISTANCE:
            reach = torch.matmul(weight, self.steps[segment.columns])
        if loop.terms.seed is not None:
            kept = loop.blocks.keep(self.unit, self.rows, segment.columns)
            weight.mul_(kept).mul_(1 / (1 - loop.terms.dropout))
        if shared and self.part is not None:  # on one base, to merge is to add
            add(self.part, maximum, total, shifted, reach)
            self.part.values.baddbmm_(weight, loop.v[:, segment.columns])
        else:
            values = torch.bmm(weight, loop.v[:, segment.columns])
            self.join(Partial(self.base, maximum, total, values, shifted, reach), clean)

    def join(self, block: Partial, clean: bool) -> None:
        """Merge a block on a base of its own."""
        if self.part is None:
            self.part = replace(block, maximum=block.maximum.clone())
        else:
            self.part = _in_log2(merge(_in_nats(self.part), _in_nats(block)))
        self.base = self.part.base
        self.limit = self.base + HEADROOM
        if not clean:  # a row that saw nothing yet has no base to share
            self.limit.masked_fill_(self.part.maximum == -torch.inf, -torch.inf)

    def finished(self) -> Partial:
        """What the rows saw, in nats and with distances from the rows themselves."""
        loop, part = self.loop, self.part
        if part is None:
            zero = self.q.new_zeros(self.q.shape[:-1])
            values = self.q.new_zeros(*zero.shape, loop.v.shape[-1])
            self.moments = zero, zero, zero
            return Partial(zero, zero - torch.inf, zero, values, zero, zero)
        if part.reach is not None:
            position = self.unit.of(loop.blocks.position)[..., self.rows]
            above = position - (loop.terms.first_key + self.origin)
            total = loop.blocks.five(self.unit, part.total[..., None])[..., 0]
            part.reach.add_((total * above).view_as(part.reach))
        return _in_nats(part)

    def count_moments(self, segment: Segment, s: Tensor, seen: Tensor | None) -> None:
        """Mean and variance of the logits: from the keys' own where that is possible."""
        loop = self.loop
        stretch, width = segment.stretch, self.q.shape[-1]
        long = stretch.stop - stretch.start > 4 * width  # for fewer keys their moments cost more
        if seen is not None or not long or not loop.terms.plain:
            five, room = (loop.blocks.five(self.unit, x) for x in (s, loop.buffer(1, s.shape)))
            if not loop.clean:  # a bias of -inf hides a key too
                open_keys = five != -torch.inf
                seen = open_keys if seen is None else seen & open_keys
            new = logit_moments(five, seen, room)
        elif segment.columns.start == stretch.start:  # once for the whole stretch
            new = loop.key_moments.of_rows(stretch, self.q)
        else:
            return
        self.moments = new if self.moments is None else join_moments(self.moments, new)


def add(
    part: Partial, maximum: Tensor, total: Tensor, shifted: Tensor | None, reach: Tensor | None
) -> None:
    """Add a block's sums to a part's, in place."""
    torch.maximum(part.maximum, maximum, out=part.maximum)
    part.total.add_(total)
    if shifted is not None and part.shifted is not None:
        part.shifted.add_(shifted)
    if reach is not None and part.reach is not None:
        part.reach.add_(reach)


def _in_nats(part: Partial) -> Partial:
    return _in_units(part, LN_2)


def _in_log2(part: Partial) -> Partial:
    return _in_units(part, LOG2_E)


def _in_units(part: Partial, size: float) -> Partial:
    """The part with its logits multiplied by a number."""
    shifted = None if part.shifted is None else part.shifted * size
    return replace(part, base=part.base * size, maximum=part.maximum * size, shifted=shifted)
