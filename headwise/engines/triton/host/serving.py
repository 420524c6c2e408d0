"""What an engine does with a problem, around the operator that is its forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.statistics import complete as complete_additive
from headwise.core.statistics import wanted
from headwise.core.sums import LOG_TOTAL, Sums
from headwise.engines.triton.host.statistics_call import complete


class Serving(NamedTuple):
    """The three functions that a plan asks of an engine."""

    forward: Callable[..., tuple[Tensor, ...]]

    def attend(self, problem: Problem) -> Tensor:
        """out (B, Hq, N, Dv)."""
        return self.run(problem, 0).out

    def run(self, problem: Problem, wants: int) -> Sums:
        """The output and the sums that `wants` names."""
        return self._sums(problem, problem.terms(banded=True), wants)

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """out (B, Hq, N, Dv) and the named statistics, (B, Hq, N) each."""
        terms = problem.terms(banded=True)
        sums = self._sums(problem, terms, wanted(names) & ~LOG_TOTAL)
        if problem.additive is not None:
            return sums.out, complete_additive(problem, sums, names, sink_keys)
        return sums.out, complete(problem, terms, sums, names, sink_keys)

    def _sums(self, problem: Problem, terms: Terms, wants: int) -> Sums:
        return Sums(*self.forward(problem.q, problem.k, problem.v, *terms, wants))
