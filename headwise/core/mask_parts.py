"""A mask for some of a call's batch entries, heads, rows or keys, where it was made for all."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import overload

from torch import Tensor

from headwise.core.intervals import FURTHEST, Both, Interval, Mask
from headwise.core.patterns import Stretch
from headwise.core.place import Place


class WithinMask(Mask):
    """Some of what a mask shows of a larger call."""

    mask: Mask

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", self.mask.pieces)

    def check(self, place: Place) -> None:
        self.mask.check(self._whole(place))

    @property
    def rows_alike(self) -> bool:
        return self.mask.rows_alike

    def _whole(self, place: Place) -> Place:
        """The place of the larger call."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False, repr=False)
class PartOfMask(WithinMask):
    """The rows of a mask that belong to some batch entries and some heads of a larger call."""

    mask: Mask
    batch: range  # of `entries`
    heads: range  # of `all_heads`
    entries: int
    all_heads: int
    pieces: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"{self.mask!r} of entries {_short(self.batch)} and heads {_short(self.heads)}"

    def check(self, place: Place) -> None:
        if (place.batch, place.heads) != (len(self.batch), len(self.heads)):
            raise ValueError(
                f"the mask is of {len(self.batch)} batch entries and {len(self.heads)} heads, and "
                f"the call has {place.batch} and {place.heads}"
            )
        super().check(place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        found = self.mask.intervals(self._whole(place))
        return tuple((self._part(first), self._part(last)) for first, last in found)

    def shows_all(self, place: Place) -> bool:
        return self.mask.shows_all(self._whole(place))

    def alignment(self, place: Place) -> int | Tensor | None:
        return self._part(self.mask.alignment(self._whole(place)))

    def band(self, place: Place) -> tuple[int, int] | None:
        return self.mask.band(self._whole(place))

    def start(self, place: Place) -> int | Tensor:
        return self._part(self.mask.start(self._whole(place)))

    def to_dense(self, place: Place) -> Tensor:
        return self._part(self.mask.to_dense(self._whole(place)))

    def _whole(self, place: Place) -> Place:
        return replace(place, batch=self.entries, heads=self.all_heads)

    @overload
    def _part(self, bound: Tensor) -> Tensor: ...
    @overload
    def _part(self, bound: int | Tensor) -> int | Tensor: ...
    @overload
    def _part(self, bound: int | Tensor | None) -> int | Tensor | None: ...
    def _part(self, bound: int | Tensor | None) -> int | Tensor | None:
        """The part of (B|1, Hq|1, ...), or of (B,), that belongs to these entries and heads."""
        if not isinstance(bound, Tensor):
            return bound
        for axis, part in enumerate((self.batch, self.heads)):
            if axis < bound.ndim and bound.shape[axis] > 1:
                bound = bound.narrow(axis, part.start, len(part))
        return bound


@dataclass(frozen=True, eq=False, repr=False)
class RowsOfMask(WithinMask):
    """Some rows of a mask that was made for all queries of a call, which says where they stand."""

    mask: Mask
    first: int
    queries: int  # of the whole call
    offset: int  # the key beside which its first query stands, if the mask does not state that
    pieces: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"{self.mask!r} from row {self.first}"

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        return self.mask.intervals(self._whole(place))

    def alignment(self, place: Place) -> int | Tensor | None:
        stated = self.mask.alignment(self._whole(place))
        return self.first + (self.offset if stated is None else stated)

    def band(self, place: Place) -> tuple[int, int] | None:
        band = self.mask.band(self._whole(place))
        return None if band is None else (band[0] + self.first, band[1] + self.first)

    def start(self, place: Place) -> int | Tensor:
        start = self.mask.start(self._whole(place))
        if isinstance(start, Tensor) and start.ndim and start.shape[-1] == self.queries > 1:
            start = start[..., self.first + place.first_query :][..., : place.queries]
        return start

    def to_dense(self, place: Place) -> Tensor:
        return self.mask.to_dense(self._whole(place))

    def _whole(self, place: Place) -> Place:
        first = self.first + place.first_query
        return replace(place, first_query=first, offset=self.offset, whole=False)


@dataclass(frozen=True, eq=False, repr=False)
class LaterKeys(Both):
    """A mask for keys `first` and later that knows where the sequence began, before them.

    Only `sink_mass` depends on that, so `plain` is the same mask for a call without statistics: it
    has a description, by which the next call is recognised.
    """

    whole: Mask | None = None  # the mask of the whole sequence
    first: int = 0

    @property
    def plain(self) -> Mask:
        """The same keys, without the beginning."""
        return Both(self.a, self.b)

    def shows_all(self, place: Place) -> bool:
        return False  # a mask that hides nothing is left out, and the beginning with it

    def start(self, place: Place) -> int | Tensor:
        if self.whole is None:
            return -self.first
        first_key, offset = place.first_key + self.first, place.offset + self.first
        return self.whole.start(replace(place, first_key=first_key, offset=offset)) - self.first


def rows_of(mask: Mask | None, place: Place, rows: slice) -> Mask:
    """The mask of some rows of a call, which stand where they stood.

    >>> import torch, headwise as hw
    >>> place = Place(batch=1, heads=1, queries=4, keys=4)
    >>> some = rows_of(hw.mask.causal(), place, slice(1, 3))
    >>> some.to_dense(replace(place, queries=2, offset=2))[0, 0].int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0]], dtype=torch.int32)
    """
    whole = Stretch(0, FURTHEST) if mask is None else mask
    return RowsOfMask(whole, rows.start, place.queries, place.offset)


def part_of(mask: Mask | None, place: Place, batch: range, heads: range) -> Mask | None:
    """The mask of these batch entries and heads of a call; the mask itself if all see the same.

    >>> import torch, headwise as hw
    >>> mask = hw.mask.between(torch.tensor([0]), torch.tensor([1, 2, 3])[None, :, None])
    >>> place = Place(batch=1, heads=3, queries=1, keys=3)
    >>> part_of(mask, place, range(1), range(1, 3)).to_dense(replace(place, heads=2))[0, :, 0].int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    if mask is None or (len(batch), len(heads)) == (place.batch, place.heads):
        return mask
    mask.check(place)
    part = PartOfMask(mask, batch, heads, place.batch, place.heads)
    bounds: list[int | Tensor | None] = [mask.alignment(place), mask.start(place)]
    if mask.pieces:
        bounds += [bound for piece in mask.intervals(place) for bound in piece]
    else:
        bounds.append(mask.to_dense(place))
    return part if any(part._part(bound) is not bound for bound in bounds) else mask


def _short(part: range) -> str:
    return f"{part.start}–{part.stop - 1}" if part else "none"
