"""Calls of the Triton engine: chooses kernels, and runs them as an operator or a prepared call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from headwise.core import statistics
from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import LOG_TOTAL, WIDE, RowResults
from headwise.core.statistics import wanted
from headwise.engines import failures
from headwise.engines.contract import Prepared, Results
from headwise.engines.failures import KernelError
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.learning import (
    TENSORS,
    fixed_terms,
    names_beyond_rows,
    results_by_name,
    tensor_sources,
)
from headwise.engines.operators import Operators
from headwise.engines.triton.host.additive_call import differentiate_additive, run_additive
from headwise.engines.triton.host.backward_call import differentiate_dot
from headwise.engines.triton.host.backward_choice import ahead, family, serves
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.decoding_call import attend_step, decodes, few, run_decode
from headwise.engines.triton.host.forward_call import run_forward
from headwise.engines.triton.host.launches import Launches, recorded
from headwise.engines.triton.host.operands import cap_of, leaves_keys, pad, widened
from headwise.engines.triton.host.prepared_call import PreparedCall
from headwise.engines.triton.host.statistics_call import complete_dot
from headwise.engines.triton.limits import LIBRARY_ON

__all__ = [
    "FORWARD", "ahead", "cap_of", "card", "complete", "differentiate", "few",
    "first_with_gradients", "leaves_keys", "pad", "recorded", "results", "run", "serves",
]  # fmt: skip

Run = Callable[[Launches, Tensor, Tensor, Tensor, Terms, int], RowResults]


def run(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int
) -> RowResults:
    """Return the output and the results that `wants` names, from the kernels for this problem."""
    kernels: Run = run_forward
    if terms.additive is not None:
        kernels = run_additive
    elif decodes(q, k, terms):
        kernels = run_decode
    wide, k, v = widened(q, k, v)
    if v.shape[-1] or kernels is run_forward:
        found = kernels(launches, wide, k, v, terms, wants)
    else:  # the keys stand in for values of width 0
        out = q.new_empty(*q.shape[:3], 0)
        found = kernels(launches, wide, k, k, terms, wants)._replace(out=out)
        launches.allocated(out)
    return found if wide is q or wants & WIDE else found._replace(out=found.out.to(q.dtype))


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    """Return the gradients of every input from those of out, lse and entropy."""
    if v.shape[-1] == 0:  # as in the forward; out has no gradient
        none = torch.zeros_like(q)
        found = differentiate(q, k, k, terms, given._replace(out=none, grad_out=none))
        return found._replace(v=torch.empty_like(v))
    if serves(q, k, v, terms, given.out.dtype):
        from headwise.engines.triton.host import hopper_backward_call  # needs Gluon

        try:
            return hopper_backward_call.differentiate_hopper(q, k, v, terms, given)
        except KernelError as failure:
            failures.record(family(q, v, terms), failure)
    q, k, v, out, grad_out = widened(q, k, v, given.out, given.grad_out.to(q.dtype))
    kernels = differentiate_dot if terms.additive is None else differentiate_additive
    return kernels(q, k, v, terms, given._replace(out=out, grad_out=grad_out))


def once(run: Run) -> Callable[[Tensor, Tensor, Tensor, Terms, int], RowResults]:
    """Return `run` for an operator, which records no launches."""
    return lambda *arguments: run(Launches(), *arguments)


FORWARD = Operators("triton", once(run), differentiate, LIBRARY_ON, ahead)


def complete(
    problem: Problem,
    terms: Terms,
    rows: RowResults,
    names: tuple[str, ...],
    sink_keys: int,
    launches: Launches | None = None,
) -> dict[str, Tensor]:
    """Return the named statistics, (B, Hq, N) each, from the forward's results."""
    if problem.additive is not None:
        return statistics.complete(problem, rows, names, sink_keys)
    return complete_dot(problem, terms, rows, names, sink_keys, launches)


def results(
    launches: Launches, run: Run, problem: Problem, names: tuple[str, ...], sink_keys: int
) -> Results:
    """Return out and the named statistics, computed through `launches`."""
    if not names:
        out = attend_step(launches, problem)
        if out is not None:
            return (out,)
    terms = problem.terms(banded=True)
    launches.fixed(*fixed_terms(problem, terms))
    rows = run(launches, problem.q, problem.k, problem.v, terms, wanted(names))
    values = complete(problem, terms, rows, names, sink_keys, launches)
    return (rows.out, *(values[name] for name in names))


def first_with_gradients(
    operators: Operators,
    run: Run,
    problem: Problem,
    names: tuple[str, ...],
    sink_keys: int,
    tensors: tuple[Tensor, ...],
) -> tuple[Results, Prepared | None]:
    """Return the results of a call with gradients, and the call prepared for other tensors."""
    terms = problem.terms(banded=True)
    fixed, more = fixed_terms(problem, terms), names_beyond_rows(names)
    again: PreparedCall | None = None

    def work_out(launches: Launches) -> tuple[Tensor | None, ...]:
        launches.fixed(*fixed)
        wants = wanted(names) | LOG_TOTAL
        rows = run(launches, problem.q, problem.k, problem.v, terms, wants)
        values = complete(problem, terms, rows, more, sink_keys, launches)
        return (*rows, *(values[name] for name in more))

    def first(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        nonlocal again
        found, again = recorded(work_out, tensors)
        return found

    places = tensor_sources(terms, tensors, fixed)
    known = places or tensor_sources(
        terms, tensors, tuple(x for x in terms if isinstance(x, Tensor))
    )
    assert known is not None
    call = operators.learning(first, known, terms[TENSORS - 3 :])
    found = results_by_name(call(*tensors), names)
    if places is None or again is None:
        return found, None
    repeated = replace(call, run=again)
    return found, lambda *tensors: results_by_name(repeated(*tensors), names)
