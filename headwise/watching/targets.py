"""Scalars to differentiate: what a model's output says about a token or a class.

A log-probability saturates: where a model is sure of its answer, no single edge changes it much to
first order, though removing several changes it a lot. A difference of two logits does not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def runner_up(logits: Tensor, answer: int | Tensor | None = None, at: int = -1) -> Tensor:
    """The logit of an answer minus that of the best other one, at one position: a scalar.

    logits (B, N, V), or (B, V) and (V,) without positions; `answer` is the model's own first choice
    unless it is given, a token or one per batch entry. Batch entries are added up. It is the
    default to differentiate because it does not saturate.

    >>> logits = torch.tensor([[[0.0, 3.0, 1.0]]])
    >>> runner_up(logits), runner_up(logits, answer=2)
    (tensor(2.), tensor(-2.))
    """
    rows = _rows(logits, at, "runner_up")
    chosen = _chosen(rows, answer, "runner_up")
    others = rows.scatter(1, chosen[:, None], -torch.inf)
    return (rows.gather(1, chosen[:, None])[:, 0] - others.amax(1)).sum()


def logit_difference(
    logits: Tensor, answer: int | Tensor, other: int | Tensor, at: int = -1
) -> Tensor:
    """The logit of one token or class minus that of another, at one position: a scalar.

    >>> logit_difference(torch.tensor([[0.0, 3.0, 1.0]]), answer=1, other=2)
    tensor(2.)
    """
    rows = _rows(logits, at, "logit_difference")
    one, two = (_chosen(rows, x, "logit_difference")[:, None] for x in (answer, other))
    return (rows.gather(1, one) - rows.gather(1, two)).sum()


def log_probability(logits: Tensor, answer: int | Tensor | None = None, at: int = -1) -> Tensor:
    """The log-probability of a token or class, by default the model's first choice: a scalar.

    It saturates where the model is sure; `runner_up` does not.

    >>> log_probability(torch.zeros(1, 4)).exp()
    tensor(0.2500)
    """
    rows = _rows(logits, at, "log_probability")
    chosen = _chosen(rows, answer, "log_probability")
    return rows.log_softmax(1).gather(1, chosen[:, None]).sum()


def sequence_loss(logits: Tensor, ids: Tensor, ignore: int = -100) -> Tensor:
    """The loss of a language model on its own tokens: each position predicts the next one.

    logits (B, N, V), ids (B, N); positions whose next token is `ignore` do not count.

    >>> round(sequence_loss(torch.zeros(1, 3, 4), torch.tensor([[1, 2, 3]])).item(), 4)
    1.3863
    """
    if logits.ndim != 3 or ids.shape != logits.shape[:2]:
        raise ValueError(
            f"sequence_loss(logits {tuple(logits.shape)}, ids {tuple(ids.shape)}): it takes logits "
            "(batch, length, tokens) and ids (batch, length)"
        )
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), ignore_index=ignore
    )


def _rows(logits: Tensor, at: int, call: str) -> Tensor:
    """The logits of one position, (B, V), in float32 or wider."""
    if logits.ndim not in (1, 2, 3):
        raise ValueError(
            f"{call} takes logits (batch, length, tokens), (batch, classes) or (classes,), not "
            f"{tuple(logits.shape)}"
        )
    if logits.ndim == 3:
        if not -logits.shape[1] <= at < logits.shape[1]:
            raise ValueError(f"{call}(at={at!r}): there are {logits.shape[1]} positions")
        logits = logits[:, at]
    rows = logits if logits.ndim == 2 else logits[None]
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _chosen(rows: Tensor, answer: int | Tensor | None, call: str) -> Tensor:
    """The number of the answer in each batch entry, (B,)."""
    if answer is None:
        return rows.detach().argmax(1)
    chosen = torch.as_tensor(answer, device=rows.device).expand(rows.shape[0]).long()
    if bool(((chosen < 0) | (chosen >= rows.shape[1])).any()):
        raise ValueError(f"{call}: answers are numbers from 0 to {rows.shape[1] - 1}")
    return chosen
