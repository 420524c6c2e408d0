"""Fused attention that sees, for NVIDIA GPUs: one forward and one backward, in Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.sums import Sums
from headwise.engines.operators import Gradients, operators
from headwise.engines.triton.host import additive_call as bahdanau
from headwise.engines.triton.host.backward_call import differentiate
from headwise.engines.triton.host.cards import OLDEST, card
from headwise.engines.triton.host.decoding_call import decodes, run_decode
from headwise.engines.triton.host.forward_call import run_forward
from headwise.engines.triton.host.operands import GRID
from headwise.engines.triton.host.serving import Serving

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
    if not has_room(q.shape):
        return f"a GPU's grid has room for {GRID} heads and batch entries each; split the batch"
    if problem.k.shape[2] == 0:
        return "there are no keys, so there is nothing to compute"
    return refuses_device(q.device)


def has_room(q: torch.Size) -> bool:
    """Whether a grid has room for the batch entries and heads of queries (B, Hq, N, D)."""
    return max(q[:2]) <= GRID


def refuses_device(device: torch.device) -> str | None:
    """Why this engine can't serve tensors on a GPU; None: it can."""
    found = card(device)
    if torch.version.hip is not None:
        return "its kernels are written for NVIDIA GPUs"
    if found.major < OLDEST:
        return f"it needs an Ampere GPU or a later one, and this is {found.name}"
    return None


def _run(q: Tensor, k: Tensor, v: Tensor, terms: Terms, wants: int) -> Sums:
    """By the kernels of its kind: an additive score, few queries and many keys, or neither."""
    if terms.additive is not None:
        return bahdanau.run_additive(q, k, v, terms, wants)
    return (run_decode if decodes(q, k, terms) else run_forward)(q, k, v, terms, wants)


def _differentiate(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *rest: Any) -> Gradients:
    additive = terms.additive is not None
    return (bahdanau.differentiate_additive if additive else differentiate)(q, k, v, terms, *rest)


_serving = Serving(operators("triton", _run, _differentiate))
attend, run, observe = _serving.attend, _serving.run, _serving.observe
