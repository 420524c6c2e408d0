"""Pairs of queries and keys: those a mask shows, and those in the tiles that a kernel visits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.intervals import Both, Mask, rows_per_key
from headwise.core.patterns import Causal, Window
from headwise.core.place import Place

Tile = tuple[int, int]  # queries and keys that a kernel computes together


@dataclass(frozen=True)
class Pairs:
    """Counts over the batch and the query heads."""

    visible: int
    executed: int
    dense: int
    touched: int  # keys that some row sees, over the batch


def count_pairs(mask: Mask | None, place: Place, tile: Tile) -> Pairs:
    """Count the pairs of a call: O(queries) for masks of intervals, O(pairs) for dense ones.

    >>> import headwise as hw
    >>> place = Place(batch=1, heads=1, queries=1000, keys=1000)
    >>> count_pairs(hw.mask.causal(), place, (100, 100))
    Pairs(visible=500500, executed=550000, dense=1000000, touched=1000)
    """
    calls = place.batch * place.heads
    dense = calls * place.queries * place.keys
    if mask is None or not dense:
        return Pairs(dense, dense, dense, place.batch * place.keys)
    mask.check(place)
    if mask.pieces == 0:
        seen = mask.to_dense(place)
        seen = seen.expand(*seen.shape[:2], place.queries, place.keys)
        copies = calls // (seen.shape[0] * seen.shape[1])
        visible, executed = int(seen.sum()), _dense_tiles(seen, tile)
        touched = int(seen.any(-2).any(1).sum()) * (place.batch // seen.shape[0])
        return Pairs(copies * visible, copies * executed, dense, touched)
    bounds = _bounds(mask, place)
    copies = calls // (bounds.shape[2] * bounds.shape[3])
    visible = int((bounds[:, 1] - bounds[:, 0]).clamp_min(0).sum())
    seen = (rows_per_key(bounds, place.keys) > 0).any(1)
    touched = int(seen.sum()) * (place.batch // seen.shape[0])
    return Pairs(copies * visible, copies * _tiles(bounds, place.keys, tile), dense, touched)


def closed_form(mask: Mask | None, queries: int, keys: int) -> str | None:
    """The textbook formula of a mask's pairs per head, if it has one.

    >>> import headwise as hw
    >>> closed_form(hw.mask.causal(), 5, 5)
    's(s+1)/2'
    """
    square = queries == keys
    if mask is None:
        return "s²" if square else "st"
    at_the_end = (None, keys - queries)
    if isinstance(mask, Causal) and mask.offset in at_the_end:
        if queries > keys:
            return "t(t+1)/2"
        return "s(s+1)/2" if square else "s(t−s) + s(s+1)/2"
    width = window_width(mask, at_the_end)
    if width is None or queries > keys:
        return None
    if width >= keys:
        return closed_form(Causal(), queries, keys)
    if square:
        return "sw − w(w−1)/2"
    return "sw" if keys - queries + 1 >= width else None


def window_width(mask: Mask | None, offsets: tuple[int | None, ...] = (None,)) -> int | None:
    """The keys that a row of `causal() & window(w - 1)` sees, w; None for any other mask.

    `offsets` are those at which queries and keys end together.
    """
    if not isinstance(mask, Both):
        return None
    for one, other in ((mask.a, mask.b), (mask.b, mask.a)):
        plain = isinstance(one, Causal) and one.offset in offsets
        if plain and isinstance(other, Window) and other.offset in offsets and other.right >= 0:
            return other.left + 1 if other.left >= 0 else None
    return None


def _bounds(mask: Mask, place: Place) -> Tensor:
    """First and last key of each row among the call's keys, (P, 2, B|1, Hq|1, N)."""
    bounds = [bound for piece in mask.intervals(place) for bound in piece]
    shape = torch.broadcast_shapes(*(bound.shape for bound in bounds), (1, 1, place.queries))
    stacked = torch.stack([(bound - place.first_key).expand(shape) for bound in bounds])
    bounds_by_piece: Tensor = stacked.clamp(0, place.keys).unflatten(0, (-1, 2))
    return bounds_by_piece


def _tiles(bounds: Tensor, keys: int, tile: Tile) -> int:
    """Pairs in tiles that contain a visible pair, over every batch entry and head of `bounds`."""
    rows, columns = tile
    queries = bounds.shape[-1]
    pieces = []
    empty = bounds[:, 0] >= bounds[:, 1]
    first = bounds[:, 0].masked_fill(empty, keys)
    last = bounds[:, 1].masked_fill(empty, 0)
    pad = -queries % rows
    first = torch.nn.functional.pad(first, (0, pad), value=keys).unflatten(-1, (-1, rows)).amin(-1)
    last = torch.nn.functional.pad(last, (0, pad), value=0).unflatten(-1, (-1, rows)).amax(-1)
    first = (first // columns) * columns  # from the tile in which the first visible key is
    last = (-(-last // columns) * columns).clamp_max(keys)
    for low, high in zip(first, last, strict=True):
        pieces.append((low, torch.maximum(low, high)))
    lengths = sum(high - low for low, high in pieces)
    if len(pieces) == 2:  # tiles that both pieces reach are computed once
        (a0, a1), (b0, b1) = pieces
        lengths = lengths - (torch.minimum(a1, b1) - torch.maximum(a0, b0)).clamp_min(0)
    assert isinstance(lengths, Tensor)
    height = torch.full((lengths.shape[-1],), rows)
    if pad:
        height[-1] = rows - pad
    return int((lengths.long() * height).sum())


def _dense_tiles(seen: Tensor, tile: Tile) -> int:
    """Pairs in tiles of booleans (B, H, N, M) with at least one True."""
    queries, keys = seen.shape[-2:]
    total = 0
    for row in range(0, queries, tile[0]):
        block = seen[..., row : row + tile[0], :].any(-2)
        for key in range(0, keys, tile[1]):
            part = block[..., key : key + tile[1]]
            used = int(part.any(-1).sum())
            total += used * min(tile[0], queries - row) * part.shape[-1]
    return total
