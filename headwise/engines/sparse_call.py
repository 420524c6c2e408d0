"""Attention over the keys that a policy keeps, as operators: Triton's kernels where they can serve,
else streaming loops with a selection.

The weights are those of softmax over the kept keys, and the sinks. Gradients flow as if the other
keys were not there: the choice itself has none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.core.policies import Blocks, Evicted, Indices, Policy, TopK, Window
from headwise.core.problem import Problem, Terms, without_autocast
from headwise.core.row_sums import LOG_TOTAL, RowResults, RowTotals, empty_results
from headwise.engines.fused import fused
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.learning import BIAS
from headwise.engines.operators import (
    CALL,
    LEARNABLE,
    define,
    differentiable,
    gradient_shapes,
    learnable,
)
from headwise.engines.streaming.backward_loop import Backward
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.loop import Selection
from headwise.engines.streaming.selection import (
    Above,
    Band,
    BestBlocks,
    Chosen,
    Columns,
    select,
)

POLICY = "str kind, int[] numbers, int[] amount, Tensor? chosen"
_TERMS = len(Terms._fields)
_POLICY = 4


def attend(problem: Problem, policy: Policy) -> Tensor:
    """The output over the keys that the policy keeps, (B, Hq, N, Dv)."""
    terms = problem.terms()
    found: tuple[Tensor, ...] = _FORWARD(problem.q, problem.k, problem.v, *terms, *_packed(policy))
    return found[0]


def _packed(policy: Policy) -> tuple[str, list[int], list[int], Tensor | None]:
    """A policy as arguments of an operator."""
    if isinstance(policy, TopK):
        return "top", [], _numbers(policy.k), None
    if isinstance(policy, Window):
        return "window", [policy.left, policy.sinks], [], None
    if isinstance(policy, Blocks):
        return f"blocks_{policy.by}", [policy.size], _numbers(policy.count), None
    if isinstance(policy, Indices):
        return "indices", [], [], policy.keys
    return "evicted", [], _numbers(policy.budget), policy.scores


def _unpacked(kind: str, numbers: list[int], amount: list[int], chosen: Tensor | None) -> Policy:
    several = amount[0] if len(amount) == 1 else tuple(amount)
    if kind == "top":
        return TopK(several)
    if kind == "window":
        return Window(*numbers)
    if chosen is None:
        return Blocks(numbers[0], several, kind.removeprefix("blocks_"))  # type: ignore[arg-type]
    return Indices(chosen) if kind == "indices" else Evicted(chosen, several)


def _numbers(amount: int | tuple[int, ...]) -> list[int]:
    return [amount] if isinstance(amount, int) else list(amount)


def _parts(selection: Selection) -> tuple[Tensor | None, Tensor | None]:
    """The tensors of a selection."""
    if isinstance(selection, Above):
        return torch.stack((selection.least, selection.above)), selection.last
    if isinstance(selection, Chosen):
        return selection.numbers, None
    return (selection.some, None) if isinstance(selection, Columns) else (None, None)


def _selection(
    kind: str, numbers: list[int], first: Tensor, second: Tensor, keys: int
) -> Selection:
    """The selection of these tensors, in a call of so many keys."""
    if kind == "top":
        return Above(first[0], first[1], second, tied=bool((second < keys).any()))
    if kind == "window":
        return Band(*numbers)
    return Columns(first) if kind == "evicted" else Chosen(first, *(numbers or [1]))


def _fused(name: str, q: Tensor, k: Tensor, v: Tensor, terms: Terms, *given: Any) -> Any:
    values = v if v.shape[-1] else k  # without values nothing is as wide as the keys
    given = q, k, v, terms, *given
    return fused("kept_call", name, "sparse attention", q, values, terms, *given)


def fused_rows(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, policy: Policy
) -> tuple[RowResults, Tensor | None, Tensor | None] | None:
    """`kept_rows` by Triton's kernels; None where loops must serve."""
    found: tuple[RowResults, Tensor, Tensor | None] | None
    found = _fused("attend", q, k, v, terms, policy, _estimates(q, k, terms, policy))
    return found


