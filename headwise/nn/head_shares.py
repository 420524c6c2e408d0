"""The heads that this rank computes of a layer, read from the placement of its weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headwise.dropout import Dropout
from headwise.handover import sharded


def head_share(weight: Any, heads: int, width: int) -> tuple[int, int] | None:
    """The number of the first of this rank's `heads`, and of all heads of the layer.

    `weight` makes the queries, each `width` wide. A DTensor that FSDP has sharded is whole while
    the layer runs, and one of a tensor-parallel plan makes some of the heads. None if it is a plain
    tensor or if there is none.
    """
    if weight is None or sharded(weight) is None or not width:
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


def numbered_dropout(dropout: float | Dropout, share: tuple[int, int] | None) -> float | Dropout:
    """The dropout of a share of the heads: it drops what it would drop in the whole layer."""
    if not dropout or share is None or share[0] == 0:
        return dropout
    found = dropout if isinstance(dropout, Dropout) else Dropout(dropout)
    entry, head = found.first
    return replace(found, first=(entry, head + share[0]))
