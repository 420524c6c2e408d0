"""Fused attention that sees, for NVIDIA GPUs: one forward and one backward, in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.engines.operators import operators
from headwise.engines.triton.backward import differentiate
from headwise.engines.triton.call import run_forward
from headwise.engines.triton.launch import interpreting
from headwise.problem import Problem
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
    return None if interpreting() else _refuses_device(q.device)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuses_device(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "its kernels are tuned and tested on NVIDIA GPUs only"
    if torch.cuda.get_device_capability(device)[0] != 9:
        name = torch.cuda.get_device_name(device)
        return f"its kernels are proven on Hopper GPUs only, and this is {name}"
    return None


def attend(problem: Problem) -> Tensor:
    """out (B, Hq, N, Dv)."""
    return run(problem, 0).out


def run(problem: Problem, wants: int) -> Sums:
    """The output and the sums that `wants` names."""
    return Sums(*_forward(problem.q, problem.k, problem.v, *problem.terms(banded=True), wants))


_forward = operators("triton", run_forward, differentiate)
