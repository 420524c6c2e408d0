"""Any problem block by block, in memory linear in the length, with statistics in the same pass.

The loop is `Partial` and `merge`. Forward and backward are registered operators.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.statistics import complete, wanted
from headwise.core.sums import Sums
from headwise.engines import library_backward
from headwise.engines.contract import Engine
from headwise.engines.operators import Gradients, operators
from headwise.engines.streaming.backward_loop import Backward
from headwise.engines.streaming.forward_loop import Forward

LIBRARY_ON = "cpu"  # where PyTorch's kernel may compute the gradients


class Streaming(Engine):
    """Serves every problem, on any device."""

    name = "streaming"
    rank = 5
    partial = True

    def attend(self, problem: Problem) -> Tensor:
        return self.run(problem, 0).out

    def run(self, problem: Problem, wants: int) -> Sums:
        return Sums(*_forward(problem.q, problem.k, problem.v, *problem.terms(), wants))

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        sums = self.run(problem, wanted(names))
        return sums.out, complete(problem, sums, names, sink_keys)

    def backward(self, problem: Problem) -> str:
        q, k, v = problem.q, problem.k, problem.v
        return library_backward.described(self.name, LIBRARY_ON, q, k, v, problem.terms())


STREAMING = Streaming()


def _run(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    return Forward(q, k, v, terms, wants).run()


def _differentiate(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *rest: Any) -> Gradients:
    loop = Backward(q, k, v, terms, *rest)
    loop.run()
    return Gradients(
        loop.grad_q,
        loop.grad_k,
        loop.grad_v,
        loop.grad_additive,
        loop.grad_bias,
        loop.grad_slopes,
        loop.grad_relative,
        loop.grad_sinks,
    )


_forward = operators("streaming", _run, _differentiate, LIBRARY_ON)
