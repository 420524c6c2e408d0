"""A call over the keys that several policies keep: output, statistics and the keys themselves.

Each policy chooses among all keys that the mask shows, and a row keeps what all of them keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.intervals import Mask
from headwise.core.patterns import Between
from headwise.core.policies import Policy, of_rows
from headwise.core.problem import Problem, Terms, without_autocast, without_dropout
from headwise.core.row_sums import LOG_TOTAL, RowResults, RowTotals
from headwise.core.spans import SPAN_PREFIX, Span, shown
from headwise.core.statistics import FEW_KEYS, complete, named, wanted
from headwise.engines.gradients import BackwardInputs
from headwise.engines.streaming.backward_loop import Backward
from headwise.engines.streaming.forward_loop import Forward
from headwise.engines.streaming.loop import Loop, Selection
from headwise.engines.streaming.selection import Joint, select


class KeptKeys:
    """A problem, and what its policies keep; in memory linear in the length."""

    def __init__(self, problem: Problem, policies: Sequence[Policy]) -> None:
        self.problem, self.terms = problem, problem.terms()
        terms = Terms._make(x.detach() if isinstance(x, Tensor) else x for x in self.terms)
        q, k = problem.q.detach(), problem.k.detach()
        with torch.no_grad(), without_autocast(q.device):
            chosen = [select(of_rows(x, problem.rows), q, k, terms) for x in policies]
        self.selection: Selection = reduce(Joint, chosen)

    def attend(self) -> Tensor:
        """The output, (B, Hq, N, Dv), with gradients; the choice itself has none."""
        problem, terms = self.problem, self.terms
        learnt = (terms.additive, terms.bias, terms.slopes, terms.relative, terms.sinks)
        given = (terms, self.selection, problem.q, problem.k, problem.v, *learnt)
        out: Tensor = _Attend.apply(*given)  # type: ignore[no-untyped-call]
        return out

    def statistics(
        self, names: tuple[str, ...], sink_keys: int, spans: Mapping[str, Span]
    ) -> dict[str, Tensor]:
        """The named statistics of the kept keys, and the weights on spans, (B, Hq, N) each."""
        problem = without_dropout(self.problem)
        terms = problem.terms()
        # A policy may not keep these keys, so their weight is one of kept keys under another mask.
        few = [name for name in FEW_KEYS if name in names]
        more = tuple(name for name in names if name not in few)
        rows = self._rows(terms, problem.v, wanted(more) | LOG_TOTAL)
        found = complete(problem, rows, more, sink_keys, terms)
        found |= {name: self._weight(rows, mask(sink_keys)) for name, mask in self._few(few)}
        found = named(rows, found, names)
        for name, span in spans.items():
            found[SPAN_PREFIX + name] = self._weight(rows, shown(span, problem.q.device))
        return found

    def dense(self) -> Tensor:
        """The keys that rows see and keep, (B, Hq, N, M) bool."""
        q, k = self.problem.q.detach(), self.problem.k.detach()
        loop = Loop(q, k, k[..., :0], self.terms, self.selection)
        found = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.bool, device=q.device)
        whole = loop.blocks.grouped(found)  # (B, Hkv, G, N, M)
        for unit, rows in loop.row_blocks():
            here = whole[unit.b0 : unit.b1, unit.h0 : unit.h1]
            for segment, _, seen in loop.segments(unit, rows):
                here[..., rows, segment.columns] = True if seen is None else seen
        return found

    def _rows(
        self, terms: Terms, v: Tensor, wants: int, selection: Selection | None = None
    ) -> RowResults:
        q, k = self.problem.q.detach(), self.problem.k.detach()
        with torch.no_grad(), without_autocast(q.device):
            return Forward(q, k, v.detach(), terms, wants, selection or self.selection).run()

    def _weight(self, rows: RowResults, keys: Mask) -> Tensor:
        """The weight of the kept keys that another mask shows, (B, Hq, N)."""
        problem = without_dropout(self.problem)
        bounds = problem.intervals(keys)
        assert bounds is not None
        # The same blocks as before, so that a logit is the one that was chosen, to the bit.
        some = Joint(self.selection, _Shown(bounds[0]))
        terms = problem.terms()._replace(sinks=None)
        return rows.weight_of(self._rows(terms, problem.v[..., :0], LOG_TOTAL, some))

    def _few(self, names: Sequence[str]) -> list[tuple[str, Callable[[int], Mask]]]:
        """The masks of the few keys that statistics are about."""
        whole = replace(self.problem, rows=None)
        own = whole.position()[:, None]  # (B|1, 1, N)
        start = whole.start()
        first = start if isinstance(start, Tensor) else own.new_full((1, 1, 1), start)
        masks: dict[str, Callable[[int], Mask]] = {
            "sink_mass": lambda keys: Between(first, first + keys),
            "self_mass": lambda _: Between(own, own + 1),
            "previous_mass": lambda _: Between(own - 1, own),
        }
        return [(name, masks[name]) for name in names]


@dataclass(frozen=True, eq=False)
class _Shown(Selection):
    """The keys between two bounds of each row, (2, B|1, Hq|1, N)."""

    bounds: Tensor

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        grouped = (loop.blocks.grouped(bound) for bound in self.bounds)
        first, last = (unit.of(bound)[..., rows, None] for bound in grouped)
        here = loop.blocks.columns[columns]
        return (here >= first) & (here < last)


class _Attend(torch.autograd.Function):
    """The streaming loops with a selection, for calls that run eagerly."""

    @staticmethod
    def forward(ctx: Any, terms: Terms, selection: Selection, *tensors: Tensor | None) -> Tensor:
        q, k, v, *_ = tensors
        assert q is not None
        assert k is not None
        assert v is not None
        with without_autocast(q.device):
            rows = Forward(q, k, v, terms, LOG_TOTAL, selection).run()
        assert rows.log_total is not None
        ctx.terms, ctx.selection = terms, selection
        ctx.save_for_backward(*tensors, rows.out, rows.lse, rows.max_logit, rows.log_total)
        return rows.out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, additive, bias, slopes, relative, sinks, out, *totals = ctx.saved_tensors
        terms: Terms = ctx.terms._replace(
            additive=additive, bias=bias, slopes=slopes, relative=relative, sinks=sinks
        )
        bias_learns = bias is not None and ctx.needs_input_grad[6]
        known = RowTotals.known(*totals)
        with without_autocast(q.device):
            inputs = BackwardInputs(out, known, None, grad_out, bias_learns=bias_learns)
            found = Backward(q, k, v, terms, inputs, ctx.selection).run()
        given = (q, k, v, additive, bias, slopes, relative, sinks)
        pairs = zip(found, given, strict=True)
        grads = (None if x is None or grad is None else grad.to(x.dtype) for grad, x in pairs)
        return None, None, *grads
