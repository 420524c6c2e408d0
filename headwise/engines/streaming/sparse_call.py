"""Attention over the keys that a policy keeps: the streaming loops with a selection, as operators.

The weights are those of softmax over the kept keys, and the sinks. Gradients flow as if the other
keys were not there: the choice itself has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.policies import Blocks, Evicted, Indices, Policy, TopK, Window
from headwise.core.problem import Problem, Terms, without_autocast
from headwise.core.row_sums import LOG_TOTAL, RowResults, RowTotals, room
from headwise.engines.operators import CALL, LIBRARY, define
from headwise.engines.second_derivatives import refuse
from headwise.engines.streaming.backward_loop import Backward
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.loop import Selection
from headwise.engines.streaming.selection import Above, Band, Chosen, Columns, select

POLICY = "str kind, int[] numbers, int[] amount, Tensor? chosen"
_TERMS = len(Terms._fields)
_POLICY = 4
_LEARN = (0, 1, 2, 3, 7, 8, 9, 10)  # q, k, v, additive, bias, slopes, relative, sinks


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
        return selection.least, selection.last
    if isinstance(selection, Chosen):
        return selection.numbers, None
    return (selection.some, None) if isinstance(selection, Columns) else (None, None)


def _selection(
    kind: str, numbers: list[int], first: Tensor, second: Tensor, keys: int
) -> Selection:
    """The selection of these tensors, in a call of so many keys."""
    if kind == "top":
        return Above(first, second, tied=bool((second < keys).any()))
    if kind == "window":
        return Band(*numbers)
    return Columns(first) if kind == "evicted" else Chosen(first, *(numbers or [1]))


def _forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    """The results that the backward needs, and the tensors of the selection."""
    terms, policy = Terms(*given[:_TERMS]), _unpacked(*given[_TERMS:])
    with without_autocast(q.device):
        selection = select(policy, q, k, terms)
        rows = Forward(q, k, v, terms, LOG_TOTAL, selection).run()
    assert rows.log_total is not None
    # an operator's results must be tensors of their own
    parts = (q.new_empty(0) if x is None else x.clone() for x in _parts(selection))
    return rows.out, rows.lse, rows.max_logit, rows.log_total, *parts


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    kind, numbers, amount, chosen = given[_TERMS:]
    rows: RowResults = room(q, v, LOG_TOTAL)
    assert rows.log_total is not None
    first, second = q.new_empty(0), q.new_empty(0)
    if kind == "top":
        first = torch.empty_like(rows.lse)
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
    selection = _selection(kind, numbers, first, second, k.shape[2])
    totals = RowTotals.known(lse, max_logit, log_total)
    with without_autocast(q.device):
        loop = Backward(
            q, k, v, terms, out, totals, None, grad_out, None, None, bias_learns, selection
        )
        loop.run()
    found = (
        loop.grad_q, loop.grad_k, loop.grad_v, loop.grad_additive, loop.grad_bias,
        loop.grad_slopes, loop.grad_relative, loop.grad_sinks,
    )  # fmt: skip
    learn = _learnable(q, k, v, terms, bias_learns)
    pairs = zip(found, learn, strict=True)
    return [
        grad.to(x.dtype).contiguous() for grad, x in pairs if grad is not None and x is not None
    ]


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    learn = _learnable(q, k, v, Terms(*given[:_TERMS]), given[-1])
    kept = (x for x in learn if x is not None)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in kept]


def _learnable(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, bias_learns: bool
) -> tuple[Tensor | None, ...]:
    bias = terms.bias if bias_learns else None
    return q, k, v, terms.additive, bias, terms.slopes, terms.relative, terms.sinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.numbers = [x for x in inputs if not isinstance(x, Tensor)]
    ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*(inputs[place] for place in ctx.places), *output)


def _gradient(ctx: Any, grad_out: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    saved, numbers = ctx.saved_tensors, iter(ctx.numbers)
    tensors = dict(zip(ctx.places, saved, strict=False))
    count = len(tensors) + len(ctx.numbers)
    result: list[Tensor | None] = [None] * count
    if grad_out is None:
        return tuple(result)
    inputs = [tensors[place] if place in tensors else next(numbers) for place in range(count)]
    bias_learns = inputs[_LEARN[4]] is not None and ctx.needs_input_grad[_LEARN[4]]
    found = iter(_BACKWARD(*inputs, *saved[len(tensors) :], grad_out, bias_learns))
    for place in _LEARN:
        if inputs[place] is not None and (place != _LEARN[4] or bias_learns):
            result[place] = next(found)
    return tuple(result)


def _no_second(ctx: Any, *grads: Any) -> None:
    refuse("sparse")


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
    _backward_shapes,
)
torch.library.register_autograd(_FORWARD, _gradient, setup_context=_setup, lib=LIBRARY)
torch.library.register_autograd(_BACKWARD, _no_second, lib=LIBRARY)
