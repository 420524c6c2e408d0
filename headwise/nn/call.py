"""From a layer's inputs to a call of `hw.attention`: checks, positions and the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.api import attention
from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.mask_parts import LaterKeys
from headwise.core.options import PLAIN, Options
from headwise.core.problem import autocasting, describe
from headwise.dropout import Dropout
from headwise.handover import held_positions, reached, split_calls
from headwise.nn.caches.cache import Cache, Memory, check_cache
from headwise.nn.layer_options import Widths
from headwise.nn.positions import PositionModule
from headwise.score import Dot, Score


class Call(NamedTuple):
    """The arguments of `hw.attention`: q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv), …"""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Options = PLAIN

    def options(self) -> dict[str, Any]:
        """Every argument but q, k and v, by keyword."""
        return self.given.keywords()

    def attend(self) -> Tensor:
        """The output of the call, (B, Hq, N, Dv)."""
        mask = self.given.mask
        mask = mask.plain if isinstance(mask, LaterKeys) else mask
        return attention(self.q, self.k, self.v, **self.options() | {"mask": mask})

    def changed(self, **options: Any) -> Call:
        """The same call with other options."""
        return self._replace(given=self.given._replace(**options))

    @property
    def score(self) -> Score:
        """The score, by which a query and a key give a logit."""
        return self.given.score or Dot()

    @property
    def mask(self) -> Mask | None:
        """The keys that each query may see; None for all."""
        return self.given.mask

    @property
    def bias(self) -> Bias | None:
        """The bias, which is added to the logits."""
        return self.given.bias

    @property
    def softcap(self) -> float | None:
        """The cap of the logits."""
        return self.given.softcap

    @property
    def sinks(self) -> Tensor | None:
        """Logits (Hq,) that take weight and have no value."""
        return self.given.sinks

    @property
    def dropout(self) -> float | Dropout:
        """The rate at which weights are dropped."""
        return self.given.dropout

    @property
    def engine(self) -> str:
        """The engine that was asked for."""
        return self.given.engine


def position_and_cache(
    position: PositionModule | None,
    heads: tuple[Tensor, Tensor, Tensor],
    at: Tensor | None,
    context: Tensor | Memory | None,
    cache: Cache | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotate queries and keys to their positions, and put the cache's keys and values before them.

    q (B, Hq, N, D), k (B, Hkv, M, D), v (B, Hkv, M, Dv). The queries are at positions `at`, (N,) or
    (B, N); the keys of a context at 0, 1, …; those of a `Memory` are rotated already.
    """
    q, k, v = heads
    if position is None or not position.rotates:
        return (q, k, v) if cache is None else (q, *cache.append(k, v))
    assert at is not None
    length = reached(at) if position.rotates_late else None
    waves = position.waves(at, length)
    q = position.rotate(q, waves)
    if cache is not None and position.rotates_late:
        k, v = cache.append(k, v)
        return q, position.rotate(k, position.waves(indices(k) + cache.first, length)), v
    if context is None:
        k = position.rotate(k, waves)
    elif isinstance(context, Tensor):
        k = position.rotate(k, position.waves(*held_positions(k.shape[-2], k.device)))
    return (q, k, v) if cache is None else (q, *cache.append(k, v))


def indices(x: Tensor) -> Tensor:
    """The positions of the tokens of x (..., N, width): 0, 1, …, or a rank's part of them.

    >>> indices(torch.zeros(2, 3, 8))
    tensor([0, 1, 2])
    """
    return held_positions(x.shape[-2], x.device)[0]


def check_inputs(
    widths: Widths,
    x: Tensor,
    context: Tensor | Memory | None,
    values: Tensor | None,
    cache: Cache | None,
) -> None:
    """Raise ValueError if a layer of these widths can't take these inputs."""
    check_sequence("x", x)
    check_cache(cache)
    if cache is not None and split_calls() is not None:
        raise ValueError(
            "a cache would hold this rank's part of the sequence alone, so context_parallel takes "
            "none; undo context_parallel to generate"
        )
    if x.shape[-1] != widths.d_model:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; this attention takes (batch, length, {widths.d_model}) "
            f"or (length, {widths.d_model})"
        )
    if not isinstance(context, Memory):
        check_source(widths, x if context is None else context, values)
    elif values is not None:
        raise ValueError(
            "values= would be ignored: this context is a Memory, which has values; "
            "attn.remember(context, values) makes one of both"
        )
    for name, given in (("context", context), ("values", values)):
        if isinstance(given, Tensor) and given.ndim != x.ndim:
            raise ValueError(
                f"{name} {tuple(given.shape)} must have as many axes as x {tuple(x.shape)}"
            )
    if cache is not None and (context is not None or x.ndim == 2):
        raise ValueError(
            "a cache holds the keys and values of a batch's own tokens, (batch, length, width); "
            "attn.remember(context) keeps those of a context"
        )


def check_source(widths: Widths, context: Tensor, values: Tensor | None) -> None:
    """Raise ValueError unless keys and values can be made from (..., M, context_dim)."""
    values = context if values is None else values
    check_sequence("context", context)
    check_sequence("values", values)
    if (context.shape[-1], values.shape[-1]) != widths.context:
        raise ValueError(
            f"keys would be made from {tuple(context.shape)} and values from "
            f"{tuple(values.shape)}, but this attention was built with context_dim={widths.context}"
        )


def check_sequence(name: str, given: object) -> None:
    """Raise ValueError unless `given` is a tensor (length, width) or (batch, length, width)."""
    if not isinstance(given, Tensor) or given.ndim not in (2, 3):
        raise ValueError(
            f"{name} must be a tensor (batch, length, width) or (length, width), not "
            f"{describe(given)}"
        )


def check_positions(position: PositionModule | None, x: Tensor, positions: object) -> None:
    """Raise ValueError if `positions` are of no use, or do not fit x (..., N, d_model)."""
    if position is None or not (position.rotates or position.at_input):
        raise ValueError(
            f"positions= would be ignored: the position of this attention is {position}"
        )
    shapes = (x.shape[:-1], x.shape[-2:-1])
    if not isinstance(positions, Tensor) or positions.shape not in shapes:
        raise ValueError(
            f"positions={describe(positions)} must be a tensor {tuple(x.shape[-2:-1])} or "
            f"{tuple(x.shape[:-1])} for x {tuple(x.shape)}"
        )
    if positions.dtype.is_complex or positions.dtype == torch.bool:
        raise ValueError(f"positions={describe(positions)} must be numbers")


def check_dtype(layer: nn.Module, **inputs: Tensor | Memory | None) -> None:
    """Raise ValueError if a plain layer could not take an input's dtype.

    Layers that were quantised or wrapped by others choose their own dtypes.
    """
    weight = getattr(layer, "weight", None)
    if type(layer) not in (nn.Linear, nn.Conv2d) or type(weight) is not nn.Parameter:
        return
    for name, x in inputs.items():
        if isinstance(x, Tensor) and x.dtype != weight.dtype and not autocasting(x.device.type):
            raise ValueError(
                f"{name} is {x.dtype} and the layer {weight.dtype}; use {name}.to({weight.dtype})"
            )
