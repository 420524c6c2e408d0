"""The options of a call, cut to some of its batch entries and heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from headwise.bias import ALiBi, Bias, RelativeBuckets, Sum
from headwise.core.mask_parts import part_of
from headwise.core.options import Options
from headwise.core.place import Place, as_four_axes
from headwise.dropout import Dropout
from headwise.score import Additive, Cosine, General, Score


def options_of_part(place: Place, batch: range, heads: range, options: Options) -> Options:
    """The options of part of the call at `place`.

    Dropout drops what it drops in the whole call.
    """
    sinks, dropout = options.sinks, options.dropout
    if isinstance(dropout, Dropout):
        entry, head = dropout.first
        dropout = replace(dropout, first=(entry + batch.start, head + heads.start))
    return options._replace(
        score=_score(options.score, heads),
        mask=part_of(options.mask, place, batch, heads),
        bias=_bias(options.bias, batch, heads),
        sinks=None if sinks is None else sinks[heads.start : heads.stop],
        dropout=dropout,
    )


def learned_tensors(options: Options) -> dict[str, Tensor]:
    """The tensors of a call's options that may have a gradient, by name: all ranks have the same.

    A bias tensor is not one of them: it has the rows of its rank.

    >>> import torch, headwise as hw
    >>> list(learned_tensors(Options(bias=hw.ALiBi(4), sinks=torch.zeros(4))))
    ['the slopes of bias', 'sinks']
    """
    found: dict[str, Any] = {}
    for option in ("score", "bias", "sinks"):
        given = getattr(options, option)
        if not isinstance(given, Tensor) and given is not None:
            found |= {f"the {name} of {option}": x for name, x in vars(given).items()}
        elif option != "bias":
            found[option] = given
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _score(score: Score | None, heads: range) -> Score | None:
    part = slice(heads.start, heads.stop)
    if isinstance(score, Additive) and score.weight.ndim == 2:
        return Additive(score.weight[part])
    if isinstance(score, General) and score.weight.ndim == 3:
        return General(score.weight[part])
    if isinstance(score, Cosine) and isinstance(score.temperature, Tensor):
        many = score.temperature.ndim == 1
        return Cosine(score.temperature[part]) if many else score
    return score


def _bias(bias: Bias | None, batch: range, heads: range) -> Bias | None:
    """The bias of these batch entries and heads.

    >>> import torch
    >>> _bias(torch.arange(6.0).reshape(2, 3, 1, 1), range(1, 2), range(0, 2)).flatten()
    tensor([3., 4.])
    >>> _bias(torch.arange(3.0).reshape(1, 3, 1, 1), range(1, 2), range(2, 3)).flatten()
    tensor([2.])
    """
    part = slice(heads.start, heads.stop)
    if isinstance(bias, ALiBi):
        return ALiBi(bias.slopes[part])
    if isinstance(bias, RelativeBuckets):
        return replace(bias, table=bias.table[:, part])
    if isinstance(bias, Sum):
        tensor = _bias(bias.tensor, batch, heads)
        distances = _bias(bias.distances, batch, heads)
        assert isinstance(tensor, Tensor) and isinstance(distances, ALiBi | RelativeBuckets)
        return Sum(distances, tensor)
    if bias is None:
        return None
    bias = as_four_axes(bias)
    bias = bias if bias.shape[0] == 1 else bias[batch.start : batch.stop]
    return bias if bias.shape[1] == 1 else bias[:, part]
