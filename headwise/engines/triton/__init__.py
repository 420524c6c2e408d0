"""Fused attention that sees, for NVIDIA GPUs: one forward and one backward, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.engines.operators import operators
from headwise.engines.triton.backward import differentiate
from headwise.engines.triton.call import run_forward
from headwise.engines.triton.cards import OLDEST, card
from headwise.engines.triton.statistics import complete
from headwise.problem import Problem, Terms
from headwise.single import wanted
from headwise.sums import Sums

WIDEST = 256  # of a head: beyond it a tile no longer fits beside its accumulators


def refuses(problem: Problem, observed: bool) -> str | None:
    """Why this engine can't serve the problem; None: it can."""
    q, v = problem.q, problem.v
    if problem.additive is not None:
        return "its kernels compute dot scores only"
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
    return sums.out, complete(problem, terms, sums, names, sink_keys)


def _sums(problem: Problem, terms: Terms, wants: int) -> Sums:
    return Sums(*_forward(problem.q, problem.k, problem.v, *terms, wants))


_forward = operators("triton", run_forward, differentiate)
