"""A mask for some of a call's batch entries and heads, where it was made for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import overload

from torch import Tensor

from headwise.core.intervals import Interval, Mask
from headwise.core.place import Place


@dataclass(frozen=True, eq=False, repr=False)
class PartOfMask(Mask):
    """The rows of a mask that belong to some batch entries and some heads of a larger call."""

    mask: Mask
    batch: range  # of `entries`
    heads: range  # of `all_heads`
    entries: int
    all_heads: int
    pieces: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", self.mask.pieces)

    def __repr__(self) -> str:
        return f"{self.mask!r} of entries {_short(self.batch)} and heads {_short(self.heads)}"

    def check(self, place: Place) -> None:
        if (place.batch, place.heads) != (len(self.batch), len(self.heads)):
            raise ValueError(
                f"the mask is of {len(self.batch)} batch entries and {len(self.heads)} heads, and "
                f"the call has {place.batch} and {place.heads}"
            )
        self.mask.check(self._whole(place))

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        found = self.mask.intervals(self._whole(place))
        return tuple((self._part(first), self._part(last)) for first, last in found)

    def shows_all(self, place: Place) -> bool:
        return self.mask.shows_all(self._whole(place))

    @property
    def rows_alike(self) -> bool:
        return self.mask.rows_alike

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
