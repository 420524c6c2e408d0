"""The drawn maps of an input: tiles on demand, and an overview of every head that is kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.look.packing import decoded, encoded
from headwise.look.readers.reader import Report, silent
from headwise.look.scene import Group, Head, Input
from headwise.maps.attention_map import TILE
from headwise.maps.pooling import Cells, How

KEPT = 256 << 20
"""How many bytes of tiles are kept, the longest unused forgotten first."""


class Picture(NamedTuple):
    """Cells of a map, row by row, as they travel."""

    cells: bytes
    rows: int
    columns: int

    @staticmethod
    def of(weights: Tensor) -> Picture:
        """The picture of weights (rows, columns)."""
        return Picture(encoded(weights), *weights.shape)

    def weights(self) -> Tensor:
        """The cells as weights again, to some per mille."""
        return decoded(self.cells, self.rows, self.columns)


@dataclass
class Kept:
    """Pictures by what they are of; the longest unused are forgotten first."""

    most: int = KEPT
    pictures: OrderedDict[tuple[object, ...], Picture] = field(default_factory=OrderedDict)
    size: int = 0
    lock: Lock = field(default_factory=Lock)

    def get(self, key: tuple[object, ...], make: Callable[[], Picture]) -> Picture:
        """The picture of this key, made where it is not kept."""
        with self.lock:
            if key in self.pictures:
                self.pictures.move_to_end(key)
                return self.pictures[key]
        picture = make()  # two threads may make the same: the second one's is kept
        with self.lock:
            before = self.pictures.pop(key, None)
            self.size += len(picture.cells) - (len(before.cells) if before else 0)
            self.pictures[key] = picture
            while self.size > self.most and len(self.pictures) > 1:
                _, old = self.pictures.popitem(last=False)
                self.size -= len(old.cells)
        return picture


@dataclass
class Atlas:
    """The pictures of one input. Made ready, level 0 of every head is at hand for good."""

    input: Input
    kept: Kept = field(default_factory=Kept)
    overviews: dict[tuple[str, str, How], Picture] = field(default_factory=dict)
    received_sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def prepare(self, report: Report = silent) -> Atlas:
        """Draw every head once, so that all of them can be seen at a glance."""
        heads = [(group, head) for group in self.input.groups for head in group.heads]
        for done, (group, head) in enumerate(heads):
            report("drawing the heads", done / len(heads))
            for how in HOWS:
                self.overviews[group.id, head.name, how] = Picture.of(head.map.tile(0, 0, 0, how))
        return self

    def tile(
        self, group: Group, head: Head, level: int, x: int, y: int, how: How, drop: int = 0
    ) -> Picture:
        """A tile of `AttentionMap.tile`; the weights on the first `drop` keys count as 0."""

        def whole() -> Picture:
            return Picture.of(head.map.tile(level, x, y, how))

        def dropped() -> Picture:
            weights = self.tile(group, head, level, x, y, how).weights()
            return Picture.of(without_first(head, weights, level, x, y, how, drop))

        head.map.grid(level)  # says which levels there are, where this is none
        if x * TILE * cell_width(head, level) >= drop:
            drop = 0
        key = (group.id, head.name, level, x, y, how)
        if drop:
            return self.kept.get((*key, drop), dropped)
        overview = self.overviews.get((group.id, head.name, how)) if level == 0 else None
        return overview or self.kept.get(key, whole)

    def thumbnail(self, group: Group, head: Head, size: int, how: How, drop: int = 0) -> Picture:
        """The whole map in at most size × size cells."""

        def shrunk() -> Picture:
            picture = self.tile(group, head, 0, 0, 0, how, drop)
            cell, (_, _, rows, columns) = cell_width(head, 0), head.map.shape
            weights = shrink(picture.weights(), -2, size, cell, rows, how)
            return Picture.of(shrink(weights, -1, size, cell, columns, how))

        return self.kept.get((group.id, head.name, "thumbnail", size, how, drop), shrunk)

    def received(self, group: Group, head: Head) -> Tensor:
        """What each key receives from all rows together, (M,)."""
        key = group.id, head.name
        if key not in self.received_sums:
            self.received_sums[key] = head.map.received()[0, 0].cpu()
        return self.received_sums[key]


HOWS: tuple[How, How] = ("mean", "max")


def cell_width(head: Head, level: int) -> int:
    """How many rows, and how many keys, a cell of a level holds."""
    width: int = 1 << (head.map.levels - 1 - level)
    return width


def without_first(
    head: Head, weights: Tensor, level: int, x: int, y: int, how: How, drop: int
) -> Tensor:
    """A tile (rows, columns) whose cells leave out the first `drop` keys."""
    cell = cell_width(head, level)
    _, _, rows, keys = head.map.shape
    side = TILE * cell
    first, last = y * side, min(rows, (y + 1) * side)
    left = x * side
    right = min(keys, left + -(-(drop - left) // cell) * cell, (x + 1) * side)
    inner = right if drop >= right else right - cell  # before it every cell is empty
    inner = max(left, inner)
    weights = weights.clone()
    weights[:, : (inner - left) // cell] = 0
    if inner < right:  # the one cell that the edge goes through
        part = head.map[0, 0, first:last, drop:right]
        strip = Cells.every(last - first, cell).pooled(part, -2, slice(0, last - first), how)
        column = strip.sum(-1) if how == "mean" else strip.amax(-1)
        if how == "mean":
            counts = torch.tensor(Cells.every(last - first, cell).widths, device=column.device)
            column = column / (counts * (right - inner))
        weights[:, (inner - left) // cell] = column.to(weights)
    return weights


def shrink(weights: Tensor, axis: int, size: int, cell: int, length: int, how: How) -> Tensor:
    """Cells of `cell` positions each, the last of what is left, joined to at most `size`."""
    cells = Cells.evenly(weights.shape[axis], size)
    whole = slice(0, weights.shape[axis])
    if how == "max":
        return cells.pooled(weights, axis, whole, how)
    counts = torch.tensor(Cells.every(length, cell).widths, dtype=weights.dtype)
    counts = counts if axis == -1 else counts[:, None]
    return cells.pooled(weights * counts, axis, whole, how) / cells.pooled(counts, axis, whole, how)
