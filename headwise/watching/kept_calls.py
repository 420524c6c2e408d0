"""What is kept of a call for its map: whatever its model writes over is copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from torch import Tensor

from headwise.bias import ALiBi, Bias, RelativeBuckets
from headwise.core.versions import Versions, may_be_overwritten
from headwise.nn.call import Call
from headwise.score import Additive, Cosine, General, Score


def owned(call: Call) -> Call:
    """The call with copies of a cache's keys and of what the model learns.

    A projection is fresh memory, which nobody writes to again: it is kept as it is.
    """
    q, k = (x.clone() if may_be_overwritten(x) else x for x in (call.q, call.k))
    sinks = None if call.sinks is None else _copy(call.sinks)
    return call._replace(q=q, k=k, score=_score(call.score), bias=_bias(call.bias), sinks=sinks)


def noted(call: Call) -> Versions:
    """A note of what all tensors of a call hold."""
    return Versions({str(number): x for number, x in enumerate(_tensors(tuple(call)))})


def _tensors(x: object) -> Iterator[Tensor]:
    """The tensors that a call is made of, those of its score, bias and mask included."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from _tensors(part)
    elif is_dataclass(x):
        for part in fields(x):
            yield from _tensors(getattr(x, part.name))


def _score(score: Score) -> Score:
    if isinstance(score, Additive | General):
        return type(score)(_copy(score.weight))
    if isinstance(score, Cosine) and isinstance(score.temperature, Tensor):
        return Cosine(_copy(score.temperature))
    return score


def _bias(bias: Bias | None) -> Bias | None:
    if isinstance(bias, ALiBi):
        return ALiBi(_copy(bias.slopes))
    return replace(bias, table=_copy(bias.table)) if isinstance(bias, RelativeBuckets) else bias


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()
