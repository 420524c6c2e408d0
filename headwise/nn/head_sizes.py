"""The sizes of a multi-head layer, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headwise.core.arguments import is_integer
from headwise.core.problem import autocasting, describe
from headwise.nn.caches.cache import Cache, Memory
from headwise.nn.layer_options import check_kind
from headwise.nn.projections import Projections, Separate, Unprojected

if TYPE_CHECKING:
    from headwise.nn.multi_head import MultiHeadAttention


@dataclass(frozen=True)
class Widths:
    """Every width of a multi-head layer; `of` fills in what was left open.

    >>> Widths.of(512, 8, kv_heads=2).head_dim
    64
    """

    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    context: tuple[int, int]  # where keys and values are made from

    @classmethod
    def of(
        cls,
        d_model: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        context_dim: int | tuple[int, int] | None = None,
    ) -> Widths:
        """The widths that the constructor's arguments mean; ValueError where they do not divide."""
        sizes = {"d_model": d_model, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in {**sizes, "value_dim": value_dim}.items():
            if size is not None and (not is_integer(size) or size < 1):
                raise ValueError(f"{name}={size!r} must be at least 1, and an integer")
        if head_dim is None:
            if d_model % heads:
                raise ValueError(
                    f"d_model={d_model} does not divide into {heads} heads; choose heads that "
                    "divide it, or say how wide a head is with head_dim="
                )
            head_dim = d_model // heads
        kv_heads = heads if kv_heads is None else kv_heads
        if heads % kv_heads:
            raise ValueError(
                f"{heads} heads can't share {kv_heads} key and value heads evenly; kv_heads must "
                "divide heads"
            )
        if context_dim is None:
            context_dim = d_model
        pair = (context_dim, context_dim) if isinstance(context_dim, int) else context_dim
        wide = head_dim if value_dim is None else value_dim
        return cls(d_model, heads, kv_heads, head_dim, wide, pair)

    def check(self, projections: Projections) -> None:
        """Raise ValueError where queries and keys can't be made in this way."""
        check_kind("projections", projections, Projections, "hw.nn.Separate() or hw.nn.Shared()")
        if isinstance(projections, Separate):
            return
        if self.kv_heads != self.heads or self.context[0] != self.d_model:
            raise ValueError(
                f"{projections} makes queries and keys alike, so it needs kv_heads = heads and a "
                f"context as wide as the input; here kv_heads={self.kv_heads}, heads={self.heads}, "
                f"context_dim={self.context[0]}, d_model={self.d_model}"
            )
        sliced = self.heads * self.head_dim == self.d_model
        if isinstance(projections, Unprojected) and not sliced and self.head_dim != self.d_model:
            raise ValueError(
                "Unprojected() gives each head a slice of the input, head_dim = d_model / heads, "
                f"or all of it, head_dim = d_model; head_dim={self.head_dim} is neither"
            )


def check_call(
    attn: MultiHeadAttention,
    x: Tensor,
    context: Tensor | Memory | None,
    values: Tensor | None,
    cache: Cache | None,
    positions: Tensor | None,
) -> None:
    """Raise ValueError where a layer is called with what it was not built for."""
    for name, given in (("x", x), ("context", context), ("values", values)):
        if isinstance(given, Tensor):
            _check_dtype(name, given, attn.value)
        elif name == "x" or not (given is None or isinstance(given, Memory)):
            raise ValueError(f"{name} is a tensor, not {describe(given)}")
    if not (cache is None or isinstance(cache, Cache)):
        raise ValueError(f"cache={describe(cache)} is no cache; hw.nn.GrowingCache() is one")
    if x.ndim not in (2, 3) or x.shape[-1] != attn.d_model:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; (batch, length, {attn.d_model}) or (length, "
            f"{attn.d_model}) would work"
        )
    if not isinstance(context, Memory):
        keys_from = x if context is None else context
        values_from = keys_from if values is None else values
        if (keys_from.shape[-1], values_from.shape[-1]) != attn.widths.context:
            raise ValueError(
                f"keys would be made from {tuple(keys_from.shape)} and values from "
                f"{tuple(values_from.shape)}, and this attention was built with "
                f"context_dim={attn.widths.context}"
            )
    if cache is not None and (context is not None or x.ndim == 2):
        raise ValueError(
            "a cache holds the keys and values of a batch's own tokens, (batch, length, width); "
            "attn.remember(context) keeps those of a context"
        )
    if positions is None:
        return
    if attn.position is None or not (attn.position.turns or attn.position.at_input):
        raise ValueError(
            f"positions= would be ignored: the position of this attention is {attn.position}"
        )
    if positions.shape not in (x.shape[:-1], x.shape[-2:-1]):
        raise ValueError(
            f"positions have shape {tuple(positions.shape)}; {tuple(x.shape[-2:-1])} or "
            f"{tuple(x.shape[:-1])} would number x {tuple(x.shape)}"
        )


def _check_dtype(name: str, x: Tensor, layer: nn.Module) -> None:
    """Raise ValueError where a plain linear layer would; others have dtypes of their own."""
    weight = getattr(layer, "weight", None)
    if type(weight) is not nn.Parameter or weight.dtype == x.dtype or autocasting(x.device.type):
        return
    if type(layer) is nn.Linear:
        raise ValueError(
            f"{name} is {x.dtype} and the layer {weight.dtype}; {name}.to({weight.dtype}) fits"
        )
