"""FLOP counts for FlopCounterMode: products of visible pairs, two operations per multiply-add.

If the mask's tensors hold numbers, its visible pairs are counted. If they are fake or on the meta
device, every pair counts, as in PyTorch's formulas for its own kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import flop_registry, register_flop_formula

from headwise.core.intervals import FURTHEST
from headwise.core.problem import Terms


def register(forward: Any, backward: Any) -> None:
    """Give an engine's two operators their formulas."""
    register_flop_formula(forward, get_raw=True)(_forward)
    register_flop_formula(backward, get_raw=True)(_backward)


def register_cpu_sdpa() -> None:
    """Register PyTorch's fused CPU kernel, which FlopCounterMode may lack, unlike those on CUDA."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    if forward not in flop_registry:
        register_flop_formula(forward)(_sdpa_forward)
    if backward not in flop_registry:
        register_flop_formula(backward)(_sdpa_backward)


def visible_pairs(q: Tensor, k: Tensor, terms: Terms) -> int:
    """Count the (query, key) pairs that the mask shows, over batch and query heads."""
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    every = batch * heads * queries * keys
    mask = terms.dense if terms.intervals is None else terms.intervals
    if isinstance(mask, FakeTensor) or (mask is not None and mask.is_meta):
        return every
    banded = terms.band is not None and len(terms.band) == 3
    low, high = terms.band[1:] if terms.band is not None and banded else (-FURTHEST, FURTHEST)
    if terms.intervals is not None:
        row = torch.arange(queries, device=terms.intervals.device)
        first = terms.intervals[:, 0].maximum(row + low)
        last = terms.intervals[:, 1].minimum(row + high)
        return int((last - first).clamp_min(0).sum(0).expand(batch, heads, queries).sum())
    if mask is not None:
        return int(mask.expand(batch, heads, queries, keys).sum())
    if not banded:
        return every
    seen = (min(r + high, keys) - max(r + low, 0) for r in range(queries))
    return batch * heads * sum(max(0, count) for count in seen)


def _forward(q, k, v, *given, **kwargs) -> int:  # type: ignore[no-untyped-def]
    terms = Terms(*given[: len(Terms._fields)])
    pairs = visible_pairs(q, k, terms)
    # an additive score adds, takes tanh, multiplies and adds
    score = 2 * q.shape[-1] if terms.additive is None else 4 * q.shape[-1]
    return int(pairs * (score + 2 * v.shape[-1]))


def _backward(q, k, v, *given, **kwargs) -> int:  # type: ignore[no-untyped-def]
    # Recomputes the logits, then two products for each of the forward's, as in PyTorch's formulas.
    return _forward(q, k, v, *given) * 5 // 2


def _sdpa_forward(q, k, v, dropout=0.0, causal=False, *rest, out_shape=None, **kwargs) -> int:  # type: ignore[no-untyped-def]
    batch, heads, queries, width = q
    pairs = queries * k[2]
    if causal:  # aligned at the first query and the first key
        square = min(queries, k[2])
        pairs = square * (square + 1) // 2 + (queries - square) * k[2]
    return int(batch * heads * pairs * 2 * (width + v[-1]))


def _sdpa_backward(grad, q, k, v, out, lse, dropout=0.0, causal=False, *rest, **kwargs) -> int:  # type: ignore[no-untyped-def]
    return _sdpa_forward(q, k, v, dropout, causal) * 5 // 2
