"""One block of the score matrix (some rows by some keys of some heads) and its gradient.

Blocks keep grouped heads together: the G query heads that share a key head are G·R rows of one
matrix product, so K and V are never repeated. A block's logits are (heads, G·R, C), viewed as
(b, h, G, R, C) wherever something is added to them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise import dropout
from headwise.core.intervals import inside
from headwise.core.logits import added
from headwise.core.problem import Terms

ADDITIVE_BUDGET = 1 << 21  # elements of the (rows, keys, width) tanh of additive scores


@dataclass(frozen=True)
class Unit:
    """The batch entries [b0, b1) and key heads [h0, h1) that a block works on together."""

    b0: int
    b1: int
    h0: int
    h1: int

    def of(self, tensor: Tensor) -> Tensor:
        """The unit's part of a (B|1, Hkv|1, ...) tensor; axes of size one stay as they are."""
        if tensor.shape[0] > 1:
            tensor = tensor[self.b0 : self.b1]
        return tensor[:, self.h0 : self.h1] if tensor.shape[1] > 1 else tensor

    def flat(self, tensor: Tensor) -> Tensor:
        """The unit's part of a (B, Hkv, ...) tensor, batch and heads in one axis."""
        return tensor[self.b0 : self.b1, self.h0 : self.h1].flatten(0, 1)


