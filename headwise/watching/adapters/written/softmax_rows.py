"""The rows of a softmax, followed weight by weight until all of them have met values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.watching.adapters.written.product_axes import Equation

Move = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
"""A function that moved, padded or cut weights, and its arguments after the weights."""


def replayed(moves: Sequence[Move], x: Tensor) -> Tensor:
    """A tensor after the same moves; it may lie in memory otherwise than the one that was moved."""
    for function, given, options in moves:
        x = (Tensor.reshape if function is Tensor.view else function)(x, *given, **options)
    return x


@dataclass(frozen=True, eq=False)
class RowProduct:
    """A product of weights with values: its rows, of any number of axes (R, ...), over K keys."""

    row: Tensor  # (R, ...): the number of the softmax's row; -1 if it has no weight
    weights: Tensor  # (R, ..., K): of the softmax
    values: Tensor  # (R|1, ..., K, D)
    asking: tuple[bool, ...]  # True for the axes of rows that share their keys: queries
    order: tuple[int, ...]  # the axes of rows as the product's result has them, -1 for D

    def scaled(self, out: Tensor, factor: Tensor) -> Tensor:
        """The product's result with each row multiplied by a factor (R, ...)."""
        sizes = [1 if n < 0 else factor.shape[n] for n in self.order]
        return out * factor.permute([n for n in self.order if n >= 0]).reshape(sizes)

    def index(self, axis: int) -> Tensor:
        """The number of each row along one of their axes, to be broadcast to (R, ...)."""
        sizes = [size if n == axis else 1 for n, size in enumerate(self.row.shape)]
        return torch.arange(self.row.shape[axis], device=self.row.device).reshape(sizes)

    def chunked(self, asking: int, chunks: Sequence[int]) -> Tensor:
        """The values as (L, C, K, D): the axis of chunks, if there is one, after all others."""
        values = self.values.select(asking, 0).unsqueeze(-3)
        for chunk in chunks:
            values = values.squeeze(-3).movedim(chunk - (chunk > asking), -3)
        return values.reshape(-1, *values.shape[-3:])

    def along(self, coordinate: Tensor) -> list[bool]:
        """True for each axis of rows along which a coordinate (R, ...) differs."""
        found, there = [], self.row >= 0
        for axis, size in enumerate(self.row.shape):
            both = there.narrow(axis, 0, size - 1) & there.narrow(axis, 1, size - 1)
            found.append(size > 1 and bool((coordinate.diff(dim=axis).ne(0) & both).any()))
        return found


