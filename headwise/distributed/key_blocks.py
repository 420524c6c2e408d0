"""Attention of this rank's rows over one run of keys: forward, and backward once all is known."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.partial import Moments, Partial, merge
from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import LOG_TOTAL, MOMENTS, WIDE, RowResults, asked_sums
from headwise.core.statistics import single_weights
from headwise.distributed.geometry import Geometry
from headwise.distributed.key_exchange import KeyRun, Pair
from headwise.distributed.ranges import Range, positions, union
from headwise.engines.gradients import BackwardInputs, Gradients, RowGradients, sink_share
from headwise.engines.operators import PARTS


class Learnable(NamedTuple):
    """The tensors of a call that may have gradients, besides k and v."""

    q: Tensor  # (B, Hq, N, D)
    additive: Tensor | None
    bias: Tensor | None  # (B|1, Hq|1, N|1, M|1): this rank's rows, the whole sequence's keys
    slopes: Tensor | None
    relative: Tensor | None
    sinks: Tensor | None


class FinishedRows(NamedTuple):
    """The results of this rank's rows over all keys, and the weights on single keys, if asked."""

    rows: RowResults
    singles: Tensor  # (B, Hq, N, asked)


@dataclass(frozen=True, eq=False)
class KeyBlocks:
    """This rank's rows, placed in the whole sequence, and the options of their call."""

    problem: Problem  # without mask and tensor bias; its q, k, v are only examples
    geometry: Geometry
    rank: int
    engine: str
    wants: int
    singles: tuple[str, ...]  # of FEW_KEYS: merged like values
    sink_keys: int

    def forward(self, given: Learnable, width: int, runs: Iterable[KeyRun]) -> FinishedRows:
        """Compute this rank's rows over all runs and merge them; values are `width` wide."""
        part = self._nothing(given, width)
        for run in runs:
            part = merge(part, self._part(given, run))
        return self._finished(part, width, given.q.dtype)

    def _part(self, given: Learnable, run: KeyRun) -> Partial:
        q, k, v = given.q, run.k, run.v
        terms = self.terms(given, (run.first, run.last))
        forward, _ = PARTS[self.engine]
        rows = forward(q, k, v, *terms, self.wants | LOG_TOTAL | WIDE)
        if self.singles:
            found = single_weights(
                _wide(q), _wide(k), terms, rows.totals(), rows.max_logit, set(self.singles),
                self._start(run.first), self.sink_keys,
            )  # fmt: skip
            extra = torch.stack([found[name] for name in self.singles], -1)
            rows = rows._replace(out=torch.cat((rows.out, extra.to(rows.out.dtype)), -1))
        return Partial.from_results(rows, None, rows.out.dtype)

    def _nothing(self, given: Learnable, width: int) -> Partial:
        """The rows before they have seen a key."""
        wide = torch.promote_types(given.q.dtype, torch.float32)
        zero = given.q.new_zeros(given.q.shape[:3], dtype=wide)
        values = zero.new_zeros(*zero.shape, width + len(self.singles))
        sinks = None if given.sinks is None else given.sinks.to(wide)[:, None]
        sums = dict.fromkeys(asked_sums(self.wants), zero)
        moments = Moments(zero, zero, zero) if self.wants & MOMENTS else None
        return Partial(zero, zero - torch.inf, zero, values, sums, moments, sinks, wide)

    def _finished(self, part: Partial, width: int, dtype: torch.dtype) -> FinishedRows:
        """The results of rows that have seen all keys; the sinks join here."""
        values = part.values * part.weight()[..., None]
        return FinishedRows(part.results(values[..., :width].to(dtype)), values[..., width:])

    def terms(self, given: Learnable, keys: Range) -> Terms:
        """The terms of this rank's rows over a run of keys, without the sinks."""
        terms = self._placed(keys).terms()
        bias = given.bias
        if bias is not None and bias.shape[-1] > 1:
            bias = bias[..., keys[0] : keys[1]]
        return terms._replace(
            additive=given.additive, bias=bias, slopes=given.slopes, relative=given.relative,
            sinks=None,  # they join once, at the end
        )  # fmt: skip

    def _placed(self, keys: Range) -> Problem:
        """The problem of this rank's rows over a run of keys."""
        geometry, whole = self.geometry, self.geometry.whole
        place = replace(
            whole, keys=keys[1] - keys[0], first_key=keys[0], device=self.problem.q.device,
            whole=False,
        )  # fmt: skip
        held = union(geometry.rows[self.rank])
        rows = None
        if len(held) == 1:
            place = replace(place, first_query=held[0][0], queries=held[0][1] - held[0][0])
        else:
            rows = positions(held, place.device)
        mask, stated = (
            geometry.mask,
            None if geometry.mask is None else geometry.mask.alignment(whole),
        )
        if geometry.covered(self.rank, keys) and not isinstance(stated, Tensor):
            # the mask hides no key here, but still states the alignment
            mask, place = None, place if stated is None else replace(place, offset=stated)
        return replace(self.problem, place=place, mask=mask, rows=rows)

    def _start(self, first_key: int) -> int | Tensor:
        """The key of a run at which each row's sequence begins."""
        mask, whole = self.geometry.mask, self.geometry.whole
        start = 0 if mask is None else mask.start(whole)
        if isinstance(start, Tensor) and start.shape[-1] > 1:
            start = start[..., positions(self.geometry.rows[self.rank])]
        start = start.to(self.problem.q.device) if isinstance(start, Tensor) else start
        return start - first_key


