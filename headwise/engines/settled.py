"""Calls of PyTorch's own kernels that were planned before: known again by their description.

Checking and planning a call takes longer than a short one takes to compute. Where nothing but
shapes, dtypes, devices and a few numbers decides, calls of one description all come to the same
arguments of the same kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.core.patterns import Causal
from headwise.engines.again import is_told, transformed
from headwise.score import Dot

Served = Callable[[Tensor, Tensor, Tensor], Tensor]
KEPT = 4096  # descriptions of calls at most
_SERVED: dict[tuple[object, ...], Served] = {}


def described(
    q: Tensor, k: Tensor, v: Tensor, score: object, mask: object, engine: str
) -> tuple[object, ...] | None:
    """All that the plan of a call without other options depends on; None: more than is told."""
    if engine not in ("auto", "sdpa") or torch.compiler.is_compiling():
        return None
    if not (score is None or type(score) is Dot) or not (mask is None or type(mask) is Causal):
        return None
    told = None if mask is None else mask.description()
    scale = None if score is None else score.scale
    if (told is None) != (mask is None) or not is_told(scale) or transformed(q, k, v):
        return None
    if not q.dtype == k.dtype == v.dtype:  # which autocast may make one, and nothing else
        return None
    learning = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        engine, told, scale, learning,
        q.shape, q.dtype, q.device, k.shape, k.dtype, k.device, v.shape, v.dtype, v.device,
    )  # fmt: skip


def known(description: tuple[object, ...] | None) -> Served | None:
    """What serves calls of a description, where one of them was planned before."""
    return None if description is None else _SERVED.get(description)


def keep(description: tuple[object, ...], served: Served) -> None:
    """Let later calls of a description be served by this."""
    if len(_SERVED) >= KEPT:
        _SERVED.clear()
    _SERVED[description] = served