def fused_recall(
    q: Tensor, k: Tensor, terms: Terms, policy: Policy
) -> tuple[Tensor, Tensor, RowResults, RowResults] | None:
    """The kept keys, those among as many largest, and the results over both; None as above."""
    found: tuple[Tensor, Tensor, RowResults, RowResults] | None
    given = q, k, terms, policy, _estimates(q, k, terms, policy)
    found = fused("kept_call", "recall", "sparse attention", q, k, terms, *given)
    return found


def _estimates(
    q: Tensor, k: Tensor, terms: Terms, policy: Policy
) -> Callable[[slice], Tensor] | None:
    """The scores of blocks that are not ranked by their true weight, of some rows at a time."""
    if not isinstance(policy, Blocks) or policy.by == "exact":
        return None
    made: list[BestBlocks] = []

    def of_rows(rows: slice) -> Tensor:
        if not made:  # where loops serve, nothing is computed twice
            made.append(BestBlocks(policy, q, k, terms))
        return made[0].estimates_of(rows)

    return of_rows


def all_rows(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> RowResults:
    """The results of every row over all of its keys."""
    found: RowResults | None = _fused("whole", q, k, v, terms)
    return Forward(q, k, v, terms, LOG_TOTAL).run() if found is None else found


def kept_rows(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, policy: Policy
) -> tuple[RowResults, Tensor | None, Tensor | None]:
    """The results of every row over the keys that a policy keeps, and its selection's tensors."""
    found = fused_rows(q, k, v, terms, policy)
    if found is not None:
        return found
    with without_autocast(q.device):
        selection = select(policy, q, k, terms)
        return Forward(q, k, v, terms, LOG_TOTAL, selection).run(), *_parts(selection)


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The results that the backward needs, and the tensors of the selection."""
    terms, policy = Terms(*given[:_TERMS]), _unpacked(*given[_TERMS:])
    rows, *kept = kept_rows(q, k, v, terms, policy)
    assert rows.log_total is not None
    # an operator's results must be tensors of their own
    parts = (q.new_empty(0) if x is None else x.clone() for x in kept)
    return rows.out, rows.lse, rows.max_logit, rows.log_total, *parts


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    kind, numbers, amount, chosen = given[_TERMS:]
    rows: RowResults = empty_results(q, v, LOG_TOTAL)
    assert rows.log_total is not None
    first, second = q.new_empty(0), q.new_empty(0)
    if kind == "top":
        first = rows.lse.new_empty(2, *rows.lse.shape)
        second = torch.empty_like(rows.lse, dtype=torch.int32)
    elif kind.startswith("blocks"):
        most = min(max(amount), -(-k.shape[2] // numbers[0]))
        first = rows.lse.new_empty(*q.shape[:3], most, dtype=torch.int32)
    elif chosen is not None:
        kept = kind == "evicted"
        first = torch.empty_like(chosen, dtype=torch.bool if kept else chosen.dtype)
    return rows.out, rows.lse, rows.max_logit, rows.log_total, first, second


def _backward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    terms = Terms(*given[:_TERMS])
    kind, numbers, _, _ = given[_TERMS : _TERMS + _POLICY]
    out, lse, max_logit, log_total, first, second, grad_out, bias_learns = given[_TERMS + _POLICY :]
    totals = RowTotals.known(lse, max_logit, log_total)
    inputs = BackwardInputs(out, totals, None, grad_out, bias_learns=bias_learns)
    found: Gradients | None = None
    if kind != "window":
        run, last = (numbers or [1])[0], second if kind == "top" else None
        found = _fused("differentiate", q, k, v, terms, inputs, run, first, last)
    if found is None:
        selection = _selection(kind, numbers, first, second, k.shape[2])
        with without_autocast(q.device):
            found = Backward(q, k, v, terms, inputs, selection).run()
    pairs = zip(found, learnable(q, k, v, terms, bias_learns), strict=True)
    return [
        grad.to(x.dtype).contiguous() for grad, x in pairs if grad is not None and x is not None
    ]


_FORWARD = define(
    "sparse",
    f"({CALL}, {POLICY}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _forward_shapes,
)
_BACKWARD = define(
    "sparse_backward",
    f"({CALL}, {POLICY}, Tensor out, Tensor lse, Tensor max_logit, Tensor log_total, Tensor first, "
    "Tensor second, Tensor grad_out, bool bias_learns) -> Tensor[]",
    _backward,
    gradient_shapes,
)
differentiable(_FORWARD, _BACKWARD, LEARNABLE, "sparse", BIAS)
