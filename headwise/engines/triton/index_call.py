"""An indexer's loss by Triton's kernels, and the gradients of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import launching
from headwise.engines.triton.host.map_call import (
    constants,
    flags,
    known_totals,
    log_totals,
    map_call,
)
from headwise.engines.triton.host.marked_rows import marked
from headwise.engines.triton.host.operands import (
    Operands,
    on,
    outer_strides,
    precision,
    tile_side,
    widened,
)
from headwise.engines.triton.host.tile_shapes import Shape, fit
from headwise.engines.triton.kernels.index_loss import Losses, Scorer, index_keys, index_rows
from headwise.engines.triton.kernels.kept_runs import Marks

Index = tuple[Tensor, ...]  # queries (B, Hi, N, Di), keys (B, M, Di), weights (B, Hi, N)


def loss(
    q: Tensor, k: Tensor, terms: Terms, index: Index, selected: Tensor | None
) -> tuple[list[Tensor], RowTotals]:
    """The rows' losses, and the totals of the main heads; `selected` (B|1, 1, N, K) or None."""
    figures, totals = [], []
    for rows, marks in _marked(selected, q, k):
        call = map_call(q[:, :, rows], k, terms.of_rows(rows), marks)
        found = q.new_empty(3, q.shape[0], rows.stop - rows.start, dtype=torch.float32)
        own = log_totals(call)
        losses = Losses(found[0], found[1], found[2], None)
        _Launch(call, own, _of_rows(index, rows), losses).rows(None, None)
        figures.append(found)
        totals.append(own)
    lse, base, log_total = (torch.cat(x, 2) for x in zip(*totals, strict=True))
    return list(torch.cat(figures, 2)), RowTotals(lse, base, log_total)


def gradients(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    index: Index,
    selected: Tensor | None,
    totals: RowTotals,
    losses: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
) -> Index:
    """The gradients of the indexer's tensors, float32, from those of the rows' losses (B, N)."""
    parts: list[Index] = []
    for rows, marks in _marked(selected, q, k):
        call = map_call(q[:, :, rows], k, terms.of_rows(rows), marks)
        own = RowTotals(*(x[:, :, rows] for x in totals))
        some = _of_rows(index, rows)
        given = Losses(*(x[:, rows].contiguous() for x in (*losses, grad.float())))
        launch = _Launch(call, own, some, given)
        found = tuple(x.new_zeros(x.shape, dtype=torch.float32) for x in some)
        launch.rows(found[0], found[2])
        launch.keys(found[1])
        parts.append(found)
    queries, keys, weights = zip(*parts, strict=True)
    return torch.cat(queries, 2), torch.stack(keys).sum(0), torch.cat(weights, 2)


def _marked(selected: Tensor | None, q: Tensor, k: Tensor) -> Iterator[tuple[slice, Marks | None]]:
    """Rows, and the marks of their selected keys, if not all are."""
    if selected is None:
        return iter([(slice(0, q.shape[2]), None)])
    return marked(selected, 1, q.shape[2], k.shape[2])


def _of_rows(index: Index, rows: slice) -> Index:
    return index[0][:, :, rows], index[1], index[2][:, :, rows]


class _Launch:
    """The launches of one call."""

    def __init__(self, call: Operands, totals: RowTotals, index: Index, rows: Losses) -> None:
        self.call = call
        self.totals = known_totals(RowTotals(*(x.contiguous() for x in totals)))
        self.given = Scorer(*(x.contiguous() for x in widened(*index)))
        self.figures = rows
        self.heads = call.q.shape[1], index[0].shape[1]
        wide = index[0].shape[-1]
        self.constants = {
            **flags(call),
            "WIDE": wide,
            "PADDED_WIDE": tile_side(wide),
            "INDEX_PRECISION": precision(self.given.q.dtype),
        }

    def rows(self, grad_q: Tensor | None, grad_weights: Tensor | None) -> None:
        """The losses, or with tensors for them the gradients of index queries and weights."""
        call = self.call

        def launch(shape: Shape) -> None:
            grid = (-(-call.q.shape[2] // shape.rows), 1, call.q.shape[0])
            index_rows[grid](
                call.q, call.k, self.totals, self.given, self.figures, grad_q, grad_weights,
                outer_strides(call.q), outer_strides(call.k), call.given, *call.sizes, *self.heads,
                **constants(shape), **self.constants,
            )  # fmt: skip

        self.fit(launch)

    def keys(self, grad_k: Tensor) -> None:
        """The gradient of the index keys."""
        call = self.call

        def launch(shape: Shape) -> None:
            index_keys[(-(-call.k.shape[2] // shape.keys), 1, call.q.shape[0])](
                call.q, call.k, self.totals, self.given, self.figures, grad_k,
                outer_strides(call.q), outer_strides(call.k), call.given, *call.sizes, *self.heads,
                **constants(shape), **self.constants,
            )  # fmt: skip

        self.fit(launch)

    def fit(self, launch: Callable[[Shape], None]) -> None:
        """Launch with a shape of tiles that fits."""
        q, wide = self.call.q, max(self.call.padded[0], tile_side(self.given.q.shape[-1]))
        itemsize = max(q.itemsize, self.given.q.itemsize)
        with on(q.device), launching("of an indexer's loss"):
            fit("index", wide, itemsize, card(q.device), launch)
