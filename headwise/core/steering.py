"""Weights times factors: a factor of 0 is a hole in the mask, any other a bias on the keys.

exp(s + log f) = f · exp(s), so a factor before the normalisation is its logarithm added to the
logit, after the cap. A bias for all rows holds one number per head and key; rows with other factors
are other segments of the call. So no tensor has an entry per query and key.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.edges import Edge, Steer
from headwise.core.intervals import Either, Mask
from headwise.core.patterns import Between
from headwise.core.place import Place
from headwise.core.spans import Span


class Hole(NamedTuple):
    """The part of a call that an edge means: heads, rows and keys of the call.

    `skipped` of the edge's keys lie before the call's first one. The bounds of a span may be
    tensors, one number per batch entry.
    """

    heads: slice
    rows: slice
    keys: Span
    skipped: int = 0

    @property
    def fixed(self) -> bool:
        """True if every batch entry has the same keys, known without reading a tensor."""
        return not any(isinstance(bound, Tensor) for bound in self.keys)


class Segment(NamedTuple):
    """Rows of a call, and what is added to their logits, (B|1, Hq, 1, M); None for nothing."""

    rows: slice
    logs: Tensor | None


def hole_of(
    edge: Edge,
    span: Span,
    place: Place,
    start: int,
    forgotten: int,
    share: tuple[int, int] | None = None,
) -> Hole | None:
    """The hole of an edge in a call whose first query and key have these positions, if any.

    `span` are the edge's keys. `share` is the number of the call's first head and that of all
    heads, if it has some of them.
    """
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
    rows = slice(0, place.queries)
    if isinstance(edge.queries, tuple):
        rows = slice(*(min(max(0, row - start), place.queries) for row in edge.queries))
    if rows.start >= rows.stop:
        return None
    begin, end = span
    if isinstance(begin, Tensor) or isinstance(end, Tensor):
        bounds = (torch.as_tensor(x, device=place.device) - forgotten for x in span)
        return Hole(heads, rows, (next(bounds), next(bounds)))
    first, last = (min(max(0, key - forgotten), place.keys) for key in (begin, end))
    return Hole(heads, rows, (first, last), max(0, forgotten - begin)) if first < last else None


def without(mask: Mask | None, holes: Sequence[Hole], place: Place) -> Mask | None:
    """The mask with holes, as one or two intervals per row; None if those are not enough."""
    rest = _around(holes, place)
    if mask is None or rest is None:
        return rest
    if not 0 < mask.pieces * rest.pieces <= 2:
        return None  # a dense mask would be one for each head
    # Both masks, and not their product: the first one says where the queries stand.
    return mask & rest


def segments(
    found: Sequence[tuple[Steer, Hole]], place: Place, dtype: torch.dtype
) -> list[Segment]:
    """Runs of rows that have the same factors, in order, and what is added to their logits."""
    ends = {0, place.queries, *(x for _, hole in found for x in (hole.rows.start, hole.rows.stop))}
    bounds = sorted(ends)
    runs: list[Segment] = []
    for first, last in pairwise(bounds):
        here = [x for x in found if x[1].rows.start <= first and last <= x[1].rows.stop]
        runs.append(Segment(slice(first, last), _logs(here, place, dtype)))
    return runs


def _logs(found: Sequence[tuple[Steer, Hole]], place: Place, dtype: torch.dtype) -> Tensor | None:
    """The logarithms of factors, added up over edges, (B|1, Hq, 1, M)."""
    if not found:
        return None
    total = torch.zeros(1, place.heads, 1, place.keys, dtype=dtype, device=place.device)
    hidden = torch.zeros(1, place.heads, 1, place.keys, dtype=torch.bool, device=place.device)
    columns = torch.arange(place.keys, device=place.device)
    for steer, hole in found:
        first, last = (x.reshape(-1, 1, 1, 1) if isinstance(x, Tensor) else x for x in hole.keys)
        heads = torch.zeros(1, place.heads, 1, 1, dtype=torch.bool, device=place.device)
        heads[:, hole.heads] = True
        meant = heads & (columns >= first) & (columns < last)  # (B|1, Hq, 1, M)
        factors = _factors(steer, hole, place, dtype)
        # Where the logarithm is -inf or not meant, it gets no gradient: that would be NaN.
        zero = meant & (factors == 0)
        hidden = hidden | zero
        total = total + torch.where(meant & ~zero, torch.where(zero, 1, factors).log(), 0)
    return total.masked_fill(hidden, -torch.inf)


def _factors(steer: Steer, hole: Hole, place: Place, dtype: torch.dtype) -> Tensor:
    """The factors of an edge for all keys of the call, (1, Hq, 1, M); 1 where it is not meant."""
    factor = steer.factor
    if not isinstance(factor, Tensor):
        return torch.full((), factor, dtype=dtype, device=place.device)
    factor = factor.to(device=place.device, dtype=dtype)
    factor = factor.reshape((1,) * (2 - factor.ndim) + factor.shape)  # (heads|1, keys|1)
    heads = hole.heads.stop - hole.heads.start
    if factor.shape[0] not in (1, heads):
        raise ValueError(_misfit(steer, heads))
    rest = (hole.heads.start, place.heads - hole.heads.stop)
    if factor.shape[0] > 1:
        factor = torch.nn.functional.pad(factor, (0, 0, *rest), value=1.0)
    width = factor.shape[1]
    if width == 1:
        return factor[None, :, None]
    keys = steer.edge.keys
    first, last = hole.keys
    whole = isinstance(keys, tuple) and width == keys[1] - keys[0]
    if isinstance(first, Tensor) or isinstance(last, Tensor):
        raise ValueError(_misfit(steer, heads))
    if not whole and not (isinstance(keys, str) and hole.skipped + last - first <= width):
        raise ValueError(_misfit(steer, heads))
    factor = factor[:, hole.skipped : hole.skipped + last - first]
    padded = torch.nn.functional.pad(factor, (first, place.keys - last), value=1.0)
    return padded[None, :, None]


def _misfit(steer: Steer, heads: int) -> str:
    shape = tuple(steer.factor.shape) if isinstance(steer.factor, Tensor) else ()
    return (
        f"the factors {shape} of {steer} do not broadcast to its heads and keys: give one factor, "
        f"one per key, or ({heads}, 1) or ({heads}, keys)"
    )


def _around(holes: Sequence[Hole], place: Place) -> Mask | None:
    """The mask that shows every key outside the holes; None if that is not two intervals a row."""
    shape = place.heads, place.queries
    low, high = (torch.full(shape, place.keys) for _ in range(2))  # equal: the row has no hole
    for heads, rows, keys, _ in holes:
        first, last = (int(bound) for bound in keys)
        a, b = low[heads, rows], high[heads, rows]
        none = a == b
        if bool((~none & ((last < a) | (first > b))).any()):  # a second hole, apart from the first
            return None
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
