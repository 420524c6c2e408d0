"""The drawn maps of an input: tiles on demand, and an overview of every head."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.apps.look.readers.reader import Report, silent
from headwise.apps.look.scene import Group, Head, Input
from headwise.maps import TILE, Cells, How

KEPT = 256 << 20
"""Bytes of tiles to keep; the least recently used go first."""


class PackedCells(NamedTuple):
    """Cells of a map, row by row, as they are sent: two bytes each."""

    cells: bytes
    rows: int
    columns: int

    @staticmethod
    def of(weights: Tensor) -> PackedCells:
        """Pack weights (rows, columns) as little-endian float16 of log2(weight), -inf for 0.

        A float16 of the weight itself would end at 6e-8. Its logarithm is right to 0.3 % down to
        1e-5, and to 3 % at the smallest weight that a float32 can hold.

        >>> PackedCells.of(torch.tensor([[1.0, 0.5, 0.0]])).cells.hex(" ", 2)
        '0000 00bc 00fc'
        """
        cells = weights.detach().to("cpu", torch.float32).log2_().to(torch.float16)
        packed = cells.contiguous().view(torch.uint8).numpy().tobytes()
        return PackedCells(packed, *weights.shape)

    @staticmethod
    def of_shares(numbers: Tensor, largest: float) -> PackedCells:
        """Pack signed numbers (rows, columns) as float16 of their share of the largest magnitude.

        >>> PackedCells.of_shares(torch.tensor([[3.0, -1.5, 0.0]]), 3.0).cells.hex(" ", 2)
        '003c 00b8 0000'
        """
        shares = numbers.detach().to("cpu", torch.float32) / (largest or 1.0)
        packed = shares.to(torch.float16).contiguous().view(torch.uint8).numpy().tobytes()
        return PackedCells(packed, *numbers.shape)

    def weights(self) -> Tensor:
        """Unpack the cells into weights (rows, columns), float32.

        >>> PackedCells.of(torch.tensor([[1.0, 0.25, 0.0]])).weights()
        tensor([[1.0000, 0.2500, 0.0000]])
        """
        logarithms = torch.frombuffer(bytearray(self.cells), dtype=torch.float16)
        return logarithms.float().exp2_().view(self.rows, self.columns)


@dataclass
class TileCache:
    """Packed cells by what they show; the least recently used are dropped first."""

    most: int = KEPT
    entries: OrderedDict[tuple[object, ...], PackedCells] = field(default_factory=OrderedDict)
    size: int = 0
    lock: Lock = field(default_factory=Lock)

    def get(self, key: tuple[object, ...], make: Callable[[], PackedCells]) -> PackedCells:
        """The cells of this key; made if they are not in the cache."""
        with self.lock:
            if key in self.entries:
                self.entries.move_to_end(key)
                return self.entries[key]
        cells = make()  # two threads may make the same; the second one's is kept
        with self.lock:
            before = self.entries.pop(key, None)
            self.size += len(cells.cells) - (len(before.cells) if before else 0)
            self.entries[key] = cells
            while self.size > self.most and len(self.entries) > 1:
                _, old = self.entries.popitem(last=False)
                self.size -= len(old.cells)
        return cells


@dataclass
class Atlas:
    """The drawn maps of one input. After `prepare`, level 0 of every head is kept for good."""

    input: Input
    cache: TileCache = field(default_factory=TileCache)
    overviews: dict[tuple[str, str, How], PackedCells] = field(default_factory=dict)
    received_sums: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def prepare(self, report: Report = silent) -> Atlas:
        """Draw every head once, so that the page can show all of them at once."""
        heads = [(group, head) for group in self.input.groups for head in group.heads]
        for done, (group, head) in enumerate(heads):
            report("drawing the heads", done / len(heads))
            for how in HOWS:
                self.overviews[group.id, head.name, how] = PackedCells.of(
                    head.map.tile(0, 0, 0, how)
                )
        return self

    def tile(
        self, group: Group, head: Head, level: int, x: int, y: int, how: How, drop: int = 0
    ) -> PackedCells:
        """A tile as `AttentionMap.tile` gives it; weights on the first `drop` keys count as 0."""

        def whole() -> PackedCells:
            return PackedCells.of(head.map.tile(level, x, y, how))

        def dropped() -> PackedCells:
            weights = self.tile(group, head, level, x, y, how).weights()
            return PackedCells.of(without_first(head, weights, level, x, y, how, drop))

        head.map.grid(level)  # raises for a level that does not exist
        if x * TILE * cell_width(head, level) >= drop:
            drop = 0
        key = (group.id, head.name, level, x, y, how)
        if drop:
            return self.cache.get((*key, drop), dropped)
        overview = self.overviews.get((group.id, head.name, how)) if level == 0 else None
        return overview or self.cache.get(key, whole)

    def thumbnail(
        self, group: Group, head: Head, size: int, how: How, drop: int = 0
    ) -> PackedCells:
        """The whole map in at most size × size cells."""

        def shrunk() -> PackedCells:
            whole = self.tile(group, head, 0, 0, 0, how, drop)
            cell, (_, _, rows, columns) = cell_width(head, 0), head.map.shape
            weights = shrink(whole.weights(), -2, size, cell, rows, how)
            return PackedCells.of(shrink(weights, -1, size, cell, columns, how))

        return self.cache.get((group.id, head.name, "thumbnail", size, how, drop), shrunk)

    def received(self, group: Group, head: Head) -> Tensor:
        """The weight that each key receives from all rows together, (M,)."""
        key = group.id, head.name
        if key not in self.received_sums:
            self.received_sums[key] = head.map.received()[0, 0].cpu()
        return self.received_sums[key]


HOWS: tuple[How, How] = ("mean", "max")


def cell_width(head: Head, level: int) -> int:
    """The number of rows, and of keys, in a cell of a level."""
    width: int = 1 << (head.map.levels - 1 - level)
    return width


def without_first(
    head: Head, weights: Tensor, level: int, x: int, y: int, how: How, drop: int
) -> Tensor:
    """A tile (rows, columns) whose cells exclude the first `drop` keys."""
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
    if inner < right:  # the one cell that the edge cuts
        part = head.map[0, 0, first:last, drop:right]
        strip = Cells.every(last - first, cell).pooled(part, -2, slice(0, last - first), how)
        column = strip.sum(-1) if how == "mean" else strip.amax(-1)
        if how == "mean":
            counts = torch.tensor(Cells.every(last - first, cell).widths, device=column.device)
            column = column / (counts * (right - inner))
        weights[:, (inner - left) // cell] = column.to(weights)
    return weights


def shrink(weights: Tensor, axis: int, size: int, cell: int, length: int, how: How) -> Tensor:
    """Join cells of `cell` positions each, the last of the remainder, to at most `size` cells."""
    cells = Cells.evenly(weights.shape[axis], size)
    whole = slice(0, weights.shape[axis])
    if how == "max":
        return cells.pooled(weights, axis, whole, how)
    counts = torch.tensor(Cells.every(length, cell).widths, dtype=weights.dtype)
    counts = counts if axis == -1 else counts[:, None]
    return cells.pooled(weights * counts, axis, whole, how) / cells.pooled(counts, axis, whole, how)
