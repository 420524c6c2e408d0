"""Fused attention that sees, for NVIDIA GPUs: one forward and one backward, in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.engines.operators import Gradients, operators
from headwise.engines.triton import bahdanau
from headwise.engines.triton.backward import differentiate
from headwise.engines.triton.call import run_forward
from headwise.engines.triton.cards import OLDEST, card
from headwise.engines.triton.decoding import decodes, run_decode
from headwise.engines.triton.statistics import complete
from headwise.problem import Problem, Terms
from headwise.single import complete as complete_additive
from headwise.single import wanted
from headwise.sums import Sums

WIDEST = 256  # of a head: beyond it a tile no longer fits beside its accumulators


def refuses(problem: Problem, observed: bool) -> str | None:
    """Why this engine can't serve the problem; None: it can."""
    q, v = problem.q, problem.v
    if problem.additive is not None:
        reason = bahdanau.refuses(problem)
        if reason is not None:
            return reason
    if q.dtype == torch.float64:
        return "it computes in float32 and float64 would lose precision"
    if not 1 <= q.shape[-1] <= WIDEST or not 1 <= v.shape[-1] <= WIDEST:
        return f"heads are {q.shape[-1]} and {v.shape[-1]} wide; it takes 1 to {WIDEST}"
    if problem.k.shape[2] == 0:
        return "there are no keys, so there is nothing to compute"
    return refuses_device(q.device)


def refuses_device(device: torch.device) -> str | None:
    """Why this engine can't serve tensors on a GPU; None: it can."""
    found = card(device)
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs"
    if found.major < OLDEST:
        return f"it needs an Ampere GPU or a later one, and this is {found.name}"
    return None


def attend(problem: Problem) -> Tensor:
    """out (B, Hq, N, Dv)."""
    return run(problem, 0).out


def run(problem: Problem, wants: int) -> Sums:
    """The output and the sums that `wants` names."""
    return _sums(problem, problem.terms(banded=True), wants)


def observe(
    problem: Problem, names: tuple[str, ...], sink_keys: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """out (B, Hq, N, Dv) and the named statistics, (B, Hq, N) each."""
    terms = problem.terms(banded=True)
    sums = _sums(problem, terms, wanted(names))
    if problem.additive is not None:
        return sums.out, complete_additive(problem, sums, names, sink_keys)
    return sums.out, complete(problem, terms, sums, names, sink_keys)


def _sums(problem: Problem, terms: Terms, wants: int) -> Sums:
    return Sums(*_forward(problem.q, problem.k, problem.v, *terms, wants))


def _run(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    """By the kernels of its kind: an additive score, few queries and many keys, or neither."""
    if terms.additive is not None:
        return bahdanau.run_additive(q, k, v, terms, wants)
    return (run_decode if decodes(q, k, terms) else run_forward)(q, k, v, terms, wants)


def _differentiate(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *rest: Any) -> Gradients:
    additive = terms.additive is not None
    return (bahdanau.differentiate_additive if additive else differentiate)(q, k, v, terms, *rest)


_forward = operators("triton", _run, _differentiate)
