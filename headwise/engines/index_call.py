"""The loss that teaches an indexer which keys attention looks at, as operators."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms, without_autocast
from headwise.core.row_sums import LOG_TOTAL, RowTotals
from headwise.engines.failures import Kernels
from headwise.engines.fused import fused
from headwise.engines.operators import CALL, define, differentiable
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.index_loop import (
    Indexer,
    IndexLoop,
    RowLoss,
    gradients,
    row_loss,
)

LOSS: Kernels = "an indexer's loss"
_TERMS = len(Terms._fields)
INDEXER = "Tensor index_q, Tensor index_k, Tensor index_weights, Tensor? selected"


def _indexer(given: tuple[Any, ...]) -> tuple[Terms, Indexer, Tensor | None]:
    *index, selected = given[_TERMS : _TERMS + 4]
    return Terms(*given[:_TERMS]), Indexer(*index), selected


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    terms, index, selected = _indexer(given)
    fast = fused("index_call", "loss", LOSS, q, index.k, terms, q, k, terms, index, selected)
    if fast is not None:
        losses, totals = fast
        return *losses, totals.lse, totals.base, totals.log_total
    with without_autocast(q.device):
        loop = IndexLoop(q, k, terms, index, selected)
        found = Forward(q, k, k[..., :0], terms, LOG_TOTAL, loop.selection).run()
        assert found.log_total is not None
        loop.divide_by(found.totals())
        return *row_loss(loop), found.lse, found.max_logit, found.log_total


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, rows, _ = q.shape
    row = (q.new_empty(batch, rows, dtype=wide) for _ in range(3))
    head = (q.new_empty(batch, heads, rows, dtype=wide) for _ in range(3))
    return *row, *head


def _backward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    grad, rows, totals = given[-1], RowLoss(*given[-7:-4]), RowTotals.known(*given[-4:-1])
    terms, index, selected = _indexer(given)
    call = q, k, terms, index, selected, totals, rows, grad
    found = fused("index_call", "gradients", LOSS, q, index.k, terms, *call)
    if found is None:
        with without_autocast(q.device):
            loop = IndexLoop(q, k, terms, index, selected)
            loop.divide_by(totals)
            found = gradients(loop, rows, grad)
    return [grad.to(x.dtype) for grad, x in zip(found, index, strict=True)]


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    made = given[_TERMS : _TERMS + 3]
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in made]


index_loss = define(
    "index_loss",
    f"({CALL}, {INDEXER}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
"""`RowLoss`, and lse, max_logit and log_total of the main heads."""

_BACKWARD = define(
    "index_loss_backward",
    f"({CALL}, {INDEXER}, Tensor divergence, Tensor mass, Tensor index_lse, Tensor lse, "
    "Tensor max_logit, Tensor log_total, Tensor grad) -> Tensor[]",
    _backward,
    _backward_shapes,
)
differentiable(index_loss, _BACKWARD, tuple(range(3 + _TERMS, 6 + _TERMS)), "index_loss")
