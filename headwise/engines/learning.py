"""Eager calls with gradients: one node of autograd around what an engine computes.

PyTorch's own wrapper of operators takes the processor longer than a fused kernel takes a GPU, so
compiled code alone goes through it. Both ways have the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import RowResults
from headwise.engines.contract import Results
from headwise.engines.gradients import RowGradients, without_gradients

TENSORS = 12  # the arguments of an operator that are tensors: q, k, v, and the first of Terms
BIAS = 7  # the place of the bias among them
FOR_BACKWARD = 5  # the first fields of `RowResults`, which a backward needs
MOST_KEPT = 1 << 16  # numbers of terms per prepared call: longer calls take longer than they do


Sources = tuple[int | Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class LearningCall:
    """A call that gradients follow: its forward, and all that its backward needs to know."""

    run: Callable[..., tuple[Tensor | None, ...]]  # `RowResults`, and further results
    sources: Sources  # of an operator's tensors: a place among the call's, a constant, or None
    numbers: tuple[Any, ...]  # the operator's other arguments
    differentiate: Callable[..., list[Tensor | None]]  # `Operators.gradients_by_place`

    def __call__(self, *given: Tensor | None) -> tuple[Any, ...]:
        """Return what `run` returns for these tensors, as results that have gradients."""
        found: tuple[Any, ...] = LearningNode.apply(*given, self)  # type: ignore[no-untyped-call]
        return found


class LearningNode(torch.autograd.Function):
    """The node of autograd. Only out, lse and entropy have gradients."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor | None, ...]:
        *tensors, call = given
        found: tuple[Tensor | None, ...] = call.run(*tensors)
        ctx.call, ctx.given = call, len(tensors)
        ctx.save_for_backward(*tensors, *found[:FOR_BACKWARD])
        ctx.mark_non_differentiable(*without_gradients(found))
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        call: LearningCall = ctx.call
        saved, count = ctx.saved_tensors, ctx.given
        tensors: list[Tensor | None] = [saved[x] if isinstance(x, int) else x for x in call.sources]
        bias = call.sources[BIAS]
        learns = isinstance(bias, int) and tensors[BIAS] is not None and ctx.needs_input_grad[bias]
        found = call.differentiate(
            tensors, call.numbers, saved[count:], RowGradients.of(grads), learns
        )
        result: list[Tensor | None] = [None] * (count + 1)
        for source, grad in zip(call.sources, found, strict=True):
            if isinstance(source, int):
                result[source] = grad
        return tuple(result)


def tensor_sources(
    terms: Terms, given: tuple[Tensor, ...], fixed: tuple[Tensor, ...]
) -> Sources | None:
    """Return where later calls of a description find an operator's tensors; None if nowhere.

    `given` are the tensors of the first call, q, k and v first; `fixed` those of its terms that
    all calls of its description share.
    """
    found: list[int | Tensor | None] = [0, 1, 2]
    for x in cast("tuple[Tensor | None, ...]", terms[: TENSORS - 3]):
        place = next((at for at, one in enumerate(given) if one is x), None)
        known = x is None or x.numel() == 0 or any(x is one for one in (*given, *fixed))
        if not known:
            return None
        found.append(x if place is None else place)
    return tuple(found)


def fixed_terms(problem: Problem, terms: Terms) -> tuple[Tensor, ...]:
    """Return the tensors of a problem's terms that all calls of its description share.

    Under a mask without tensors these are intervals and positions, which are kept if they are
    small. In a CUDA graph nothing may be kept: its memory is the graph's, and holds nothing before
    a replay.
    """
    if problem.mask is not None and problem.mask.tensors():
        return ()
    if problem.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return ()
    found = tuple(x for x in (terms.intervals, terms.position) if x is not None)
    return found if sum(x.numel() for x in found) <= MOST_KEPT else ()


def results_by_name(found: tuple[Any, ...], names: tuple[str, ...]) -> Results:
    """Return out and the named statistics, from `RowResults` and `names_beyond_rows` after them."""
    rows, rest = RowResults(*found[:_ROWS]), iter(found[_ROWS:])
    known = ((getattr(rows, x) if x in RowResults._fields else next(rest)) for x in names)
    return (rows.out, *known)


def names_beyond_rows(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of statistics that `RowResults` has not."""
    return tuple(name for name in names if name not in RowResults._fields)


_ROWS = len(RowResults._fields)
