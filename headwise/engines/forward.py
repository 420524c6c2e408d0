"""The streaming engine's forward: `Partial` and `merge` over the blocks of a problem."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.block import Unit
from headwise.engines.loop import Loop
from headwise.engines.moments import KeyMoments, logit_moments
from headwise.partial import Moments, Partial, join_moments, merge
from headwise.problem import Terms
from headwise.schedule import Segment
from headwise.sums import DISTANCE, ENTROPY, MOMENTS, Sums, room

HEADROOM = 20.0  # how far above its base a logit may rise: exp(20) is far from overflow


class Forward(Loop):
    """Output and statistics of every row."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> None:
        super().__init__(q, k, v, terms)
        self.wants = wants
        self.sums = room(q, v, wants)
        self.key_moments = KeyMoments(self.blocks)
        self.numbers = torch.arange(k.shape[2], device=k.device, dtype=self.blocks.wide)

    def run(self) -> Sums:
        """Every row, unit by unit."""
        for unit in self.schedule.units():
            self.key_moments.clear()
            for rows in self.schedule.row_blocks():
                self.finish(unit, rows, _Rows(self, unit, rows).run())
        return self.sums

    def finish(self, unit: Unit, rows: slice, seen: _Rows) -> None:
        """Divide, and write the rows' results."""
        sums, part = self.sums, seen.part
        part = part if self.terms.sinks is None else replace(part, sinks=self.sinks(unit, part.total))
        weight = part.weight()
        self.put(unit, rows, sums.out, part.values.mul_(weight[..., None]))
        self.put(unit, rows, sums.lse, part.lse())
        self.put(unit, rows, sums.max_logit, part.maximum)
        if self.wants & ENTROPY:
            self.put(unit, rows, sums.entropy, part.entropy())
        if self.wants & DISTANCE:
            self.put(unit, rows, sums.distance, seen.reach() * weight)
        if self.wants & MOMENTS:
            count, mean, spread = seen.moments
            self.put(unit, rows, sums.visible, count)
            self.put(unit, rows, sums.logit_mean, mean)
            self.put(unit, rows, sums.logit_var, spread / count.clamp_min(1))

    def sinks(self, unit: Unit, like: Tensor) -> Tensor:
        """The sink of each row, (heads, G·R)."""
        assert self.terms.sinks is not None
        sinks = self.terms.sinks.to(like.dtype).unflatten(0, (self.blocks.heads, -1))
        five = self.blocks.five(unit, like[..., None])[..., 0]  # (b, h, G, R)
        return sinks[unit.h0 : unit.h1, :, None].expand_as(five).reshape(like.shape)


class _Rows:
    """One block of rows on its way over the keys."""

    def __init__(self, loop: Forward, unit: Unit, rows: slice) -> None:
        self.loop, self.unit, self.rows = loop, unit, rows
        self.q = loop.blocks.queries(unit, rows)
        zero = self.q.new_zeros(self.q.shape[:-1])
        self.part = Partial(
            zero,
            zero - torch.inf,
            zero,
            self.q.new_zeros(*zero.shape, loop.v.shape[-1]),
            zero if loop.wants & ENTROPY else None,
            zero if loop.wants & DISTANCE else None,
        )
        self.moments: Moments = zero, zero, zero
        self.limit: Tensor | None = None  # logits up to here can be summed on the part's base
        # Distances are counted from a key near the rows, so that small ones stay exact.
        self.origin = rows.start + loop.blocks.k.shape[2] - loop.blocks.q.shape[3]

    def run(self) -> _Rows:
        """Meet every key that some of the rows see."""
        for segment in self.loop.schedule.segments(self.unit, self.rows):
            self.meet(segment)
        return self

    def meet(self, segment: Segment) -> None:
        """Merge the block of these keys into the part."""
        loop, unit, rows = self.loop, self.unit, self.rows
        k = loop.blocks.keys(unit, segment.columns)
        s = loop.logits(unit, rows, segment, self.q, k)
        clean = loop.clean and not segment.masked
        if loop.wants & MOMENTS:
            self.count_moments(segment, s, clean)
        maximum = s.amax(-1)
        shared = self.limit is not None and bool((maximum <= self.limit).all())
        base = self.part.base
        if not shared:
            base = maximum if clean else maximum.masked_fill(maximum == -torch.inf, 0)
        s.sub_(base[..., None])
        weight = torch.exp(s, out=loop.buffer(1, *s.shape))
        total = weight.sum(-1)
        shifted = reach = None
        if loop.wants & ENTROPY:
            s = s if clean else s.masked_fill_(s == -torch.inf, 0)
            shifted = s.mul_(weight).sum(-1)
        if loop.wants & DISTANCE:
            reach = torch.matmul(weight, self.origin - loop.numbers[segment.columns])
        if loop.terms.seed is not None:
            kept = loop.blocks.keep(unit, rows, segment.columns)
            weight.mul_(kept).mul_(1 / (1 - loop.terms.dropout))
        v = loop.values(unit, segment.columns)
        if shared:
            self.add(maximum, total, torch.baddbmm(self.part.values, weight, v), shifted, reach)
        else:
            block = Partial(base, maximum, total, torch.bmm(weight, v), shifted, reach)
            self.part = block if self.limit is None else merge(self.part, block)
            self.limit = self.part.base + HEADROOM
            if not clean:  # a row that saw nothing yet has no base to share
                self.limit.masked_fill_(self.part.maximum == -torch.inf, -torch.inf)

    def add(
        self,
        maximum: Tensor,
        total: Tensor,
        values: Tensor,
        shifted: Tensor | None,
        reach: Tensor | None,
    ) -> None:
        """`merge` where the base is the part's own: sums add up. `values` are summed already."""
        part = self.part
        self.part = Partial(
            part.base,
            torch.maximum(part.maximum, maximum),
            part.total + total,
            values,
            None if shifted is None or part.shifted is None else part.shifted + shifted,
            None if reach is None or part.reach is None else part.reach + reach,
        )

    def count_moments(self, segment: Segment, s: Tensor, clean: bool) -> None:
        """Mean and variance of the logits: from the keys' own where that is possible."""
        if clean and self.loop.terms.plain:
            if segment.columns.start == segment.stretch.start:  # once for the whole stretch
                new = self.loop.key_moments.of_rows(self.unit, segment.stretch, self.q)
                self.moments = join_moments(self.moments, new)
        else:
            self.moments = join_moments(self.moments, logit_moments(s))

    def reach(self) -> Tensor:
        """Σ exp(s - base) (i - j), (heads, G·R)."""
        blocks, part = self.loop.blocks, self.part
        assert part.reach is not None
        first_key = self.loop.terms.first_key
        above = self.unit.of(blocks.position)[..., self.rows] - (first_key + self.origin)
        total = blocks.five(self.unit, part.total[..., None])[..., 0]
        return part.reach + (total * above).view_as(part.reach)
