"""Sparse attention: policies that keep some keys of each row, and attention over the kept ones.

A policy is a value. `amap.kept(policy)` measures the weight that it keeps, `hw.sparsify` runs a
model under it, and `attention` here computes one call. Nothing gets faster: it tells what a sparse
kernel would compute.
"""

from __future__ import annotations

from torch import Tensor

from headwise.api import attention as whole_attention
from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.patterns import Lengths
from headwise.core.patterns import Window as WindowMask
from headwise.core.policies import (
    Blocks,
    Evicted,
    Indices,
    Policy,
    TopK,
    Window,
    check_policy,
)
from headwise.core.problem import Problem, pose, restate
from headwise.dropout import Dropout
from headwise.engines.sparse_call import attend
from headwise.handover import sharded, split_calls
from headwise.score import Score

__all__ = ["Blocks", "Evicted", "Indices", "Policy", "TopK", "Window", "attention"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    policy: Policy,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float | Dropout = 0.0,
) -> Tensor:
    """Attention over the keys that a policy keeps, as if the others were not there.

    q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv) -> (B, Hq, N, Dv). The options are those of
    `hw.attention`; fewer queries than keys are the last ones. The weights are renormalised over the
    kept keys, and learned sinks stay in the denominator. Memory is linear in the length, and
    gradients flow to everything that the call is made of.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 2, 9, 16).unbind(0)
    >>> out = hw.sparse.attention(q, k, v, hw.sparse.TopK(4), mask=hw.mask.causal())
    >>> whole = hw.attention(q, k, v, mask=hw.mask.causal())
    >>> torch.allclose(out[:, :, :4], whole[:, :, :4], atol=1e-6)
    True
    """
    if split_calls() is not None or sharded(q, k, v) is not None:
        raise ValueError(
            "hw.sparse.attention takes whole sequences on one device; undo context_parallel, or "
            f"give it this rank's heads, q.to_local()\n  in {restate('sparse.attention', q, k, v)}"
        )
    options = Options(score, mask, bias, softcap, sinks, dropout)
    problem = pose("sparse.attention", q, k, v, options)
    try:
        check_policy(policy, problem.place, k.shape[1])
        windowed = _windowed(policy, mask, problem)
        if windowed is None:
            return attend(problem, policy)
    except ValueError as error:
        call = restate("sparse.attention", q, k, v, mask=mask, bias=bias)
        raise ValueError(f"{error}\n  in {call}") from None
    return whole_attention(q, k, v, **options._replace(mask=windowed).keywords())


def _windowed(policy: Policy, mask: Mask | None, problem: Problem) -> Mask | None:
    """The mask of a call under a window; None if that is not an interval mask, or no window."""
    if not isinstance(policy, Window):
        return None
    near: Mask = WindowMask(policy.left, 0, problem.shift())
    near = near | Lengths(policy.sinks, "prefix") if policy.sinks else near
    if mask is None:
        return near
    return mask & near if 0 < mask.pieces * near.pieces <= 2 else None
