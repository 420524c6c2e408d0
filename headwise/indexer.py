"""The loss that teaches an indexer, which chooses keys for sparse attention."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.problem import Problem, Terms, describe, pose
from headwise.engines.index_call import index_loss as operator
from headwise.handover import sharded, split_calls
from headwise.score import Score

__all__ = ["index_loss"]


class IndexCall(NamedTuple):
    """The tensors of a call."""

    q: Tensor
    k: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor

    def __str__(self) -> str:
        parts = (f"{name} {describe(x)}" for name, x in self._asdict().items())
        return f"hw.index_loss({', '.join(parts)})"


AXES = {
    "index_q": ("batch", "index heads", "queries", "index width"),
    "index_k": ("batch", "keys", "index width"),
    "index_weights": ("batch", "index heads", "queries"),
}


def index_loss(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    index_weights: Tensor,
    *,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    selected: Tensor | None = None,
) -> Tensor:
    """The loss that teaches an indexer where attention looks: a KL divergence, averaged over rows.

    q (B, Hq, N, D) and k (B, Hkv, M, D) are the main attention's, with its options, and get no
    gradient. The indexer scores key j by Σ_h w_h ReLU(index_q_h · index_k_j), with index_q
    (B, Hi, N, Di), index_k (B, M, Di) and index_weights (B, Hi, N). The loss of a row is
    KL(p ‖ softmax of the scores), p the weights summed over the heads and normalised to one, over
    the keys that some head sees; rows that see no key do not count. Memory is linear in the length.

    With `selected`, (B|1, N, K) integers, main heads and indexer see only these keys, as in the
    sparse stage of DeepSeek-V3.2's training. Numbers that are no key's, such as -1, select nothing.

    >>> import torch, headwise as hw
    >>> q, k = torch.randn(2, 1, 4, 100, 16).unbind(0)
    >>> index_q, index_k = torch.randn(1, 2, 100, 8, requires_grad=True), torch.randn(1, 100, 8)
    >>> loss = hw.index_loss(q, k, index_q, index_k, torch.ones(1, 2, 100), mask=hw.mask.causal())
    >>> loss.backward()
    >>> loss.shape, index_q.grad.shape
    (torch.Size([]), torch.Size([1, 2, 100, 8]))
    """
    given = IndexCall(q, k, index_q, index_k, index_weights)
    options = Options(score, mask, bias, softcap, sinks)
    if (split := split_calls()) is not None:
        return split.index_loss(*given, options, selected)
    try:
        problem = _posed(given, options)
        place = problem.place
        check_indexer(given, place.batch, place.queries, place.keys, selected)
    except ValueError as error:
        raise ValueError(f"{error}\n  in {given}") from None
    divergence, mass = row_losses(problem, problem.terms(), given, selected)
    loss: Tensor = divergence.sum() / (mass > 0).sum().clamp_min(1)
    return loss


def row_losses(
    problem: Problem, terms: Terms, given: IndexCall, selected: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The divergence of each row, and the weight of all heads on its keys, (B, N) each.

    The mass is 0 for a row that sees no key.
    """
    constant = (x.detach() if isinstance(x, Tensor) else x for x in terms)
    chosen = None if selected is None else selected[:, None]
    found = operator(problem.q, problem.k, problem.v, *constant, *given[2:], chosen)
    return found[0], found[1]


def _posed(given: IndexCall, options: Options) -> Problem:
    """The main attention as a problem without values."""
    q, k = given.q, given.k
    for x in (q, k):
        shaped: object = x
        if not isinstance(shaped, Tensor) or shaped.ndim != 4:
            raise ValueError("q and k need the axes (batch, heads, length, width)")
    if sharded(*given) is not None:
        raise ValueError("it takes plain tensors; give it this rank's part, x.to_local()")
    q, k = q.detach(), k.detach()
    try:
        return pose("index_loss", q, k, k[..., :0], options)
    except ValueError as error:
        raise ValueError(str(error).partition("\n  in ")[0]) from None


def check_indexer(given: IndexCall, batch: int, queries: int, keys: int, selected: object) -> None:
    """Raise ValueError unless the indexer's tensors fit a call of these sizes."""
    device = given.q.device
    sizes: dict[str, int] = {}
    for name, axes in AXES.items():
        x: object = getattr(given, name)
        if not isinstance(x, Tensor) or x.ndim != len(axes) or not x.is_floating_point():
            raise ValueError(f"{name} must be a tensor ({', '.join(axes)}), not {describe(x)}")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device}, and q on {device}")
        sizes = dict(zip(axes, x.shape, strict=True)) | sizes
    sizes |= {"batch": batch, "queries": queries, "keys": keys}
    for name, axes in AXES.items():
        shape, wanted = tuple(getattr(given, name).shape), tuple(sizes[axis] for axis in axes)
        if shape != wanted:
            raise ValueError(f"{name} has shape {shape}; this call needs {wanted}")
    if selected is None:
        return
    if (
        not isinstance(selected, Tensor)
        or selected.ndim != 3
        or selected.dtype.is_floating_point
        or selected.dtype == torch.bool
    ):
        raise ValueError(
            "selected must be an integer tensor (batch or 1, queries, keys selected), not "
            f"{describe(selected)}"
        )
    if selected.shape[0] not in (1, batch) or selected.shape[1] != queries:
        raise ValueError(
            f"selected has shape {tuple(selected.shape)}; this call needs "
            f"({batch} or 1, {queries}, keys selected)"
        )
