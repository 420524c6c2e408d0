"""Statistics of a call from the forward's sums; weights on single keys come from a short kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import RowResults, RowTotals
from headwise.core.statistics import named, of_whole_rows, single_weights
from headwise.engines.calls import direct
from headwise.engines.operators import CALL, define, guarded
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.operands import (
    WORD,
    broadcast_strides,
    on,
    operands,
    outer_strides,
    stride_unit,
    widened,
)
from headwise.engines.triton.kernels.single_key import Known, Single
from headwise.engines.triton.kernels.single_key import single as single_key

_TERMS = len(Terms._fields)
_BITS = {name: 1 << n for n, name in enumerate(Single._fields)}


def complete_dot(
    problem: Problem,
    terms: Terms,
    rows: RowResults,
    stats: tuple[str, ...],
    sink_keys: int,
    launches: Launches | None = None,
) -> dict[str, Tensor]:
    """Return the named statistics of a call with dot scores, (B, Hq, N) each."""
    found: dict[str, Tensor] = {}
    names = [name for name in Single._fields if name in stats]
    if names:
        start = problem.start() if "sink_mass" in names else 0
        starts, first = (start, 0) if isinstance(start, Tensor) else (None, start)
        asked = sum(_BITS[name] for name in names)
        given = rows.out, rows.max_logit, rows.log_total, rows.entropy
        rest = *given, starts, first, sink_keys, asked
        with torch.no_grad():
            if launches is None:
                single = _single(problem.q, problem.k, problem.v, *terms, *rest)
            else:
                single = _run(launches, problem.q, problem.k, problem.v, terms, *rest)
        found = dict(zip(names, single.unbind(0), strict=True))
    return named(rows, found, stats)


def _run(
    launches: Launches, q: Tensor, k: Tensor, v: Tensor, terms: Terms, out: Tensor, *given: Any
) -> Tensor:
    max_logit, log_total, entropy, starts, first, sink_keys, asked = given
    q, k, v, out = widened(q, k, v, out)
    whole = _shapes(q, k, v, asked)
    launches.allocated(whole)
    if max_logit.numel() == 0:
        return whole
    parts = iter(whole)
    call = operands(q, k, v if v.shape[-1] else k, terms)  # kernels take no empty tensors
    flags = {name: x for name, x in call.flags().items() if name not in ("PRECISION", "PLAIN")}
    flags["VALUES"] = v.shape[-1]
    found = Single(*(next(parts) if asked & bit else None for bit in _BITS.values()))
    known = Known(max_logit, log_total, entropy)
    rows = 32 if max(call.padded) <= 64 else 16
    strides = (*outer_strides(call.q), *outer_strides(call.k))
    unit = stride_unit(strides, 8)
    simple = starts is None and max(*strides, abs(first), sink_keys) < WORD
    with on(q.device):
        launches.start(
            single_key, (-(-q.shape[2] // rows), q.shape[1], q.shape[0]),
            kind_of(call, (*known, out), asked) if simple else None,
            (call.q, call.k, out.contiguous(), *(stride // unit for stride in strides), call.given,
            *call.sizes, known, found, starts,
            None if starts is None else broadcast_strides(starts), first, sink_keys),
            4, 1, ROWS=rows, UNIT=unit, **flags,
        )  # fmt: skip
    return whole


def _shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    count = int.bit_count(given[-1])
    return q.new_empty(count, *q.shape[:3], dtype=torch.float32)


def _without_kernel(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, out: Tensor, *given: Any
) -> Tensor:
    """Compute the statistics in PyTorch, for a compiled graph whose kernel fails."""
    max_logit, log_total, entropy, starts, first, sink_keys, asked = given
    log_total = torch.zeros_like(max_logit) if log_total is None else log_total  # not needed
    totals = RowTotals(max_logit + log_total, max_logit, log_total)
    names = {name for name, bit in _BITS.items() if asked & bit}
    start = first if starts is None else starts
    found = single_weights(q, k, terms, totals, max_logit, names, start, sink_keys)
    found |= of_whole_rows(out, entropy, names)
    return torch.stack([found[name] for name in _BITS if name in names])


_safe = guarded("triton", lambda *given: _run(Launches(), *given), _without_kernel, (False, True))


def _once(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> Tensor:
    found: Tensor = _safe(q, k, v, Terms(*given[:_TERMS]), *given[_TERMS:])
    return found


_single = direct(
    _once,
    define(
        "triton_single",
        f"({CALL}, Tensor out, Tensor max_logit, Tensor? log_total, Tensor? entropy, "
        "Tensor? starts, SymInt first, SymInt sink_keys, int asked) -> Tensor",
        _once,
        _shapes,
    ),
)
