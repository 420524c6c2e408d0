"""Calls that Triton's kernels serve where they can, and loops of PyTorch elsewhere."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.engines import failures
from headwise.engines.failures import KernelError, Kernels, family
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.limits import WIDEST, fits_grid


def fused(
    module: str, name: str, kernels: Kernels, q: Tensor, v: Tensor, terms: Terms, *given: Any
) -> Any:
    """The result of a function of the Triton engine, given `given`; None if loops must serve.

    q and v are tensors of the call that its products are taken of. A kernel that fails is reported
    once, and its kind of call is left to loops from then on.
    """
    widths = q.shape[-1], v.shape[-1]
    fits = q.dtype != torch.float64 and v.dtype != torch.float64 and max(widths) <= WIDEST
    fits = fits and terms.additive is None and q.numel() > 0 and v.numel() > 0
    calls = family(TRITON.name, kernels, q, v, False)
    if not (fits and fits_grid(q.shape)) or failures.reason(calls) or TRITON.absent(q.device):
        return None
    host = import_module(f"headwise.engines.triton.{module}")  # it imports Triton
    try:
        return getattr(host, name)(*given)
    except KernelError as failure:
        failures.record(calls, failure)
        return None
