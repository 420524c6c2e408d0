"""Fused attention that sees, on Hopper GPUs: its own forward, and the gradients of `triton`."""

from __future__ import annotations

import torch

from headwise.core.problem import Problem
from headwise.engines.operators import operators
from headwise.engines.triton.host.backward_call import differentiate
from headwise.engines.triton.host.decoding_call import few
from headwise.engines.triton.host.hopper_call import run_forward
from headwise.engines.triton.host.operands import cap_of, leaves_keys, pad
from headwise.engines.triton.host.serving import Serving

WIDEST = 128  # of a head: two groups' sums of wider values don't fit the registers


def refuses(problem: Problem, observed: bool) -> str | None:
    """Why this engine can't serve the problem; None: it can."""
    q, v = problem.q, problem.v
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies 16-bit numbers, and these are {q.dtype}"
    if pad(q) != pad(v) or pad(q) > WIDEST:
        return f"heads are {q.shape[-1]} and {v.shape[-1]} wide; it takes both up to 64, or to 128"
    if v.shape[-1] % 8 or v.shape[-1] == 0:
        return f"values are {v.shape[-1]} wide, and rows leave in steps of 16 bytes"
    if problem.additive is not None or problem.bias is not None:
        return "its scores are plain or capped: no additive ones, no bias"
    if problem.dropout:
        return "it has no dropout"
    return _refuses_mask(problem) or _refuses_scale(problem)


def _refuses_mask(problem: Problem) -> str | None:
    q, k = problem.q, problem.k
    band, rest = problem.band()
    if band is None or rest is not None:
        return "its masks are bands, such as causal() and window()"
    if k.shape[2] == 0:
        return "there are no keys, so there is nothing to compute"
    if leaves_keys(q, k, band):
        return "some keys are seen by no row, and it would read them"
    if few(q, k):
        return "few queries meet many keys, which are better split over the chip"
    return None


def _refuses_scale(problem: Problem) -> str | None:
    scale, cap = problem.scale, problem.softcap
    if not 1e-6 < (cap or scale) < 1e6:  # as in Triton's kernel: FAR must stay far and finite
        name = "caps" if cap else "scales"
        return f"it takes {name} between a millionth and a million, and this is {cap or scale:g}"
    if cap_of(scale, cap) == 2:
        return f"it takes scales of 1/10000 to 10000 times a cap, and this is {scale / cap:g}"
    return None


_serving = Serving(operators("hopper", run_forward, differentiate))
attend, run, observe = _serving.attend, _serving.run, _serving.observe
