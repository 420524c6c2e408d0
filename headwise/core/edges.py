"""Edges to knock out: chosen keys, hidden from chosen heads, as a mask."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core.arguments import is_integer
from headwise.core.intervals import Either, Mask
from headwise.core.patterns import Between, Dense
from headwise.core.place import Place


class Edge(NamedTuple):
    """Keys that a head of a layer must not see; for all of its queries, or for some of them.

    `layer` is its number or name, as `hw.watch` gives them (* matches any part of a name); a head
    of None means every head. `keys` and `queries` are positions: a number, or (first, last) with
    `last` not included.
    """

    layer: int | str
    head: int | None
    keys: int | tuple[int, int]
    queries: int | tuple[int, int] | None = None


Edges = Iterable[tuple[Any, ...]] | tuple[Any, ...]
"""Several edges, each as a plain tuple, or one of them."""


def check_edges(edges: object) -> tuple[Edge, ...]:
    """The edges of a list of tuples, or of one; ValueError for anything else."""
    given = [edges] if isinstance(edges, tuple) and not _nested(edges) else edges
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise ValueError(f"edges are a list of (layer, head, keys), not {edges!r}")
    found = tuple(_checked(edge) for edge in given)
    if not found:
        raise ValueError("there is no edge to knock out: give a list of (layer, head, keys)")
    return found


def _nested(edges: tuple[object, ...]) -> bool:
    """True for a tuple of edges, False for one edge."""
    return bool(edges) and isinstance(edges[0], tuple)


def _checked(edge: object) -> Edge:
    if not isinstance(edge, tuple) or not 3 <= len(edge) <= 4:
        raise ValueError(f"{edge!r} is not an edge: (layer, head, keys) or (…, keys, queries)")
    layer, head, keys, *queries = edge
    if not isinstance(layer, str) and not is_integer(layer):
        raise ValueError(f"the layer of {edge!r} must be a number or a name")
    if head is not None and not (is_integer(head) and head >= 0):
        raise ValueError(f"the head of {edge!r} must be a number, or None for every head")
    kept = queries[0] if queries else None
    return Edge(layer, head, _range(edge, keys), None if kept is None else _range(edge, kept))


def _range(edge: object, given: object) -> tuple[int, int]:
    """Positions as (first, last)."""
    bounds: Any = (given, given + 1) if is_integer(given) else given
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(is_integer, bounds))
    if not pair or not 0 <= bounds[0] < bounds[1]:
        raise ValueError(
            f"{given!r} in {edge!r} are not positions; use a number or (first, last), "
            "0 <= first < last"
        )
    return int(bounds[0]), int(bounds[1])


class Hole(NamedTuple):
    """The part of a call that an edge hides: heads, rows and keys of the call."""

    heads: slice
    rows: slice
    keys: tuple[int, int]


def hole_of(
    edge: Edge, place: Place, start: int, forgotten: int, share: tuple[int, int] | None = None
) -> Hole | None:
    """The hole of an edge in a call whose first query and key have these positions, if any.

    `share` is the number of the call's first head and that of all heads, if it has some of them.
    """
    assert isinstance(edge.keys, tuple)
    first_head, count = share or (0, place.heads)
    heads = slice(0, place.heads)
    if edge.head is not None:
        if edge.head >= count:
            raise ValueError(
                f"layer {edge.layer!r} has no head {edge.head}; its heads are 0 to {count - 1}"
            )
        own = edge.head - first_head
        if not 0 <= own < place.heads:
            return None
        heads = slice(own, own + 1)
    first, last = (min(max(0, key - forgotten), place.keys) for key in edge.keys)
    rows = slice(0, place.queries)
    if isinstance(edge.queries, tuple):
        rows = slice(*(min(max(0, row - start), place.queries) for row in edge.queries))
    return Hole(heads, rows, (first, last)) if first < last and rows.start < rows.stop else None


def without(mask: Mask | None, holes: Sequence[Hole], place: Place) -> Mask:
    """The mask with holes: intervals where a row has one hole and the mask one interval."""
    rest = _around(holes, place)
    if mask is None:
        return rest
    # Both masks, and not their product: the first one says where the queries stand.
    return mask & (Dense(rest.to_dense(place)) if mask.pieces * rest.pieces > 2 else rest)


def _around(holes: Sequence[Hole], place: Place) -> Mask:
    """The mask that shows every key outside the holes."""
    shape = place.heads, place.queries
    low, high = (torch.full(shape, place.keys) for _ in range(2))  # equal: the row has no hole
    for heads, rows, (first, last) in holes:
        a, b = low[heads, rows], high[heads, rows]
        none = a == b
        if bool((~none & ((last < a) | (first > b))).any()):  # a second hole, apart from the first
            return _dense(holes, place)
        low[heads, rows] = torch.where(none, first, a.clamp_max(first))
        high[heads, rows] = torch.where(none, last, b.clamp_min(last))
    none = low == high
    before = torch.where(none, place.keys, low)
    if bool((none | (low == 0)).all()):
        return _between(torch.where(none, 0, high), torch.full_like(high, place.keys), place)
    left = _between(torch.zeros_like(low), before, place)
    if bool((high == place.keys).all()):
        return left
    return Either(left, _between(high, torch.full_like(high, place.keys), place))


def _between(first: Tensor, last: Tensor, place: Place) -> Mask:
    """The interval of each head and row, (H, N) each; one per head if its rows are alike."""
    bounds = (x[:, :1] if bool((x == x[:, :1]).all()) else x for x in (first, last))
    return Between(*(x.to(place.device, torch.int32)[None] for x in bounds))


def _dense(holes: Sequence[Hole], place: Place) -> Mask:
    seen = torch.ones(place.heads, place.queries, place.keys, dtype=torch.bool)
    for heads, rows, (first, last) in holes:
        seen[heads, rows, first:last] = False
    return Dense(seen[None].to(place.device))
