"""Calls of the Triton engine: chooses kernels, and runs them as an operator or a prepared call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headwise.core import statistics
from headwise.core.problem import Problem, Terms
from headwise.core.statistics import wanted
from headwise.core.sums import ENTROPY, LOG_TOTAL, WIDE, Sums
from headwise.engines.contract import Results
from headwise.engines.learning import (
    TENSORS,
    LearningCall,
    chosen,
    fixed_terms,
    others,
    sources,
)
from headwise.engines.operators import Gradients, Operators, operators
from headwise.engines.triton.host.additive_call import differentiate_additive, run_additive
from headwise.engines.triton.host.backward_call import differentiate_dot
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.decoding_call import attend_step, decodes, few, run_decode
from headwise.engines.triton.host.forward_call import run_forward
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.host.operands import cap_of, leaves_keys, pad, widened
from headwise.engines.triton.host.prepared_call import PreparedCall
from headwise.engines.triton.host.statistics_call import complete_dot
from headwise.engines.triton.limits import LIBRARY_ON

__all__ = [
    "FORWARD", "FirstCall", "FirstLearningCall", "cap_of", "card", "complete", "differentiate",
    "few", "leaves_keys", "pad", "results", "run",
]  # fmt: skip

Run = Callable[[Launches, Tensor, Tensor, Tensor, Terms, int], Sums]


def run(launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    """Return the output and the sums that `wants` names, from the kernels for this problem."""
    kernels = run_forward
    if terms.additive is not None:
        kernels = run_additive
    elif decodes(q, k, terms):
        kernels = run_decode
    wide, k, v = widened(q, k, v)
    if v.shape[-1] or kernels is run_forward:
        sums = kernels(launches, wide, k, v, terms, wants)
    else:  # the keys stand in for values of width 0
        out = q.new_empty(*q.shape[:3], 0)
        sums = kernels(launches, wide, k, k, terms, wants)._replace(out=out)
        launches.allocated(out)
    return sums if wide is q or wants & WIDE else sums._replace(out=sums.out.to(q.dtype))


def differentiate(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, out: Tensor, *rest: Any
) -> Gradients:
    """Return the gradients of every input from those of out, lse and entropy."""
    totals, entropy, grad_out, *others = rest
    if v.shape[-1] == 0:  # as in the forward; out has no gradient
        none = torch.zeros_like(q)
        found = differentiate(q, k, k, terms, none, totals, entropy, none, *others)
        return found._replace(v=torch.empty_like(v))
    q, k, v, out, grad_out = widened(q, k, v, out, grad_out.to(q.dtype))
    kernels = differentiate_dot if terms.additive is None else differentiate_additive
    return kernels(q, k, v, terms, out, totals, entropy, grad_out, *others)


def once(run: Run) -> Callable[[Tensor, Tensor, Tensor, Terms, int], Sums]:
    """Return `run` for an operator, which records no launches."""
    return lambda *arguments: run(Launches(), *arguments)


FORWARD = operators("triton", once(run), differentiate, LIBRARY_ON)


def complete(
    problem: Problem,
    terms: Terms,
    sums: tuple[Tensor, ...],
    names: tuple[str, ...],
    sink_keys: int,
    launches: Launches | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output and the named statistics, (B, Hq, N) each, from the forward's sums."""
    found = Sums(*sums)
    if problem.additive is not None:
        return found.out, statistics.complete(problem, found, names, sink_keys)
    return found.out, complete_dot(problem, terms, found, names, sink_keys, launches)


class FirstCall:
    """A call that is worked out while it runs; `reusable` repeats it from then on."""

    def __init__(self, work_out: Callable[[Launches], Results]) -> None:
        self._work_out = work_out
        self.reusable: PreparedCall | None = None

    def __call__(self, *tensors: Tensor) -> Results:
        launches = Launches(*tensors)
        results = self._work_out(launches)
        self.reusable = launches.prepared(results)
        return results


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
    sums = run(launches, problem.q, problem.k, problem.v, terms, wanted(names))
    out, values = complete(problem, terms, sums, names, sink_keys, launches)
    return (out, *(values[name] for name in names))


class FirstLearningCall:
    """A call with gradients that is worked out while it runs."""

    def __init__(
        self,
        operators: Operators,
        run: Run,
        problem: Problem,
        names: tuple[str, ...],
        sink_keys: int,
    ) -> None:
        self._operators, self._run, self._problem = operators, run, problem
        self._names, self._sink_keys = names, sink_keys
        self.reusable: RepeatedLearningCall | None = None

    def __call__(self, *tensors: Tensor) -> Results:
        problem, names = self._problem, self._names
        terms, wants = problem.terms(banded=True), wanted(names) | LOG_TOTAL
        fixed = fixed_terms(problem, terms)
        first = FirstCall(self._work_out(terms, wants, fixed))
        found = sources(terms, tensors, fixed)
        places = found or sources(terms, tensors, tuple(x for x in terms if isinstance(x, Tensor)))
        assert places is not None
        numbers = terms[TENSORS - 3 :]
        call = self._operators.learning(_rows(first, wants), places, numbers)
        results = chosen(call(*tensors), names)
        if found is not None and first.reusable is not None:
            call = replace(call, run=_rows(first.reusable, wants))
            self.reusable = RepeatedLearningCall(call, names)
        return results

    def _work_out(
        self, terms: Terms, wants: int, fixed: tuple[Tensor, ...]
    ) -> Callable[[Launches], Results]:
        problem, names = self._problem, self._names

        def work_out(launches: Launches) -> Results:
            launches.fixed(*fixed)
            sums = self._run(launches, problem.q, problem.k, problem.v, terms, wants)
            out, values = complete(problem, terms, sums, names, self._sink_keys, launches)
            known = [out, sums.lse, sums.max_logit, sums.log_total]
            known += [sums.entropy] if wants & ENTROPY else []
            return (*known, *(values[name] for name in others(names)))

        return work_out


@dataclass(frozen=True)
class RepeatedLearningCall:
    """A prepared call with gradients."""

    call: LearningCall
    names: tuple[str, ...]

    @property
    def reusable(self) -> RepeatedLearningCall:
        """This call."""
        return self

    def __call__(self, *tensors: Tensor) -> Results:
        return chosen(self.call(*tensors), self.names)


def _rows(run: Callable[..., Results], wants: int) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return `run`, whose results have no entropy unless it was asked for, with None there."""
    if wants & ENTROPY:
        return run

    def call(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        found = run(*tensors)
        return (*found[:4], None, *found[4:])

    return call
