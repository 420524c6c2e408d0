"""Any problem block by block, in memory linear in the length, with statistics in the same pass.

The loop is `Partial` and `merge`. Forward and backward are registered operators.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import RowResults
from headwise.core.statistics import complete, wanted
from headwise.engines import library_backward
from headwise.engines.contract import Engine, Prepared, Results, compute
from headwise.engines.gradients import BackwardInputs, Gradients
from headwise.engines.learning import fixed_terms
from headwise.engines.library_backward import LibraryBackward
from headwise.engines.operators import Operators
from headwise.engines.streaming.backward_loop import Backward
from headwise.engines.streaming.forward_loop import Forward

LIBRARY_ON = "cpu"  # where PyTorch's kernel may compute the gradients


class Streaming(Engine):
    """Serves every problem, on any device; in a CUDA graph only what has no mask."""

    name = "streaming"
    rank = 5
    partial = True

    def refuses(self, problem: Problem, observed: bool) -> str | None:
        if problem.mask is None or not problem.q.is_cuda or torch.compiler.is_compiling():
            return None
        if torch.cuda.is_current_stream_capturing():
            return "it reads the mask on the CPU, for which a CUDA graph can't wait"
        return None

    def attend(self, problem: Problem) -> Tensor:
        return self.run(problem, 0).out

    def run(self, problem: Problem, wants: int) -> RowResults:
        return self._rows(problem, problem.terms(), wants)

    def _rows(self, problem: Problem, terms: Terms, wants: int) -> RowResults:
        return _forward(problem.q, problem.k, problem.v, *terms, wants)

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        terms = problem.terms()
        rows = self._rows(problem, terms, wanted(names))
        return rows.out, complete(problem, rows, names, sink_keys, terms)

    def first(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int, tensors: tuple[Tensor, ...]
    ) -> tuple[Results, Prepared | None]:
        terms = problem.terms()
        if not fixed_terms(problem, terms):  # its mask depends on tensors
            return compute(self, problem, names, sink_keys), None
        pose = partial(
            Problem, place=problem.place, scale=problem.scale, mask=problem.mask,
            softcap=problem.softcap, rows=problem.rows,
        )  # fmt: skip
        if terms.sinks is not None:
            terms = terms._replace(sinks=terms.sinks.new_empty(0))  # a call brings its own
        library, wants = LibraryBackward(LIBRARY_ON), wanted(names)

        def run(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Results:
            own = terms if terms.sinks is None else terms._replace(sinks=rest[0].to(q.device))
            rows = _forward(q, k, v, *own, wants, library=library)
            if not names:
                return (rows.out,)
            found = complete(pose(q, k, v, sinks=own.sinks), rows, names, sink_keys, own)
            return (rows.out, *(found[name] for name in names))

        return run(*tensors), run

    def backward(self, problem: Problem) -> str:
        q, k, v = problem.q, problem.k, problem.v
        return library_backward.described(self.name, LIBRARY_ON, q, k, v, problem.terms())


STREAMING = Streaming()


def _run(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> RowResults:
    return Forward(q, k, v, terms, wants).run()


def _differentiate(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, given: BackwardInputs
) -> Gradients:
    return Backward(q, k, v, terms, given).run()


_forward = Operators("streaming", _run, _differentiate, LIBRARY_ON)
