"""The streaming engine's backward: recomputes the weights, one block at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.logits import relative_index
from headwise.core.problem import Terms
from headwise.core.schedule import Segment
from headwise.engines.gradients import BackwardInputs, Gradients, sink_share
from headwise.engines.streaming.forward_loop import row_totals
from headwise.engines.streaming.loop import LN_2, NO_WEIGHT, Loop, Selection


class Backward(Loop):
    """Gradients of every input from those of out, lse and entropy."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        given: BackwardInputs,
        selection: Selection | None = None,
    ) -> None:
        super().__init__(q, k, v, terms, selection)
        wide = self.blocks.wide
        self.grad_out, self.grad_entropy, totals = given.grad_out, given.grad_entropy, given.totals
        if totals.base is totals.lse and totals.coarse():
            totals = row_totals(q, k, terms)
        self.divide_by(totals)
        products = (given.grad_out.to(wide) * given.out.to(wide)).sum(-1)
        share = sink_share(terms.sinks, totals)
        self.row, self.grad_sinks = given.row_constants(products, share)
        self.scale = terms.scale if terms.additive is None else 1.0
        self.grad_q = q.new_empty(q.shape, dtype=torch.promote_types(q.dtype, given.out.dtype))
        self.grad_k = torch.zeros_like(k, dtype=wide)
        self.grad_v = torch.zeros_like(v, dtype=wide)
        self.grad_additive = _zeros(terms.additive, wide)
        self.grad_bias = _zeros(terms.bias if given.bias_learns else None, wide)
        self.grad_slopes = _zeros(terms.slopes, wide)
        self.grad_relative = _zeros(terms.relative, wide)

    def run(self) -> Gradients:
        """Return the gradients of every input."""
        for unit, rows in self.row_blocks():
            q = self.blocks.queries(unit, rows)
            grad_q = torch.zeros_like(q)
            grad_out = self.per_row(unit, rows, self.grad_out).to(self.blocks.wide)
            for segment in self.schedule.segments(unit, rows):
                grad_q += self.block(unit, rows, segment, q, grad_out)
            self.put(unit, rows, self.blocks.grouped(self.grad_q), grad_q * self.scale)
        return Gradients(
            self.grad_q, self.grad_k, self.grad_v, self.grad_additive, self.grad_bias,
            self.grad_slopes, self.grad_relative, self.grad_sinks,
        )  # fmt: skip

    def block(
        self, unit: Unit, rows: slice, segment: Segment, q: Tensor, grad_out: Tensor
    ) -> Tensor:
        """Add the block's share to every gradient; return the gradient of its queries."""
        columns = segment.columns
        k, v = self.k[:, columns], self.v[:, columns]
        s, slope = self.logits_and_slope(unit, rows, segment, q)
        s = self.hide(unit, s, self.seen(unit, rows, segment, s))
        s = self.log_weights(unit, rows, s)
        p = torch.exp2(s, out=self.buffer(1, s.shape))
        grad_p = torch.bmm(grad_out, v.transpose(1, 2), out=self.buffer(2, s.shape))
        kept = None
        if self.terms.seed is not None:
            kept = self.blocks.keep(unit, rows, columns).to(p.dtype).div_(1 - self.terms.dropout)
            grad_p.mul_(kept)
        self.add(unit, columns, self.grad_v, grad_out, p if kept is None else p * kept)
        grad_p.sub_(self.per_row(unit, rows, self.row)[..., None])
        if self.grad_entropy is not None:
            share = self.per_row(unit, rows, self.grad_entropy)[..., None] * LN_2
            grad_p.sub_(s.clamp_min_(NO_WEIGHT).mul_(share))
        grad_s = grad_p.mul_(p)
        self.added_terms(unit, rows, columns, grad_s)
        grad_s = grad_s if slope is None else grad_s.mul_(slope)
        grad_q, grad_k, grad_weight = self.blocks.raw_backward(unit, q, k, grad_s)
        target = self.grad_k[unit.b0 : unit.b1, unit.h0 : unit.h1, columns]
        target.add_(grad_k.view(target.shape))
        if grad_weight is not None:
            assert self.grad_additive is not None
            five = self.blocks.five(unit, grad_weight).sum((0, 3))  # (h, G, D)
            self.heads_of(unit, self.grad_additive).add_(five)
        return grad_q

    def logits_and_slope(
        self, unit: Unit, rows: slice, segment: Segment, q: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The logits, and the derivative of the cap if there is one."""
        cap = self.terms.softcap
        if not cap:
            return self.logits(unit, rows, segment, q), None
        k = self.k[:, segment.columns]
        s = self.blocks.raw(unit, q, k, out=self.buffer(0, (*q.shape[:2], k.shape[1])))
        slope = 1 - torch.tanh(s / cap).square_()
        return self.blocks.capped_and_biased(unit, rows, segment.columns, s), slope

    def add(self, unit: Unit, columns: slice, target: Tensor, rows: Tensor, weight: Tensor) -> None:
        """target[columns] += weightᵀ rows."""
        place = target[unit.b0 : unit.b1, unit.h0 : unit.h1, columns]
        place += torch.bmm(weight.transpose(1, 2), rows).view(place.shape)

    def added_terms(self, unit: Unit, rows: slice, columns: slice, grad_s: Tensor) -> None:
        """Add to the gradients of the terms that were added to the logits."""
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
            distance = self.blocks.distance(unit, rows, columns)[:, 0, 0]  # (b|1, R, C)
            index = relative_index(self.grad_relative, distance)
            pairs = five.permute(1, 2, 0, 3, 4)  # (h, G, b, R, C)
            index = index.expand(pairs.shape[2:]).flatten().expand(*pairs.shape[:2], -1)
            target = self.heads_of(unit, self.grad_relative)
            target.scatter_add_(-1, index, pairs.flatten(2))

    def heads_of(self, unit: Unit, tensor: Tensor) -> Tensor:
        """The unit's part of a (Hq, ...) tensor as (h, G, ...)."""
        heads: Tensor = tensor.unflatten(0, (self.blocks.heads, self.blocks.group))
        return heads[unit.h0 : unit.h1]


def _zeros(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor, dtype=dtype).contiguous()
