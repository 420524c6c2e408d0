"""The heads that this rank computes of a layer whose weights are shared out between ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from headwise.api import sharded
from headwise.nn import MultiHeadAttention
from headwise.watching.head_weights import SEPARATE


def is_sharded(x: object) -> bool:
    """True for a DTensor."""
    return sharded(x) is not None


def head_place(module: nn.Module, heads: int, width: int) -> tuple[int, int] | None:
    """The number of the first of this rank's `heads`, and of all heads of the layer.

    Read from the weight that makes its queries, if that is a DTensor: one that FSDP has sharded is
    whole while the layer runs, and one of a tensor-parallel plan makes some of the heads. None if
    it is a plain tensor, or if queries, `width` wide, are not made by a weight of their own.
    """
    weight = _query_weight(module)
    if weight is None or not is_sharded(weight) or not width:
        return None
    total = weight.shape[0] // width
    if total <= heads:
        return 0, heads
    mesh = weight.device_mesh
    for dimension in reversed(range(mesh.ndim)):  # FSDP shards over the dimensions before
        shares_out = weight.placements[dimension].is_shard(0)
        if shares_out and mesh.size(dimension) * heads == total:
            return mesh.get_local_rank(dimension) * heads, total
    return None


def _query_weight(module: nn.Module) -> Any:
    names = ("query",) if isinstance(module, MultiHeadAttention) else [q for q, _ in SEPARATE]
    for name in names:
        found = getattr(getattr(module, name, None), "weight", None)
        if found is not None:
            return found
    return None
