"""From projected heads to a call of `hw.attention`: positions, and what a cache held before."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.nn.caches.cache import Cache, Memory
from headwise.nn.placement import PositionModule
from headwise.score import Score


class Call(NamedTuple):
    """A call of `hw.attention`: q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv), options."""

    q: Tensor
    k: Tensor
    v: Tensor
    score: Score
    mask: Mask | None
    bias: Bias | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    engine: str

    def options(self) -> dict[str, Any]:
        """All but q, k and v, by keyword."""
        return dict(zip(self._fields[3:], self[3:], strict=True))


def placed(
    position: PositionModule | None,
    heads: tuple[Tensor, Tensor, Tensor],
    at: Tensor | None,
    context: Tensor | Memory | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys turned to where they stand, with what the cache held before them.

    q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv); the queries stand `at` (N,) or (B, N), a
    context's keys at 0, 1, ...; a `Memory`'s keys are turned already.
    """
    q, k, v = heads
    if position is None or not position.turns:
        return (q, k, v) if cache is None else (q, *cache.append(k, v))
    assert at is not None
    length = at.max() + 1 if position.turns_late else None
    waves = position.waves(at, length)
    q = position.turn(q, waves)
    if cache is not None and position.turns_late:
        k, v = cache.append(k, v)
        return q, position.turn(k, position.waves(numbers(k) + cache.first, length)), v
    if context is None:
        k = position.turn(k, waves)
    elif isinstance(context, Tensor):
        k = position.turn(k, position.waves(numbers(k), length))
    return (q, k, v) if cache is None else (q, *cache.append(k, v))


def numbers(x: Tensor) -> Tensor:
    """0, 1, ... for the positions of x (..., N, width).

    >>> numbers(torch.zeros(2, 3, 8))
    tensor([0, 1, 2])
    """
    return torch.arange(x.shape[-2], device=x.device)
