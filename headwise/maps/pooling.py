"""The division of an attention map's axis into the cells of a picture."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

How = Literal["mean", "max"]
"""How the weights of a cell become one number."""

Gather = Literal["sum", "max"]
"""How the effects of a cell become one number: "max" is the one of the largest magnitude."""

Reduction = Literal["mean", "max", "sum", "furthest"]
"""How backends reduce a cell; "furthest" is the number furthest from zero, with its sign."""


class Cells:
    """The cells of an axis: cell c holds the positions edges[c] <= i < edges[c + 1]."""

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = edges  # a range if all are equally wide: there may be one cell per position
        self.width = edges.step if isinstance(edges, range) else 0  # 0 if they differ
        if not self.width and self.widths:
            regular = len(set(self.widths[:-1])) <= 1 and self.widths[-1] <= self.widths[0]
            self.width = self.widths[0] if regular else 0

    @cached_property
    def widths(self) -> list[int]:
        """The number of positions of each cell."""
        return [last - first for first, last in pairwise(self.edges)]

    @property
    def widest(self) -> int:
        """The most positions of a cell."""
        return self.width or max(self.widths)

    @staticmethod
    def evenly(n: int, size: int) -> Cells:
        """At most `size` cells, with edges at floor(c · n / size)."""
        size = min(n, size)
        return Cells([c * n // size for c in range(size + 1)] if size else [0])

    @staticmethod
    def every(n: int, width: int) -> Cells:
        """Cells of `width` positions; the last holds what is left."""
        return Cells(range(0, n + 1, width) if n % width == 0 else [*range(0, n, width), n])

    def __len__(self) -> int:
        return len(self.edges) - 1

    def touched(self, part: slice) -> slice:
        """The cells that overlap the part."""
        first = bisect_right(self.edges, part.start) - 1
        return slice(first, bisect_left(self.edges, part.stop))

    def pooled(self, x: Tensor, axis: int, part: slice, how: Reduction) -> Tensor:
        """The sum or an extreme entry of each touched cell along axis -1 or -2 of x."""
        width = self.width
        if width == 1:
            return x
        if width and part.start % width == part.stop % width == 0:
            cells: Tensor = x.unflatten(axis, (-1, width))
            return _reduced(cells, axis, how)
        # Cell by cell: a product with zeros and ones would spread a NaN to all cells.
        parts = x.split(self._cut(part), axis)
        return torch.stack([_reduced(cell, axis, how) for cell in parts], axis)

    def _cut(self, part: slice) -> list[int]:
        """The number of each touched cell's positions that are in the part."""
        cells = self.touched(part)
        inner = self.edges[cells.start + 1 : cells.stop]
        return [last - first for first, last in pairwise([part.start, *inner, part.stop])]


def joined(found: Tensor, more: Tensor, how: Reduction) -> Tensor:
    """Cells of which two parts were reduced apart: sums, or extreme entries."""
    if how in ("mean", "sum"):
        return found + more
    if how == "max":
        return torch.maximum(found, more)
    return torch.where(more.abs() > found.abs(), more, found)


def _reduced(cells: Tensor, axis: int, how: Reduction) -> Tensor:
    if how in ("mean", "sum"):
        return cells.sum(axis)
    highest = cells.amax(axis)
    if how == "max":
        return highest
    lowest = cells.amin(axis)
    return torch.where(highest >= -lowest, highest, lowest)
