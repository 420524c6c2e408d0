"""The loss that teaches an indexer which keys attention looks at, block by block.

With T_j the weight of key j summed over the heads of a row, A = Σ T, and I_j the indexer's score,
the divergence of T/A from softmax(I) is (Σ T log T − Σ T I)/A − log A + log Σ exp(I), and its slope
in I_j is softmax(I)_j − T_j/A: one pass over the keys for the loss and one for the gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.problem import Terms
from headwise.core.schedule import Schedule
from headwise.engines.streaming.loop import Loop
from headwise.engines.streaming.selection import Chosen


class Indexer(NamedTuple):
    """What scores keys: Σ_h w_h ReLU(q_h · k_j)."""

    q: Tensor  # (B, Hi, N, Di)
    k: Tensor  # (B, M, Di)
    weights: Tensor  # (B, Hi, N)


class RowLoss(NamedTuple):
    """The divergence of each row, (B, N) each, and what its gradient needs."""

    divergence: Tensor  # 0 for a row that sees no key
    mass: Tensor  # A: Σ T; 0 for a row that sees no key
    index_lse: Tensor  # log Σ exp(I); inf for a row that sees no key


class _Tile(NamedTuple):
    """Some rows by some keys of a batch entry."""

    entry: int
    rows: slice
    columns: slice
    target: Tensor  # (R, C): T, 0 where hidden
    shown: Tensor | None  # (R|1, C) bool: keys that some head sees; None for all
    products: Tensor  # (Hi, R, C): ReLU(q_h · k_j)


class _AllHeads(Schedule):
    """Blocks of all heads of a batch entry, whose weights are summed."""

    def units(self) -> Iterator[Unit]:
        for entry in range(self.shape.batch):
            yield Unit(entry, entry + 1, 0, self.shape.heads)


class IndexLoop(Loop):
    """The blocks of a call, with the weights of all heads added up, and the indexer's products."""

    def __init__(
        self, q: Tensor, k: Tensor, terms: Terms, indexer: Indexer, selected: Tensor | None
    ) -> None:
        selection = None if selected is None else Chosen(selected, 1)
        super().__init__(q, k, k[..., :0], terms, selection)
        dense = terms.dense is not None
        self.schedule = _AllHeads(self.schedule.shape, terms.intervals, dense, q.is_cuda)
        self.indexer = Indexer(*(x.to(self.blocks.wide) for x in indexer))

    def tiles(self) -> Iterator[_Tile]:
        """Every block that the mask does not hide."""
        if not self.blocks.k.shape[2] or not self.blocks.q.shape[3]:
            return
        for unit, rows in self.row_blocks():
            for segment, s, seen in self.segments(unit, rows):
                yield self.tile(unit, rows, segment.columns, s, seen)

    def tile(
        self, unit: Unit, rows: slice, columns: slice, s: Tensor, seen: Tensor | None
    ) -> _Tile:
        """One block: the target and the indexer's products."""
        self.hide(unit, s, seen)
        if self.clean:
            shown = None if seen is None else seen[0].flatten(0, 1).any(0)
        else:  # a bias hides keys too
            shown = (self.blocks.five(unit, s) != -torch.inf)[0].flatten(0, 1).any(0)
        weights = self.blocks.five(unit, self.log_weights(unit, rows, s).exp2_())
        target = weights[0].sum((0, 1))
        index = self.indexer
        products = index.q[unit.b0, :, rows] @ index.k[unit.b0, columns].mT
        return _Tile(unit.b0, rows, columns, target, shown, products.relu_())

    def scores(self, tile: _Tile) -> Tensor:
        """I of a block, (R, C); -inf where hidden."""
        weights = self.indexer.weights[tile.entry, :, tile.rows]
        scores = torch.einsum("hrc,hr->rc", tile.products, weights)
        return scores if tile.shown is None else scores.masked_fill_(~tile.shown, -torch.inf)


def row_loss(loop: IndexLoop) -> RowLoss:
    """The divergence of each row."""
    shape, wide = (loop.indexer.q.shape[0], loop.indexer.q.shape[2]), loop.nothing
    mass, surprise, cross, total = (wide.new_zeros(shape) for _ in range(4))
    highest = wide.new_full(shape, -torch.inf)
    for tile in loop.tiles():
        place = tile.entry, tile.rows
        scores = loop.scores(tile)
        mass[place] += tile.target.sum(-1)
        surprise[place] += torch.xlogy(tile.target, tile.target).sum(-1)
        finite = scores if tile.shown is None else scores.masked_fill(~tile.shown, 0)
        cross[place] += (tile.target * finite).sum(-1)
        top = torch.maximum(highest[place], scores.amax(-1))
        base = top.masked_fill(top == -torch.inf, 0)
        total[place] *= torch.exp(highest[place] - base)
        total[place] += torch.exp(scores - base[:, None]).sum(-1)
        highest[place] = top
    empty = (mass == 0) | (total == 0)
    lse = (highest + total.log()).masked_fill(empty, torch.inf)
    safe = mass.masked_fill(empty, 1)
    divergence = (surprise - cross) / safe - safe.log() + lse
    return RowLoss(divergence.masked_fill(empty, 0), mass.masked_fill(empty, 0), lse)


def gradients(loop: IndexLoop, rows: RowLoss, grad: Tensor) -> Indexer:
    """The gradients of the indexer's tensors from those of the rows, (B, N)."""
    index = loop.indexer
    found = Indexer(*(torch.zeros_like(x) for x in index))
    share = (grad / rows.mass.masked_fill(rows.mass == 0, 1)).masked_fill(rows.mass == 0, 0)
    for tile in loop.tiles():
        place = tile.entry, tile.rows
        slope = torch.exp(loop.scores(tile) - rows.index_lse[place][:, None])
        slope = slope * grad[place][:, None] - tile.target * share[place][:, None]  # (R, C)
        entry, heads = tile.entry, (tile.entry, slice(None), tile.rows)
        found.weights[heads] += torch.einsum("hrc,rc->hr", tile.products, slope)
        each = (tile.products > 0) * slope * index.weights[heads][..., None]  # (Hi, R, C)
        found.q[heads] += each @ index.k[entry, tile.columns]
        found.k[entry, tile.columns] += torch.einsum("hrc,hrd->cd", each, index.q[heads])
    return found
