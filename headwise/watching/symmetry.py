"""How symmetric a head's bilinear form is: whether what i sees in j is what j sees in i."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.watching.head_weights import Made


@torch.no_grad()
def symmetry(made: Made) -> Tensor:
    """For each head Σ M_ij M_ji / Σ M_ij² of M = W_qᵀ W_k, (Hq,): 1 symmetric, −1 antisymmetric.

    Saponati et al. (2025): models that see both sides come out symmetric, models that predict the
    next token do not. Weights that have nothing to do with each other give 0. NaN where queries and
    keys are made from inputs of different widths.

    >>> w = torch.randn(1, 4, 16)
    >>> symmetry(Made([w], [], shared=True))
    tensor([1.], dtype=torch.float64)
    """
    q = made.queries[0].double()  # (Hq, D, inputs)
    if made.shared:
        return torch.ones(len(q), dtype=torch.float64)
    k = made.keys[0].double().repeat_interleave(len(q) // len(made.keys[0]), 0)
    if q.shape != k.shape:
        return torch.full((len(q),), torch.nan, dtype=torch.float64)
    crossed = (
        k @ q.mT
    )  # (Hq, D, D): M has rank D, so sums over its entries are traces of small ones
    both = (crossed * crossed.mT).sum((1, 2))
    size = ((q @ q.mT) * (k @ k.mT)).sum((1, 2))
    return both / size.clamp_min(1e-300)