@dataclass(eq=False)
class SoftmaxRows:
    """The rows of one softmax, and the products in which their weights met values."""

    logits: Tensor  # (rows ..., K): its keys last
    axis: int  # where its keys were
    products: list[RowProduct] = field(default_factory=list)
    out: Tensor | None = None  # (rows ..., D): the sum of the products
    _used: Tensor | None = None  # (rows ..., K) bool: the weights that took part
    _mass: Tensor | None = None  # (rows ...): their sum

    @property
    def missing(self) -> int:
        """The number of weights that have not met values."""
        used = 0 if self._used is None else int(self._used.sum())
        return self.logits.numel() - used

    @property
    def shown(self) -> Tensor:
        """The logits, without rows whose weights the model set to 0 after the softmax."""
        assert self._mass is not None
        if bool(((self._mass > 0) & (self._mass < 0.9)).any()):
            raise ValueError("some weights of a row were set to 0 after its softmax")
        return self.logits.masked_fill((self._mass == 0)[..., None], -torch.inf)

    def add_product(
        self,
        p: Tensor | None,
        moves: Sequence[Move],
        values: Tensor,
        equation: Equation,
        out: Tensor,
    ) -> None:
        """Weights met values: ValueError if the product is not that of rows of the softmax.

        `p` are the weights after these moves and without dropout, None if they are not known.
        """
        first, second = equation.first, equation.second
        summed = [x for x in first if x in second and x not in equation.out]
        rows = [x for x in first if x not in summed]
        width = [x for x in second if x not in first]
        if len(summed) != 1 or len(width) != 1 or sorted(equation.out) != sorted(rows + width):
            raise ValueError("the product with its values sums over more than their keys")
        into = [first.index(x) for x in (*rows, *summed)]
        number = self._followed(moves).permute(into)  # (R, ..., K)
        known = number > 0
        row = (number - 1).div(self.logits.shape[-1], rounding_mode="floor")
        row = row.masked_fill(~known, -1)
        if bool(((row != row.amax(-1, keepdim=True)) & known).any()):
            raise ValueError("the product with its values sums over several rows")
        values = values.permute([second.index(x) for x in (*rows, *summed, *width) if x in second])
        for axis, x in enumerate(rows):
            values = values if x in second else values.unsqueeze(axis)
        sizes = zip(rows, row.shape, values.shape, strict=False)
        asking = tuple(x not in second or size > keys == 1 for x, size, keys in sizes)
        if not any(asking):
            raise ValueError("each of its weights has values of its own")
        weights = self.logits.softmax(-1, dtype=_wide(self.logits)).flatten()
        weights = weights[(number - 1).clamp_min(0).long()].masked_fill(~known, 0)
        p = weights if p is None else p.permute(into)
        _check(p, weights)
        order = tuple(rows.index(x) if x in rows else -1 for x in equation.out)
        found = RowProduct(row.amax(-1), weights, values, asking, order)
        there = [equation.out.index(x) for x in (*rows, *width)]
        mass = p.sum(-1, dtype=weights.dtype)
        self._add(found, number[known] - 1, mass, out.permute(there))

    def _followed(self, moves: Sequence[Move]) -> Tensor:
        """The number of the weight at each place, from 1, after these moves; 0 where one padded."""
        x = self.logits
        dtype = torch.int32 if x.numel() < 2**31 else torch.int64
        number = torch.arange(1, x.numel() + 1, dtype=dtype, device=x.device)
        return replayed(moves, number.view(x.shape).movedim(-1, self.axis))

    def _add(self, found: RowProduct, numbers: Tensor, mass: Tensor, out: Tensor) -> None:
        rows = self.logits.shape[:-1]
        if self._used is None or self._mass is None or self.out is None:
            self._used = out.new_zeros(self.logits.shape, dtype=torch.bool)
            self._mass = mass.new_zeros(rows)
            self.out = out.new_zeros(*rows, out.shape[-1], dtype=_wide(out))
        before = self.missing
        self._used.view(-1)[numbers.long()] = True
        if before - self.missing != numbers.numel():
            raise ValueError("some of its weights are multiplied with values more than once")
        there = found.row >= 0
        row = found.row[there].long()
        self._mass.view(-1).index_add_(0, row, mass[there])
        self.out.flatten(0, -2).index_add_(0, row, out[there].to(self.out.dtype))
        self.products.append(found)

    def spread(self, product: RowProduct, value: Tensor) -> Tensor:
        """A value of each row of a product (R, ...) as one of each row of the softmax."""
        there = product.row >= 0
        found = value.new_zeros(self.logits.shape[:-1])
        found.view(-1)[product.row[there].long()] = value[there]
        return found

    def coordinates(self, product: RowProduct) -> list[Tensor]:
        """The place of each row of a product (R, ...) along each axis of the softmax's rows."""
        found, row = [], product.row
        for size in reversed(self.logits.shape[:-1]):
            found.append(row % size)
            row = row.div(size, rounding_mode="floor")
        return found[::-1]


def _check(p: Tensor, weights: Tensor) -> None:
    """Raise ValueError unless p (..., K) are these weights; rows of zeros were hidden later."""
    kind = torch.finfo(p.dtype)
    apart = (p - weights).abs()
    wrong = apart > (4 * kind.eps + 1e-5) * weights + kind.smallest_normal
    wrong &= (p != 0).any(-1, keepdim=True)
    if bool(wrong.any()):
        off = float(apart[wrong].max())
        raise ValueError(f"the weights that met its values are not its softmax: off by {off:.2g}")


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