class Blocks:
    """A problem's logits, block by block. q (B, Hq, N, D), k (B, Hkv, M, D)."""

    def __init__(self, q: Tensor, k: Tensor, terms: Terms) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.heads, self.group = k.shape[1], q.shape[1] // k.shape[1]
        self.q, self.k, self.terms = self.grouped(q), k, terms
        per_head = self.grouped
        self.intervals = (
            None if terms.intervals is None else self._grouped_intervals(terms.intervals)
        )
        self.dense = None if terms.dense is None else per_head(terms.dense)
        self.bias = None if terms.bias is None else per_head(terms.bias)
        self.position = terms.position[:, None, None, :]  # (B|1, 1, 1, N)
        self.columns = torch.arange(k.shape[2], device=k.device, dtype=torch.int32)
        numbers = torch.arange(q.shape[1], device=q.device)
        self.numbers = per_head(numbers[None, :, None, None])  # of the query heads
        self.additive = self._heads_only(terms.additive)  # (1, Hkv, G, D)

    def grouped(self, tensor: Tensor) -> Tensor:
        """(B|1, Hq|1, ...) as (B|1, Hkv|1, G|1, ...)."""
        if tensor.shape[1] == 1 and self.heads * self.group != 1:
            return tensor[:, :, None]
        grouped: Tensor = tensor.unflatten(1, (self.heads, self.group))
        return grouped

    def _grouped_intervals(self, intervals: Tensor) -> Tensor:
        """(P, 2, B|1, Hq|1, N) as (2P, B|1, Hkv|1, G|1, N)."""
        flat = intervals.flatten(0, 1)
        if flat.shape[2] == 1:
            return flat[:, :, :, None]
        grouped: Tensor = flat.unflatten(2, (self.heads, self.group))
        return grouped

    def _heads_only(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.unflatten(0, (self.heads, self.group))[None]

    def queries(self, unit: Unit, rows: slice) -> Tensor:
        """These rows' queries, times the scale, (heads, G·R, D)."""
        q = unit.of(self.q)[..., rows, :].to(self.wide)
        q = q * self.terms.scale if self.additive is None else q
        return q.flatten(0, 1).flatten(1, 2)

    def keys(self, unit: Unit, columns: slice) -> Tensor:
        """These keys, (heads, C, D)."""
        return unit.flat(self.k[..., columns, :]).to(self.wide)

    def raw(self, unit: Unit, q: Tensor, k: Tensor, out: Tensor | None = None) -> Tensor:
        """scale · score before the cap, (heads, G·R, C); q from `queries`, k from `keys`."""
        if self.additive is None:
            if out is None:
                return torch.bmm(q, k.transpose(1, 2))
            return torch.bmm(q, k.transpose(1, 2), out=out)
        weight = self._row_weights(unit, q)
        s = q.new_empty(q.shape[0], q.shape[1], k.shape[1]) if out is None else out
        for part in _row_parts(q, k):
            pairs = (q[:, part, None, :] + k[:, None, :, :]).tanh_()  # (heads, rows, C, D)
            s[:, part] = torch.einsum("hrcd,hrd->hrc", pairs, weight[:, part])
        return s

    def capped_and_biased(self, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        """Cap and bias, in place: cap(s) + bias. s is (heads, G·R, C)."""
        if self.terms.plain:
            return s
        cap = self.terms.softcap
        if cap:
            s.div_(cap).tanh_().mul_(cap)
        bias = None
        if self.bias is not None:
            bias = _cut(_cut(unit.of(self.bias), -2, rows), -1, columns)
        five, place = self.five(unit, s), self._place(unit, rows, columns)
        for term in added(self.terms, bias, unit.of(self.numbers), *place, s.dtype):
            five.add_(term)
        return s

    def visible(self, unit: Unit, rows: slice, columns: slice) -> Tensor | None:
        """The mask of the block, broadcastable to (b, h, G, R, C); None if there is no mask."""
        if self.dense is not None:
            return _cut(_cut(unit.of(self.dense), -2, rows), -1, columns)
        if self.intervals is None:
            return None
        bounds = (
            (unit.of(first)[..., rows, None], unit.of(last)[..., rows, None])
            for first, last in self.intervals.unflatten(0, (-1, 2))
        )
        return inside(bounds, self.columns[columns])

    def _place(self, unit: Unit, rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
        """The positions of queries (b|1, 1, 1, R, 1) and keys (C,) in the whole sequence."""
        position = unit.of(self.position)[..., rows, None]
        return position, self.columns[columns] + self.terms.first_key

    def distance(self, unit: Unit, rows: slice, columns: slice) -> Tensor:
        """i - j in positions of the whole sequence, (b|1, 1, 1, R, C)."""
        position, keys = self._place(unit, rows, columns)
        return position - keys

    def keep(self, unit: Unit, rows: slice, columns: slice) -> Tensor:
        """The weights that dropout keeps, bool (heads, G·R, C)."""
        device, seed = self.q.device, self.terms.seed
        assert seed is not None
        batch = torch.arange(unit.b0, unit.b1, device=device)[:, None, None, None]
        position, keys = self._place(unit, rows, columns)
        place = dropout.row_hash(
            seed, batch, unit.of(self.numbers)[..., 0], position[..., 0].long()
        )
        return dropout.keep(place, keys.long(), self.terms.dropout).flatten(0, 1).flatten(1, 2)

    def five(self, unit: Unit, s: Tensor) -> Tensor:
        """A view of a block (heads, G·R, C) as (b, h, G, R, C)."""
        return s.view(unit.b1 - unit.b0, unit.h1 - unit.h0, self.group, -1, s.shape[-1])

    def _row_weights(self, unit: Unit, q: Tensor) -> Tensor:
        """The additive weight of each of the G·R rows, (heads, G·R, D)."""
        assert self.additive is not None
        weight = unit.of(self.additive).to(q.dtype)  # (1, h, G, D)
        rows = q.shape[1] // self.group
        weight = weight[..., None, :].expand(unit.b1 - unit.b0, -1, -1, rows, -1)
        return weight.flatten(0, 1).flatten(1, 2)

    def raw_backward(
        self, unit: Unit, q: Tensor, k: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of q (before the scale), of k and of the additive weight of each row."""
        if self.additive is None:
            return torch.bmm(grad, k), torch.bmm(grad.transpose(1, 2), q), None
        weight = self._row_weights(unit, q)
        grad_q, grad_k, grad_w = torch.empty_like(q), torch.zeros_like(k), torch.empty_like(q)
        for part in _row_parts(q, k):
            pairs = (q[:, part, None, :] + k[:, None, :, :]).tanh_()
            grad_w[:, part] = torch.einsum("hrc,hrcd->hrd", grad[:, part], pairs)
            slope = (
                pairs.square_().neg_().add_(1).mul_(grad[:, part, :, None])
            )  # (heads, rows, C, D)
            grad_q[:, part] = slope.sum(2) * weight[:, part]
            grad_k += torch.einsum("hrcd,hrd->hcd", slope, weight[:, part])
        return grad_q, grad_k, grad_w


def _cut(tensor: Tensor, axis: int, part: slice) -> Tensor:
    """The part of an axis; an axis of size one is broadcast and stays."""
    if tensor.shape[axis] == 1:
        return tensor
    return tensor.narrow(axis, part.start, part.stop - part.start)


def _row_parts(q: Tensor, k: Tensor) -> list[slice]:
    """Row slices whose tanh over all keys and the width stays within the budget."""
    rows = max(1, ADDITIVE_BUDGET // max(1, q.shape[0] * k.shape[1] * q.shape[2]))
    return [slice(r, min(r + rows, q.shape[1])) for r in range(0, q.shape[1], rows)]
