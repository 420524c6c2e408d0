"""One rank's part of a layer under tensor parallelism: heads, hidden width and vocabulary."""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatch
from typing import TypeVar

from headwise.costs.layers import (
    AttentionLayer,
    EmbeddingLayer,
    FeedForwardLayer,
    LinearLayer,
)
from headwise.costs.workload import share
from headwise.messages import say

T = TypeVar("T")


def sharded(layer: T, ranks: int) -> T:
    """The part of a layer that one of `ranks` ranks holds; ValueError if it does not divide.

    Heads and hidden widths are divided. If there are fewer key heads than ranks, each rank holds
    one, so ranks must be a multiple of them. A vocabulary is divided as torch does: the first rank
    has the larger part.
    """
    if ranks == 1:
        return layer
    part: T = _part(layer, ranks)  # type: ignore[assignment]
    return part


@singledispatch
def _part(layer: object, ranks: int) -> object:
    return layer


@_part.register
def _(layer: AttentionLayer, ranks: int) -> AttentionLayer:
    heads = share(say("attention with heads"), layer.heads, ranks, "tp")
    kv_heads = layer.kv_heads
    if kv_heads % ranks == 0:
        kv_heads //= ranks
    elif ranks % kv_heads == 0:
        kv_heads = 1
    else:
        raise ValueError(
            say(
                "{heads} key heads neither divide over {ranks} ranks (tp={ranks}) nor divide "
                "{ranks}, so that each rank would hold one; choose another tp",
                heads=kv_heads,
                ranks=ranks,
            )
        )
    return replace(
        layer,
        heads=heads,
        kv_heads=kv_heads,
        score_params=share(say("score parameters"), layer.score_params, ranks, "tp"),
        bias_params=share(say("bias parameters"), layer.bias_params, ranks, "tp"),
    )


@_part.register
def _(layer: FeedForwardLayer, ranks: int) -> FeedForwardLayer:
    return replace(layer, hidden=share(say("a hidden width"), layer.hidden, ranks, "tp"))


@_part.register
def _(layer: EmbeddingLayer, ranks: int) -> EmbeddingLayer:
    return replace(layer, rows=-(-layer.rows // ranks)) if layer.split else layer


@_part.register
def _(layer: LinearLayer, ranks: int) -> LinearLayer:
    if layer.split == "none":
        return layer
    return replace(layer, outputs=-(-layer.outputs // ranks))
