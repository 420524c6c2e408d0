"""Edges of a model's attention that an experiment changes: keys, for chosen heads and queries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from headwise.core.arguments import is_integer
from headwise.core.intervals import FURTHEST


class Edge(NamedTuple):
    """Keys of a head of a layer, for all of its queries or for some of them.

    `layer` is its number or name, as `hw.watch` gives them (* matches any part of a name); a head
    of None means every head. `keys` and `queries` are positions: a number, (first, last) with
    `last` not included, a range or a slice; keys may also be the name of a span of the watch.
    """

    layer: int | str
    head: int | None
    keys: int | tuple[int, int] | range | slice | str
    queries: int | tuple[int, int] | range | slice | None = None


Edges = Iterable[tuple[Any, ...]] | tuple[Any, ...]
"""Several edges, each as a plain tuple, or one of them."""


@dataclass(frozen=True, eq=False)
class Steer:
    """An edge whose weights are multiplied by a factor before they are normalised.

    A tensor of factors broadcasts to (heads, keys) of the edge and may have a gradient.
    """

    edge: Edge
    factor: float | Tensor

    @property
    def hides(self) -> bool:
        """True if the keys are hidden, as if they were not there."""
        return not isinstance(self.factor, Tensor) and self.factor == 0

    @property
    def changes(self) -> bool:
        """False for a factor of 1."""
        return isinstance(self.factor, Tensor) or self.factor != 1

    def __str__(self) -> str:
        return str(tuple(self.edge))


def check_edges(edges: object) -> tuple[Steer, ...]:
    """The edges of a list of tuples, or of one, with the factor 0; ValueError for anything else."""
    found = _several(edges, "(layer, head, keys)", "knock out")
    return tuple(Steer(_edge(each, each, "(layer, head, keys)"), 0.0) for each in found)


def check_steers(steers: object) -> tuple[Steer, ...]:
    """The same for tuples with a factor: (layer, head, keys, factor), or (…, factor, queries)."""
    form = "(layer, head, keys, factor)"
    return tuple(_steer(each, form) for each in _several(steers, form, "steer"))


def _several(given: object, form: str, verb: str) -> tuple[object, ...]:
    many = [given] if isinstance(given, tuple) and not _nested(given) else given
    if not isinstance(many, Iterable) or isinstance(many, str):
        raise ValueError(f"edges are a list of {form}, not {given!r}")
    found = tuple(many)
    if not found:
        raise ValueError(f"there is no edge to {verb}: give a list of {form}")
    return found


def _nested(edges: tuple[object, ...]) -> bool:
    """True for a tuple of edges, False for one edge."""
    return bool(edges) and isinstance(edges[0], tuple)


def _steer(given: object, form: str) -> Steer:
    if not isinstance(given, tuple) or not 4 <= len(given) <= 5:
        raise ValueError(f"{given!r} is not {form} or (…, factor, queries)")
    layer, head, keys, factor, *queries = given
    edge = _edge(given, (layer, head, keys, *queries), form)
    return Steer(edge, _factor(given, factor))


def _factor(steer: object, factor: object) -> float | Tensor:
    """A factor as a finite number from 0 on, or as a tensor of such numbers."""
    if isinstance(factor, Tensor) and factor.is_floating_point() and factor.ndim <= 2:
        if bool((factor < 0).any()) or not bool(factor.isfinite().all()):
            raise ValueError(f"the factors of {steer!r} must be finite and not negative")
        if factor.requires_grad and bool((factor == 0).any()):
            raise ValueError(
                f"a factor of {steer!r} is 0, and log 0 has no gradient; begin with a small factor"
            )
        return factor
    number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not number or not 0 <= float(factor) < math.inf:  # type: ignore[arg-type]
        raise ValueError(
            f"the factor {factor!r} of {steer!r} must be a number from 0 on, or a floating-point "
            "tensor that broadcasts to (heads, keys)"
        )
    return float(factor)  # type: ignore[arg-type]


def _edge(given: object, edge: object, form: str) -> Edge:
    if not isinstance(edge, tuple) or not 3 <= len(edge) <= 4:
        raise ValueError(f"{given!r} is not an edge: {form} or (…, keys, queries)")
    layer, head, keys, *queries = edge
    if not isinstance(layer, str) and not is_integer(layer):
        raise ValueError(f"the layer of {given!r} must be a number or a name")
    if head is not None and not (is_integer(head) and head >= 0):
        raise ValueError(f"the head of {given!r} must be a number, or None for every head")
    kept = queries[0] if queries else None
    shown = keys if isinstance(keys, str) else _range(given, keys)
    return Edge(layer, head, shown, None if kept is None else _range(given, kept))


def _range(edge: object, given: object) -> tuple[int, int]:
    """Positions as (first, last)."""
    bounds: Any = (given, given + 1) if is_integer(given) else given
    if isinstance(given, range | slice) and given.step in (None, 1):
        bounds = (given.start or 0, FURTHEST if given.stop is None else given.stop)
    pair = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(map(is_integer, bounds))
    if not pair or not 0 <= bounds[0] < bounds[1]:
        raise ValueError(
            f"{given!r} in {edge!r} are not positions; use a number or (first, last), "
            "0 <= first < last, a range or a slice"
        )
    return int(bounds[0]), int(bounds[1])
