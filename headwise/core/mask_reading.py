"""Mask tensors that others made, read back as one interval of keys per row where they are that."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.patterns import Between, Causal, Dense, Window
from headwise.core.place import Place, as_four_axes

HIDDEN = -1e4
"""A number this low that is added to a logit hides the key: it is not a position bias."""
ROWS = 1024  # read at a time, so that reading takes little memory


@dataclass(frozen=True, eq=False, repr=False)
class PlacedIntervals(Between):
    """Intervals that also know beside which key the queries stand, and where a sequence begins.

    `begins` numbers the call's keys, (B|1, 1, N|1); below 0 for a cache that forgot the beginning.
    """

    stands: int | None = None
    begins: Tensor | None = None

    def alignment(self, place: Place) -> int | None:
        return self.stands

    def start(self, place: Place) -> Tensor:
        return super().start(place) if self.begins is None else self.begins.to(place.device)


def read_mask(
    seen: Tensor, stands: bool | int = True, begins: Tensor | None = None, packed: bool = False
) -> Mask:
    """Read (B|1, Hq|1, N, M) bool, True = may attend, as intervals; dense where rows have gaps.

    `stands` is the key beside which the first query stands, or True if queries and keys are of one
    sequence: if each query sees one key further than the last, it is its own. `begins` is that of
    `PlacedIntervals`. If sequences may be `packed`, a row that sees no key before its own begins
    one; in attention over chunks such a row begins a chunk.

    >>> read_mask(torch.ones(4, 4, dtype=torch.bool).tril())
    causal(offset=0)
    >>> read_mask(torch.eye(4, dtype=torch.bool).logical_not())
    dense(tensor (1, 1, 4, 4))
    """
    seen = as_four_axes(seen)
    bounds = row_bounds(seen)
    return Dense(seen) if bounds is None else interval_mask(*bounds, stands, begins, packed)


def interval_mask(
    first: Tensor,
    last: Tensor,
    stands: bool | int,
    begins: Tensor | None,
    packed: bool = False,
) -> Mask:
    """The mask of these bounds (B|1, Hq|1, N), by its shortest name."""
    if isinstance(stands, bool):
        offset = _offset(first, last) if stands else None
    else:
        offset = stands
    if offset is not None and (begins is None or not bool(begins.any())):
        own = torch.arange(first.shape[-1], device=first.device) + offset
        if bool((last == own + 1).all()):
            if not bool(first.any()):
                return Causal(offset)
            width = int((own - first).max())
            if bool((first == (own - width).clamp_min(0)).all()):
                return Causal(offset) & Window(width, 0, offset)
        if packed and first.shape[1] == 1:
            begins = _begins(first, last, own, begins)
    return PlacedIntervals(first, last, offset, begins)


def _begins(first: Tensor, last: Tensor, own: Tensor, begins: Tensor | None) -> Tensor | None:
    """The keys at which packed sequences begin, (B|1, 1, N): rows that see no key before their own.

    `begins`, where the batch entries begin, if all rows of each are of one sequence.

    >>> first, last = torch.tensor([[[[0, 0, 2, 2]]], [[[1, 2, 3, 4]]]])
    >>> _begins(first, last, torch.arange(4), None)
    tensor([[[0, 0, 2, 2]]], dtype=torch.int32)
    """
    there = last > first
    earliest = first.masked_fill(~there, torch.iinfo(torch.int32).max).amin(-1, keepdim=True)
    earliest = earliest.masked_fill(~there.any(-1, keepdim=True), 0)
    alone = there & (first == own) & (own > earliest)
    if not bool(alone.any()):
        return begins
    return torch.where(alone, own, earliest if begins is None else begins).cummax(-1).values.int()


def row_bounds(seen: Tensor) -> tuple[Tensor, Tensor] | None:
    """The first key of each row and the one past its last, (B|1, Hq|1, N); None if rows have gaps.

    >>> row_bounds(torch.tensor([[True, True, False], [False, True, True]]))
    (tensor([0, 1], dtype=torch.int32), tensor([2, 3], dtype=torch.int32))
    """
    firsts, lasts = [], []
    for rows in seen.split(ROWS, -2):
        bits = rows.view(torch.uint8)  # booleans have no argmax
        count = bits.sum(-1, dtype=torch.int32)
        first = bits.argmax(-1).int() * (count > 0)
        past = (seen.shape[-1] - bits.flip(-1).argmax(-1).int()) * (count > 0)
        if not torch.equal(past - first, count):
            return None
        firsts.append(first)
        lasts.append(past)
    return torch.cat(firsts, -1), torch.cat(lasts, -1)


def split_mask(added: Tensor, hidden: float = HIDDEN) -> tuple[Tensor | None, Tensor | None]:
    """Split what is added to logits into (keys that are seen, the rest); None if all, if nothing.

    A key is hidden by -inf, by the dtype's lowest number and by what people write instead, -1e4
    and below: the exponential is 0 there.

    >>> split_mask(torch.tensor([[0.0, -1e9], [0.0, 0.0]]))
    (tensor([[ True, False],
            [ True,  True]]), None)
    """
    return without_hidden(added, ~(added <= hidden))  # NaN hides nothing


def without_hidden(added: Tensor, seen: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The same as `split_mask` where it is known which keys are seen."""
    everything = bool(seen.all())
    kept = added if everything else added.masked_fill(~seen, 0)
    return None if everything else seen, kept if bool(kept.any()) else None


