"""The heads that this rank computes of a layer whose weights are shared out between ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.handover import sharded
from headwise.nn import MultiHeadAttention
from headwise.nn.head_shares import head_share
from headwise.watching.head_weights import SEPARATE


def is_sharded(x: object) -> bool:
    """True for a DTensor."""
    return sharded(x) is not None


def head_place(module: nn.Module, heads: int, width: int) -> tuple[int, int] | None:
    """The number of the first of this rank's `heads`, and of all heads of the layer.

    Read from the weight that makes its queries, `width` wide; None if that does not tell.
    """
    return head_share(_query_weight(module), heads, width)


def _query_weight(module: nn.Module) -> Any:
    names = ("query",) if isinstance(module, MultiHeadAttention) else [q for q, _ in SEPARATE]
    for name in names:
        found = getattr(getattr(module, name, None), "weight", None)
        if found is not None:
            return found
    return None
