"""The loops of the streaming engine: forward and backward over the blocks of a problem.

Forward is `Partial` and `merge` and nothing else. Backward recomputes each block's weights from
lse. Both work in two or three buffers of a block's size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from headwise.block import Blocks, Unit
from headwise.partial import Partial, merge
from headwise.problem import Terms
from headwise.schedule import BLOCK, Schedule, Segment, Shape
from headwise.sums import DISTANCE, ENTROPY, MOMENTS, Sums, room


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


class Forward(Loop):
    """Output and statistics of every row."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> None:
        super().__init__(q, k, v, terms)
        self.wants = wants
        self.sums = room(q, v, wants)
        self._key_moments: dict[tuple[Unit, int, int], tuple[Tensor, Tensor]] = {}

    def run(self) -> Sums:
        for unit in self.schedule.units():
            self._key_moments.clear()
            for rows in self.schedule.row_blocks():
                q = self.blocks.queries(unit, rows)
                part = None
                for segment in self.schedule.segments(unit, rows):
                    block = self.block(unit, rows, segment, q)
                    part = block if part is None else merge(part, block)
                self.finish(unit, rows, self.nothing(q) if part is None else part)
        return self.sums

    def block(self, unit: Unit, rows: slice, segment: Segment, q: Tensor) -> Partial:
        """Attention of the block's rows over its keys."""
        k = self.blocks.keys(unit, segment.columns)
        s = self.logits(unit, rows, segment, q, k)
        clean = self.clean and not segment.masked
        maximum = s.amax(-1)
        base = maximum if clean else maximum.masked_fill(maximum == -torch.inf, 0)
        count = mean = spread = None
        if self.wants & MOMENTS:
            count, mean, spread = self.moments(unit, segment, q, k, s, clean)
        s.sub_(base[..., None])
        weight = torch.exp(s, out=self.buffer(1, *s.shape))
        total = weight.sum(-1)
        shifted = reach = None
        if self.wants & ENTROPY:
            s = s if clean else s.masked_fill_(s == -torch.inf, 0)
            shifted = s.mul_(weight).sum(-1)
        if self.wants & DISTANCE:
            reach = self.reach(unit, rows, segment, weight, total)
        if self.terms.seed is not None:
            kept = self.blocks.keep(unit, rows, segment.columns)
            weight.mul_(kept).mul_(1 / (1 - self.terms.dropout))
        values = torch.bmm(weight, self.values(unit, segment.columns))
        return Partial(maximum, total, values, shifted, reach, count, mean, spread)

    def reach(
        self, unit: Unit, rows: slice, segment: Segment, weight: Tensor, total: Tensor
    ) -> Tensor:
        """Σ weight (i - j), counted from the block's first key so that small distances stay exact."""
        first, count = segment.columns.start, weight.shape[-1]
        steps = torch.arange(count, device=weight.device, dtype=weight.dtype)
        position = unit.of(self.blocks.position)[..., rows] - (self.terms.first_key + first)
        from_first = self.blocks.five(unit, total[..., None])[..., 0] * position
        return from_first.view_as(total) - torch.matmul(weight, steps)

    def moments(
        self, unit: Unit, segment: Segment, q: Tensor, k: Tensor, s: Tensor, clean: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Count, mean and Σ (s - mean)² of the visible logits of each row."""
        if clean and self.terms.plain:  # from the keys' own moments: no work for each pair
            mean_key, scatter = self.key_moments(unit, segment.columns, k)
            count = s.new_full(s.shape[:-1], s.shape[-1])
            mean = torch.matmul(q, mean_key[..., None])[..., 0]
            return count, mean, (torch.bmm(q, scatter) * q).sum(-1)
        seen = s != -torch.inf
        count = seen.sum(-1).to(s.dtype)
        mean = s.masked_fill(~seen, 0).sum(-1) / count.clamp_min(1)
        return count, mean, (s - mean[..., None]).masked_fill_(~seen, 0).square_().sum(-1)

    def key_moments(self, unit: Unit, columns: slice, k: Tensor) -> tuple[Tensor, Tensor]:
        """The keys' mean (heads, D) and scatter matrix about it (heads, D, D)."""
        place = unit, columns.start, columns.stop
        if place not in self._key_moments:
            mean = k.mean(1)
            centred = k - mean[:, None]
            self._key_moments[place] = mean, torch.bmm(centred.transpose(1, 2), centred)
        return self._key_moments[place]

    def sinks(self, unit: Unit, like: Tensor) -> Tensor | None:
        """The sink of each row, (heads, G·R)."""
        if self.terms.sinks is None:
            return None
        sinks = self.terms.sinks.to(like.dtype).unflatten(0, (self.blocks.heads, -1))[unit.h0 : unit.h1]
        five = self.blocks.five(unit, like[..., None])[..., 0]  # (b, h, G, R)
        return sinks[..., None].expand_as(five).reshape(like.shape)

    def nothing(self, q: Tensor) -> Partial:
        """Rows that no key was found for."""
        zero = q.new_zeros(q.shape[:-1])
        values = q.new_zeros(*q.shape[:-1], self.v.shape[-1])
        return Partial(zero - torch.inf, zero, values, zero, zero, zero, zero, zero)

    def finish(self, unit: Unit, rows: slice, part: Partial) -> None:
        """Divide, and write the rows' results."""
        sums = self.sums
        part = replace(part, sinks=self.sinks(unit, part.total))
        self.put(unit, rows, sums.out, part.finish())
        self.put(unit, rows, sums.lse, part.lse())
        self.put(unit, rows, sums.max_logit, part.maximum)
        if self.wants & ENTROPY:
            self.put(unit, rows, sums.entropy, part.entropy())
        if self.wants & DISTANCE:
            assert part.reach is not None
            self.put(unit, rows, sums.distance, part.reach * part.weight())
        if self.wants & MOMENTS:
            assert part.count is not None and part.mean is not None and part.spread is not None
            self.put(unit, rows, sums.visible, part.count)
            self.put(unit, rows, sums.logit_mean, part.mean)
            self.put(unit, rows, sums.logit_var, part.spread / part.count.clamp_min(1))


class Backward(Loop):
    """Gradients of every input from those of out, lse and entropy."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        out: Tensor,
        lse: Tensor,
        entropy: Tensor,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> None:
        super().__init__(q, k, v, terms)
        wide = self.blocks.wide
        self.grad_out, self.grad_entropy = grad_out, grad_entropy
        self.lse = lse.masked_fill(lse == -torch.inf, 0)  # such a row's weights are 0 all the same
        # ds = p (dP - row): all of a row's constants, gathered once
        row = (grad_out.to(wide) * out.to(wide)).sum(-1)
        row = row if grad_lse is None else row - grad_lse
        sink_share = self.sink_share(lse)
        if grad_entropy is not None:
            seen = 1.0 if sink_share is None else 1 - sink_share
            row = row + grad_entropy * (entropy + 1 - seen)
        self.row = row
        self.grad_sinks = self._grad_sinks(sink_share, entropy)
        self.grad_q = torch.empty_like(q)
        self.grad_k = torch.zeros_like(k, dtype=wide)
        self.grad_v = torch.zeros_like(v, dtype=wide)
        self.grad_additive = _zeros(terms.additive, wide)
        self.grad_bias = _zeros(terms.bias, wide)
        self.grad_slopes = _zeros(terms.slopes, wide)
        self.grad_relative = _zeros(terms.relative, wide)

    def sink_share(self, lse: Tensor) -> Tensor | None:
        """The weight on the sink, (B, Hq, N)."""
        if self.terms.sinks is None:
            return None
        return torch.exp(self.terms.sinks.to(lse.dtype)[:, None] - lse)

    def _grad_sinks(self, share: Tensor | None, entropy: Tensor) -> Tensor | None:
        if share is None:
            return None
        # For the sink dP = 0 and there is no value; its entropy term is the sum over visible keys.
        row = -self.row
        if self.grad_entropy is not None:
            row = row + self.grad_entropy
        return (share * row).sum((0, 2))

    def run(self) -> None:
        for unit in self.schedule.units():
            for rows in self.schedule.row_blocks():
                q = self.blocks.queries(unit, rows)
                grad_q = torch.zeros_like(q)
                grad_out = self.per_row(unit, rows, self.grad_out).to(self.blocks.wide)
                for segment in self.schedule.segments(unit, rows):
                    grad_q += self.block(unit, rows, segment, q, grad_out)
                scale = self.terms.scale if self.terms.additive is None else 1.0
                self.put(unit, rows, self.grad_q, grad_q * scale)

    def block(
        self, unit: Unit, rows: slice, segment: Segment, q: Tensor, grad_out: Tensor
    ) -> Tensor:
        """Add the block's share to every gradient; return that of its queries."""
        columns = segment.columns
        k, v = self.blocks.keys(unit, columns), self.values(unit, columns)
        s, slope = self.logits_and_slope(unit, rows, segment, q, k)
        s.sub_(self.per_row(unit, rows, self.lse)[..., None])  # log p
        p = torch.exp(s, out=self.buffer(1, *s.shape))
        grad_p = torch.bmm(grad_out, v.transpose(1, 2), out=self.buffer(2, *s.shape))
        kept = None
        if self.terms.seed is not None:
            kept = self.blocks.keep(unit, rows, columns).to(p.dtype).div_(1 - self.terms.dropout)
            grad_p.mul_(kept)
        self.add(unit, columns, self.grad_v, grad_out, p if kept is None else p * kept)
        grad_p.sub_(self.per_row(unit, rows, self.row)[..., None])
        if self.grad_entropy is not None:
            share = self.per_row(unit, rows, self.grad_entropy)[..., None]
            s = s if self.clean and not segment.masked else s.masked_fill_(s == -torch.inf, 0)
            grad_p.sub_(s.mul_(share))
        grad_s = grad_p.mul_(p)
        if segment.masked or not self.clean:  # what is not seen gives no gradient, whatever v held
            grad_s.masked_fill_(p == 0, 0)
        self.added_terms(unit, rows, columns, grad_s)
        grad_s = grad_s if slope is None else grad_s.mul_(slope)
        grad_q, grad_k, grad_weight = self.blocks.raw_backward(unit, q, k, grad_s)
        target = self.grad_k[unit.b0 : unit.b1, unit.h0 : unit.h1, columns]
        target += grad_k.view(target.shape)
        if grad_weight is not None:
            assert self.grad_additive is not None
            five = self.blocks.five(unit, grad_weight).sum((0, 3))  # (h, G, D)
            self.heads_of(unit, self.grad_additive).add_(five)
        return grad_q

    def logits_and_slope(
        self, unit: Unit, rows: slice, segment: Segment, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The logits, and the derivative of the cap where there is one."""
        cap = self.terms.softcap
        if not cap:
            return self.logits(unit, rows, segment, q, k), None
        shape = q.shape[0], q.shape[1], k.shape[1]
        s = self.blocks.raw(unit, q, k, out=self.buffer(0, *shape))
        slope = 1 - torch.tanh(s / cap).square_()
        return self.bend(unit, rows, segment, s), slope

    def add(
        self, unit: Unit, columns: slice, target: Tensor, rows: Tensor, weight: Tensor
    ) -> None:
        """target[columns] += weightᵀ rows."""
        place = target[unit.b0 : unit.b1, unit.h0 : unit.h1, columns]
        place += torch.bmm(weight.transpose(1, 2), rows).view(place.shape)

    def added_terms(self, unit: Unit, rows: slice, columns: slice, grad_s: Tensor) -> None:
        """Gradients of what was added to the logits after the cap."""
        five = self.blocks.five(unit, grad_s)  # (b, h, G, R, C)
        if self.grad_bias is not None:
            target = unit.of(self.blocks.grouped(self.grad_bias))
            target = target if target.shape[-2] == 1 else target[..., rows, :]
            target = target if target.shape[-1] == 1 else target[..., columns]
            target += five.sum_to_size(target.shape)
        if self.grad_slopes is not None:
            away = self.blocks.distance(unit, rows, columns).abs()
            self.heads_of(unit, self.grad_slopes).sub_((five * away).sum((0, 3, 4)))
        if self.grad_relative is not None:
            index = self.blocks.distance_index(unit, rows, columns)  # (b|1, R, C)
            pairs = five.permute(1, 2, 0, 3, 4)  # (h, G, b, R, C)
            index = index.expand(pairs.shape[2:]).flatten().expand(*pairs.shape[:2], -1)
            target = self.heads_of(unit, self.grad_relative)
            target.scatter_add_(-1, index, pairs.flatten(2))

    def heads_of(self, unit: Unit, tensor: Tensor) -> Tensor:
        """A (Hq, ...) tensor's part as (h, G, ...)."""
        return tensor.unflatten(0, (self.blocks.heads, self.blocks.group))[unit.h0 : unit.h1]


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


def _zeros(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, dtype=dtype).contiguous()
