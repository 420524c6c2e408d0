"""The geometry of a call: who holds which rows and keys, and which keys each rank's rows see.

Masks speak of the whole sequence, so every rank works this out for all ranks by itself.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.place import Place
from headwise.distributed.descriptions import described, versions
from headwise.distributed.layouts import Balanced, Layout
from headwise.distributed.ranges import Range, Ranges, at_most, common, of_flags, positions, union

RUNS = 16  # of keys that a rank asks for: small gaps between more are closed

_known: WeakKeyDictionary[Mask, dict[object, Any]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Geometry:
    """The rows and keys of every rank, in ranges of the whole sequence, and the keys it needs."""

    mask: Mask | None
    whole: Place  # all queries and all keys
    rows: tuple[Ranges, ...]
    keys: tuple[Ranges, ...]
    needs: tuple[Ranges, ...]
    _covered: dict[tuple[int, Range], bool] = field(default_factory=dict)

    def moves(self, to: int, owner: int) -> Ranges:
        """The ranges of keys that a rank needs of another's."""
        return common(self.needs[to], self.keys[owner])

    def everything(self) -> Geometry:
        """The same, with every rank in need of every key."""
        needs = (union(((0, self.whole.keys),)),) * len(self.rows)
        return dataclasses.replace(self, needs=needs)

    def covered(self, rank: int, keys: Range) -> bool:
        """True if every row of a rank sees all of these keys."""
        if self.mask is None:
            return True
        if self.mask.pieces == 0:
            return False
        known = self._covered.get((rank, keys))
        if known is None:
            rows = positions(self.rows[rank])
            seen = [
                (_rows(first, rows) <= keys[0]) & (_rows(last, rows) >= keys[1])
                for first, last in self.mask.intervals(self.whole)
            ]
            inside = seen[0] if len(seen) == 1 else torch.logical_or(*seen)
            known = self._covered[rank, keys] = bool(inside.all())
        return known


def geometry(
    mask: Mask | None, batch: int, heads: int, rows: tuple[int, ...], keys: tuple[int, ...],
    layout: Layout,
) -> Geometry:  # fmt: skip
    """The geometry of a call whose ranks hold this many rows and keys; ValueError if unfit."""
    queries, total = sum(rows), sum(keys)
    if isinstance(layout, Balanced) and queries != total:
        raise ValueError(
            f"balanced(mask) lays out one sequence for self-attention, and this call has {queries} "
            f"queries and {total} keys; use contiguous() or head_tail()"
        )
    place = Place(batch, heads, queries, total, offset=total - queries)
    if mask is not None:
        mask.check(place)
    key = (versions(mask), batch, heads, rows, keys, described(layout))
    known: dict[object, Any] = {} if mask is None else _known.setdefault(mask, {})
    if key not in known:
        held = layout.of_lengths(rows), layout.of_lengths(keys)
        if len(known) > 64:
            known.clear()
        # Without the mask: a value that held it would keep it, and itself, forever.
        known[key] = (*held, _needed(mask, place, held[0]), {})
    return Geometry(mask, place, *known[key])


def _needed(mask: Mask | None, place: Place, held: tuple[Ranges, ...]) -> tuple[Ranges, ...]:
    """The keys that some row of each rank may see."""
    if mask is None:
        everything = union(((0, place.keys),))
        return tuple(everything if union(ranges) else () for ranges in held)
    rows = [positions(ranges) for ranges in held]
    if mask.pieces == 0:
        seen = mask.to_dense(place).expand(-1, -1, place.queries, place.keys)
        shown = (seen.index_select(2, own).flatten(0, 2).any(0) for own in rows)
        return tuple(at_most(of_flags(flags), RUNS) for flags in shown)
    found: list[list[Range]] = [[] for _ in held]
    for first, last in mask.intervals(place):
        for own, ranges in zip(rows, found, strict=True):
            bounds = torch.broadcast_tensors(_rows(first, own), _rows(last, own), own)
            ranges += _stretches(bounds[0].flatten(), bounds[1].flatten(), place.keys)
    return tuple(at_most(ranges, RUNS) for ranges in found)


def _rows(bound: Tensor, rows: Tensor) -> Tensor:
    """A (B|1, Hq|1, N|1) bound at these rows."""
    return bound if bound.shape[-1] == 1 else bound.index_select(-1, rows)


def _stretches(first: Tensor, last: Tensor, keys: int) -> Ranges:
    """The union of many intervals, (n,) each, within the keys."""
    first, last = first.clamp(0, keys), last.clamp(0, keys)
    some = first < last
    first, order = first[some].sort()
    last = last[some][order]
    if bool((last.diff() < 0).any()):  # a running maximum takes long
        last = last.cummax(0).values
    new = torch.ones_like(first, dtype=torch.bool)
    new[1:] = first[1:] > last[:-1]
    ends = torch.ones_like(new)
    ends[:-1] = new[1:]
    return tuple(zip(first[new].tolist(), last[ends].tolist(), strict=True))