class RunGradients:
    """Gradients of one call's rows, run by run, from what all runs together gave."""

    def __init__(
        self,
        blocks: KeyBlocks,
        given: Learnable,
        rows: RowResults,
        grads: RowGradients,
        bias_learns: bool,
    ) -> None:
        self.blocks, self.given, self.rows = blocks, given, rows
        wide = rows.lse.dtype
        out = _wide(rows.out)
        grad_out = torch.zeros_like(rows.out) if grads.out is None else grads.out
        self.grads = grad_out.contiguous(), grads.lse, grads.entropy
        totals = rows.totals()
        share = sink_share(given.sinks, totals)
        # A block's backward takes no sinks; with them the row's entropy has their share added.
        self.out, self.entropy = out, rows.entropy
        if share is not None and rows.entropy is not None:
            self.entropy = rows.entropy + share
        self.total = Learnable(
            torch.zeros_like(given.q, dtype=wide),
            *(None if x is None else torch.zeros_like(x, dtype=wide) for x in given[1:]),
        )
        self.bias_learns = bias_learns
        if share is not None:
            products = (grad_out.to(wide) * out).sum(-1)
            inputs = BackwardInputs(out, totals, rows.entropy, grad_out, grads.lse, grads.entropy)
            self.total = self.total._replace(sinks=inputs.row_constants(products, share)[1])

    def add_run(self, run: KeyRun) -> Pair:
        """Add a run's share to every gradient, and return that of its keys and values."""
        terms = self.blocks.terms(self.given, (run.first, run.last))
        _, backward = PARTS[self.blocks.engine]
        rows = self.rows
        found = backward(
            self.given.q, run.k, run.v, *terms, self.out, rows.lse, rows.max_logit, rows.log_total,
            self.entropy, *self.grads, self.bias_learns,
        )  # fmt: skip
        grads = _gradients_by_name(found, terms, self.bias_learns)
        total = self.total
        total.q.add_(grads.q)
        for whole, part in (
            (total.additive, grads.additive),
            (total.slopes, grads.slopes),
            (total.relative, grads.relative),
        ):
            if whole is not None and part is not None:
                whole.add_(part)
        if total.bias is not None and grads.bias is not None:
            place = total.bias
            place = place[..., run.first : run.last] if place.shape[-1] > 1 else place
            place.add_(grads.bias)
        return grads.k, grads.v


def _gradients_by_name(found: list[Tensor], terms: Terms, bias_learns: bool) -> Gradients:
    """The gradients that a backward lists, by name; it leaves out those of absent tensors."""
    each = iter(found)
    there = (
        True, True, True, terms.additive is not None, terms.bias is not None and bias_learns,
        terms.slopes is not None, terms.relative is not None, terms.sinks is not None,
    )  # fmt: skip
    return Gradients(*(next(each) if present else None for present in there))  # type: ignore[arg-type]


def _wide(x: Tensor) -> Tensor:
    """The tensor in float32 or wider, so that nothing is rounded before all parts are joined."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
