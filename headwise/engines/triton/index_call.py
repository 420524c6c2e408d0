"""An indexer's loss by Triton's kernels, and the gradients of its tensors."""

from __future__ import annotations

from collections.abc import Callable

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

Index = tuple[Tensor, ...]  # queries (B, Hi, N, Di), keys (B, M, Di), weights (B, Hi, N)


def loss(q: Tensor, k: Tensor, terms: Terms, index: Index) -> tuple[Losses, RowTotals]:
    """The rows' losses, and the totals of the main heads."""
    call = map_call(q, k, terms)
    totals = log_totals(call)
    figures = q.new_empty(3, q.shape[0], q.shape[2], dtype=torch.float32)
    rows = Losses(figures[0], figures[1], figures[2], None)
    _Launch(call, totals, index, rows).rows(None, None)
    return rows, totals


def gradients(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    index: Index,
    totals: RowTotals,
    rows: tuple[Tensor, Tensor, Tensor],
    grad: Tensor,
) -> Index:
    """The gradients of the indexer's tensors, float32, from those of the rows' losses (B, N)."""
    launch = _Launch(map_call(q, k, terms), totals, index, Losses(*rows, grad.float()))
    found = (
        torch.zeros_like(index[0], dtype=torch.float32, memory_format=torch.contiguous_format),
        torch.empty_like(index[1], dtype=torch.float32, memory_format=torch.contiguous_format),
        torch.zeros_like(index[2], dtype=torch.float32, memory_format=torch.contiguous_format),
    )
    launch.rows(found[0], found[2])
    launch.keys(found[1])
    return found


class _Launch:
    """The launches of one call."""

    def __init__(self, call: Operands, totals: RowTotals, index: Index, rows: Losses) -> None:
        self.call, self.totals = call, known_totals(totals)
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
            fit("effects", wide, itemsize, card(q.device), launch)
