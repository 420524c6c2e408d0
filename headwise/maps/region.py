"""A rectangle of an attention map: some rows by some keys of some heads, as views of the call.

Masks, biases and positions are cut with it, so a rectangle is a map like any other.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import EllipsisType
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.maps.effect_totals import Whole

Index = SupportsIndex | slice | EllipsisType


class Box(NamedTuple):
    """The batch entries, query heads, query rows and keys of a rectangle."""

    batch: range
    heads: range
    rows: range
    keys: range

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.batch), len(self.heads), len(self.rows), len(self.keys)

    def aligned(self, group: int) -> Iterator[Box]:
        """The box in parts: within one key head, or whole groups of `group` query heads."""
        first, last = self.heads.start, self.heads.stop
        if first == last:
            yield self
        while first < last:
            inside = first % group or last - first < group
            ahead = group - first % group if inside else (last - first) // group * group
            stop = min(last, first + ahead)
            yield self._replace(heads=range(first, stop))
            first = stop


@dataclass(frozen=True, eq=False)
class Region:
    """All that the numbers of a rectangle depend on besides the totals of its rows.

    They are weights, or with `grad` the effects of edges.
    """

    q: Tensor  # (B, Hq, N, D)
    k: Tensor  # (B, Hkv, M, D)
    v: Tensor  # (B, Hkv, M, Dv), Dv = 0: not known
    terms: Terms
    norms: Tensor | None = None  # (B, Hkv, M, 1): factors of each key's weights
    grad: Tensor | None = None  # (B, Hq, N, Dv): the gradient of the output
    whole: Whole | None = None  # of the rows, if they see keys that are not in k

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that the numbers depend on, by name."""
        named = {"q": self.q, "k": self.k, "v": self.v, "grad": self.grad, **self.terms._asdict()}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    @property
    def box(self) -> Box:
        """All of it."""
        batch, heads, rows, _ = self.q.shape
        return Box(range(batch), range(heads), range(rows), range(self.k.shape[2]))

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // max(1, self.k.shape[1])

    @property
    def wide(self) -> torch.dtype:
        """The dtype that weights are computed in."""
        return torch.promote_types(self.q.dtype, torch.float32)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros (B, Hkv, G, *shape), a number or more for every query head."""
        batch, heads = self.k.shape[:2]
        return self.q.new_zeros(batch, heads, self.group, *shape, dtype=self.wide)

    def at(self, rows: Tensor) -> Region:
        """These query rows of all heads, by their numbers."""
        return replace(
            self,
            q=self.q.index_select(2, rows),
            grad=None if self.grad is None else self.grad.index_select(2, rows),
            whole=None if self.whole is None else self.whole.at(rows),
            terms=_at_rows(self.terms, rows),
        )

    def cut(self, box: Box) -> Region:
        """A rectangle of this one, whose heads must be `aligned`."""
        batch, heads, rows, keys = box
        shared = range(0)  # the key heads
        if heads:
            shared = range(heads[0] // self.group, heads[-1] // self.group + 1)

        def of_keys(x: Tensor) -> Tensor:
            return _cut(x, batch, shared, keys, None)

        def of_rows(x: Tensor) -> Tensor:
            return _cut(x, batch, heads, rows)

        return replace(
            self,
            q=_cut(self.q, batch, heads, rows, None),
            grad=None if self.grad is None else of_rows(self.grad),
            whole=None if self.whole is None else self.whole.cut(of_rows),
            k=of_keys(self.k),
            v=of_keys(self.v),
            norms=None if self.norms is None else of_keys(self.norms),
            terms=_cut_terms(self.terms, box, self.k.shape[2]),
        )


def _at_rows(terms: Terms, rows: Tensor) -> Terms:
    def of_rows(x: Tensor | None, axis: int) -> Tensor | None:
        return x if x is None or x.shape[axis] == 1 else x.index_select(axis, rows)

    position = of_rows(terms.position, -1)
    assert position is not None
    return terms._replace(
        intervals=of_rows(terms.intervals, -1),
        dense=of_rows(terms.dense, -2),
        bias=of_rows(terms.bias, -2),
        position=position,
    )


def indexed(index: Index | tuple[Index, ...], shape: tuple[int, ...]) -> list[int | range]:
    """A Python index as one int or range per axis; ValueError for anything else."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [number for number, part in enumerate(given) if part is Ellipsis]
    missing = len(shape) - len(given) + len(dots)
    if missing < 0 or len(dots) > 1:
        raise ValueError(f"{len(given)} indices for a map of {len(shape)} axes")
    place = dots[0] if dots else len(given)
    given[place : place + 1] = [slice(None)] * missing
    return [_indexed(part, size) for part, size in zip(given, shape, strict=True)]


def _indexed(part: Index, size: int) -> int | range:
    if isinstance(part, slice):
        if part.step not in (None, 1):
            raise ValueError(f"a slice of a map takes no step, and {part.step!r} was given")
        first, last, _ = part.indices(size)
        return range(first, max(first, last))
    several = isinstance(part, Tensor) and part.ndim > 0
    if isinstance(part, bool | EllipsisType) or several or not hasattr(part, "__index__"):
        raise ValueError(f"{part!r} is not an integer or a slice")
    number = operator.index(part)
    if not -size <= number < size:
        raise ValueError(f"index {number} is out of range for an axis of size {size}")
    return number % size


def written(index: object) -> str:
    """An index as it was written between the brackets."""
    if isinstance(index, tuple):
        return ", ".join(map(written, index))
    if isinstance(index, slice):
        bounds = ["" if x is None else str(x) for x in (index.start, index.stop, index.step)]
        return ":".join(bounds if index.step is not None else bounds[:2])
    return "..." if index is Ellipsis else repr(index)


def _cut_terms(terms: Terms, box: Box, keys_before: int) -> Terms:
    batch, heads, rows, keys = box

    def of_heads(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[heads.start : heads.stop]

    def of_pairs(x: Tensor | None) -> Tensor | None:
        return None if x is None else _broadcast_cut(x, batch, heads, rows, keys)

    intervals = terms.intervals
    if intervals is not None:
        intervals = _broadcast_cut(intervals, None, None, batch, heads, rows)
        if len(keys) != keys_before:
            intervals = (intervals - keys.start).clamp_(0, len(keys))
    return terms._replace(
        additive=of_heads(terms.additive),
        intervals=intervals,
        dense=of_pairs(terms.dense),
        position=_broadcast_cut(terms.position, batch, rows),
        bias=of_pairs(terms.bias),
        slopes=of_heads(terms.slopes),
        relative=of_heads(terms.relative),
        sinks=of_heads(terms.sinks),
        first_key=terms.first_key + keys.start,
    )


def _cut(tensor: Tensor, *parts: range | None) -> Tensor:
    """The tensor's part, one range per axis; None for the whole axis."""
    for axis, part in enumerate(parts):
        if part is not None and len(part) != tensor.shape[axis]:
            tensor = tensor.narrow(axis, part.start, len(part))
    return tensor


def _broadcast_cut(tensor: Tensor, *parts: range | None) -> Tensor:
    """The tensor's part; axes of size one stay as they are."""
    kept = (None if tensor.shape[axis] == 1 else part for axis, part in enumerate(parts))
    return _cut(tensor, *kept)
