"""Which backward serves a call on a Hopper GPU: the kernel in Gluon, cuDNN's, or Triton's kernels.

cuDNN's is asked first, for the calls that it takes (`library_kernels`), except those in AHEAD. Then
comes the kernel in Gluon where it serves, and Triton's kernels take the rest.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.engines import failures
from headwise.engines.failures import Family
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.operands import WORD, cap_of, pad
from headwise.engines.triton.kernels.interpreter import INTERPRETING

PROVEN = False  # True once `python -m bench.gpu_backward` has passed on a GPU
SWITCH = "HEADWISE_HOPPER_BACKWARD"  # 1 or 0: use the kernel where it serves, or don't
AHEAD: frozenset[tuple[int, bool]] = frozenset()  # where it is faster than cuDNN: width, causal
LEAST = 512  # rows and keys from which it is used: with fewer, most of the GPU waits
WIDEST = 128  # padded width of heads
HOPPER = 9


def serves(q: Tensor, k: Tensor, v: Tensor, terms: Terms, dtype: torch.dtype) -> bool:
    """Return whether the kernel in Gluon serves a call with an output of this dtype."""
    if os.environ.get(SWITCH, str(int(PROVEN))) != "1" or INTERPRETING:
        return False
    if card(q.device).major != HOPPER or min(q.shape[2], k.shape[2]) < LEAST:
        return False
    return takes(q, k, v, terms, dtype) and failures.reason(family(q, v, terms)) is None


def ahead(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> bool:
    """Return whether the kernel in Gluon comes before cuDNN's."""
    causal = terms.band is not None and len(terms.band) == 3
    return (pad(q), causal) in AHEAD and serves(q, k, v, terms, q.dtype)


def takes(q: Tensor, k: Tensor, v: Tensor, terms: Terms, dtype: torch.dtype) -> bool:
    """Return whether the kernel in Gluon can compute a call with an output of this dtype."""
    added = (terms.additive, terms.dense, terms.bias, terms.slopes, terms.relative, terms.seed)
    if any(x is not None for x in added) or not _capped_alike(terms):
        return False
    if q.dtype not in (torch.bfloat16, torch.float16) or dtype != q.dtype:
        return False
    if pad(q) != pad(v) or pad(q) > WIDEST or q.shape[-1] % 8 or v.shape[-1] % 8:
        return False
    some = q.numel() > 0 and k.numel() > 0 and v.numel() > 0
    rows = q.shape[0] * q.shape[1] * (q.shape[2] + WIDEST)
    return some and 5 * rows < WORD


def _capped_alike(terms: Terms) -> bool:
    """Return whether there is no cap, or one that the forward kernel computes in the same way."""
    if not terms.softcap:
        return True
    return cap_of(terms.scale, terms.softcap) == 1 and 1e-6 < terms.softcap < 1e6


def family(q: Tensor, v: Tensor, terms: Terms) -> Family:
    """Return the family of calls whose kernel in Gluon fails together."""
    return failures.family_of_terms("hopper backward", q, v, terms, True)