@dataclass(frozen=True, eq=False, repr=False)
class TracedDense(Dense):
    """A dense mask whose sequences begin with the first key that some row sees.

    `shown` are the keys that some row sees, (B|1, Hq|1, M), and `begins` is the first of them,
    (B|1, Hq|1, 1): they are read once for all layers that share the mask. `stands` is the key
    beside which the first query stands, (B|1,); None if that is not known.
    """

    shown: Tensor
    begins: Tensor
    stands: Tensor | None  # no default: torch 2.11 would pass it twice

    @classmethod
    def of(cls, seen: Tensor, shown: Tensor, stands: Tensor | None = None) -> TracedDense:
        """The mask of (B|1, Hq|1, N|1, M) bool, with the keys that some row sees."""
        return cls(seen, shown, shown.int().argmax(-1, keepdim=True).int(), stands)

    def alignment(self, place: Place) -> Tensor | None:
        return self.stands

    def start(self, place: Place) -> Tensor:
        return self.begins


def traced_mask(given: Tensor, queries: int) -> tuple[Mask, Tensor | None]:
    """A mask tensor, bool or added to logits, as mask and bias, without looking into it.

    Compiled code can't ask a tensor for its content: the mask stays dense. Queries that are fewer
    than the keys stand where `read_mask` finds them, in a cache with room to spare for instance.
    """
    bias = None
    seen = as_four_axes(given)
    if seen.dtype != torch.bool:
        seen = ~(seen <= HIDDEN)
        bias = as_four_axes(given).masked_fill(~seen, 0)
    fewer = seen.shape[-2] == queries != seen.shape[-1]
    return TracedDense.of(seen, seen.any(-2), _stands(seen) if fewer else None), bias


def _stands(seen: Tensor) -> Tensor:
    """The key beside which the first query of (B|1, Hq|1, N, M) bool stands, (B|1,).

    Its last key if each query sees one key further than the one before; else the queries are last.

    >>> _stands(torch.tensor([[[[True, True, False, False], [True, True, True, False]]]]))
    tensor([1])
    """
    queries, keys = seen.shape[-2:]
    last = keys - 1 - seen.any(1).flip(-1).int().argmax(-1)  # (B|1, N)
    beyond = last - torch.arange(queries, device=seen.device)
    steady = (beyond == beyond[:, :1]).all(-1)
    return torch.where(steady, beyond[:, 0], keys - queries)


def _offset(first: Tensor, last: Tensor) -> int | None:
    """The distance from each query's number to its last key's; None if rows differ."""
    beyond = last - 1 - torch.arange(last.shape[-1], device=last.device, dtype=torch.int32)
    full = last > first
    if not bool(full.any()):
        return None
    lowest = int(beyond.masked_fill(~full, torch.iinfo(torch.int32).max).min())
    highest = int(beyond.masked_fill(~full, torch.iinfo(torch.int32).min).max())
    return lowest if lowest == highest else None
