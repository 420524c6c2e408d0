"""Masks as intervals of keys: one or two per query row, and how two masks combine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.core.place import Length, Place, as_four_axes

Interval = tuple[Tensor, Tensor]  # first and last, each broadcastable to (B, Hq, N)
FURTHEST = 1 << 30  # no sequence is longer, and no 32-bit sum of it and a row overflows


class Mask:
    """The keys that each query may see. Combine masks with `&` and `|`."""

    pieces: int = 1  # intervals per row, known without any tensor; 0 for a dense mask
    shows_itself: bool = False  # it is certain that it hides no token from itself

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        """The disjoint intervals of each row, in positions of the whole sequence."""
        raise NotImplementedError

    def table(self, place: Place) -> Tensor | None:
        """The intervals in the layout of `Terms` if the mask has them ready, else None."""
        return None

    def description(self) -> tuple[object, ...] | None:
        """All that the mask depends on besides its `tensors`, hashable; None if that is more."""
        return None

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the mask depends on, where it has a `description`."""
        return ()

    def check(self, place: Place) -> None:
        """Raise ValueError if the mask was made for another shape."""

    def shows_all(self, place: Place) -> bool:
        """True if, without reading a tensor, every row is known to see every key."""
        return False

    @property
    def rows_alike(self) -> bool:
        """True if, without reading a tensor, all rows are known to see the same keys."""
        return False

    def alignment(self, place: Place) -> int | Tensor | None:
        """Query i stands at key i + alignment: an int, one per batch entry, or None if unstated."""
        return None

    def band(self, place: Place) -> tuple[int, int] | None:
        """(low, high) if every query i sees exactly keys [i + low, i + high), else None."""
        return None

    def apart(self, place: Place) -> tuple[tuple[int, int] | None, Mask | None]:
        """A band and a mask whose intersection is this mask; None for one that is not needed."""
        band = self.band(place)
        return band, self if band is None else None

    def start(self, place: Place) -> int | Tensor:
        """The key at which each row's sequence or document begins, for `sink_mass`."""
        return 0

    def later(self, first: int, keys: int) -> Mask:
        """The mask for keys [first, first + keys) of the sequence, whose last are the queries."""
        raise ValueError(f"a SlidingCache does not support {self!r}; use a GrowingCache")

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        """The mask of the sequence so far for a storage of `keys` keys, with query 0 at `start`."""
        raise ValueError(f"a FixedCache does not support {self!r}; use a GrowingCache")

    def to_dense(self, place: Place) -> Tensor:
        """The mask as booleans, (B|1, Hq|1, N, M)."""
        bounds = ((first[..., None], last[..., None]) for first, last in self.intervals(place))
        return as_four_axes(inside(bounds, place.columns()))

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)

    __rand__, __ror__ = __and__, __or__  # refuse whatever else is on the left too


@dataclass(frozen=True, eq=False, repr=False)
class Combined(Mask):
    """Two masks combined."""

    a: Mask
    b: Mask
    pieces: int = field(default=0, init=False)

    def description(self) -> tuple[object, ...] | None:
        a, b, kind = self.a.description(), self.b.description(), type(self)
        exact = kind is Both or kind is Either  # a subclass may mean something else
        return (kind, a, b) if exact and a is not None and b is not None else None

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.a.tensors(), *self.b.tensors())

    def check(self, place: Place) -> None:
        self.a.check(place)
        self.b.check(place)

    @property
    def rows_alike(self) -> bool:
        return self.a.rows_alike and self.b.rows_alike

    def alignment(self, place: Place) -> int | Tensor | None:
        stated = self.a.alignment(place)
        return self.b.alignment(place) if stated is None else stated


@dataclass(frozen=True, eq=False, repr=False)
class Both(Combined):
    """Keys that both of two masks show."""

    def __post_init__(self) -> None:
        _check_masks(self.a, self.b, "&")
        object.__setattr__(self, "pieces", _counted(self.a.pieces * self.b.pieces, "&"))

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        for one, other in ((self.a, self.b), (self.b, self.a)):
            band = one.band(place)
            if band is not None:
                return _within(band, other.intervals(place), place)
        return tuple(
            (torch.maximum(a0, b0), torch.minimum(a1, b1))
            for a0, a1 in self.a.intervals(place)
            for b0, b1 in self.b.intervals(place)
        )

    def shows_all(self, place: Place) -> bool:
        return self.a.shows_all(place) and self.b.shows_all(place)

    def band(self, place: Place) -> tuple[int, int] | None:
        a, b = self.a.band(place), self.b.band(place)
        return None if a is None or b is None else (max(a[0], b[0]), min(a[1], b[1]))

    def apart(self, place: Place) -> tuple[tuple[int, int] | None, Mask | None]:
        band = self.band(place)
        if band is not None or self.pieces == 0:
            return band, None if band else self
        for one, other in ((self.a, self.b), (self.b, self.a)):
            band = one.band(place)
            if band is not None:
                return band, other
        return None, self

    @property
    def shows_itself(self) -> bool:  # type: ignore[override]
        return self.a.shows_itself and self.b.shows_itself

    def later(self, first: int, keys: int) -> Mask:
        return Both(self.a.later(first, keys), self.b.later(first, keys))

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return Both(self.a.stored(start, keys, length), self.b.stored(start, keys, length))

    def start(self, place: Place) -> int | Tensor:
        a, b = self.a.start(place), self.b.start(place)
        for one, other in ((a, b), (b, a)):
            if not isinstance(one, Tensor) and one == 0:  # no sequence starts earlier
                return other
        return _outer(a, b, torch.maximum, max)

    def to_dense(self, place: Place) -> Tensor:
        return self.a.to_dense(place) & self.b.to_dense(place)


@dataclass(frozen=True, eq=False, repr=False)
class Either(Combined):
    """Keys that at least one of two masks shows, none counted twice."""

    def __post_init__(self) -> None:
        _check_masks(self.a, self.b, "|")
        dense = self.a.pieces == 0 or self.b.pieces == 0
        count = 0 if dense else _counted(self.a.pieces + self.b.pieces, "|")
        object.__setattr__(self, "pieces", count)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        (a0, a1), (b0, b1) = self.a.intervals(place)[0], self.b.intervals(place)[0]
        a0, a1, b0, b1 = torch.broadcast_tensors(a0, a1, b0, b1)
        # An empty interval is moved onto the other one, so that it neither joins nor orders them.
        a_empty, b_empty = a0 >= a1, b0 >= b1
        a0, a1 = torch.where(a_empty, b0, a0), torch.where(a_empty, b0, a1)
        b0, b1 = torch.where(b_empty, a0, b0), torch.where(b_empty, a0, b1)
        apart = torch.maximum(a0, b0) > torch.minimum(a1, b1)
        a_left = a0 <= b0
        near = (torch.where(a_left, a0, b0), torch.where(a_left, a1, b1))
        far = (torch.where(a_left, b0, a0), torch.where(a_left, b1, a1))
        joined = torch.maximum(a1, b1)
        return (
            (near[0], torch.where(apart, near[1], joined)),
            (torch.where(apart, far[0], joined), torch.where(apart, far[1], joined)),
        )

    def shows_all(self, place: Place) -> bool:
        return self.a.shows_all(place) or self.b.shows_all(place)

    def later(self, first: int, keys: int) -> Mask:
        return Either(self.a.later(first, keys), self.b.later(first, keys))

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return Either(self.a.stored(start, keys, length), self.b.stored(start, keys, length))

    def start(self, place: Place) -> int | Tensor:
        return _outer(self.a.start(place), self.b.start(place), torch.minimum, min)

    def to_dense(self, place: Place) -> Tensor:
        return self.a.to_dense(place) | self.b.to_dense(place)


def inside(intervals: Iterable[Iterable[Tensor]], column: Tensor) -> Tensor:
    """True for keys that lie in one of the intervals; first, last and column broadcast."""
    seen: Tensor | None = None
    for first, last in intervals:
        within = (column >= first) & (column < last)
        seen = within if seen is None else seen | within
    assert seen is not None  # every interval mask has one or two
    return seen


def rows_per_key(intervals: Tensor, keys: int) -> Tensor:
    """The number of rows that see each key, int32 (..., M); bounds (P, 2, ..., N) in [0, M]."""
    # +1 where an interval starts, -1 where it ends: the running sum counts the open ones
    first, last = (bound.long() for bound in intervals.unbind(1))
    step = torch.ones_like(first, dtype=torch.int32).masked_fill_(first >= last, 0)
    edges = step.new_zeros(*first.shape[:-1], keys + 1)
    edges.scatter_add_(-1, first, step).scatter_add_(-1, last, -step)
    return edges.sum(0, dtype=torch.int32).cumsum(-1, dtype=torch.int32)[..., :keys]


def _within(
    band: tuple[int, int], pieces: tuple[Interval, ...], place: Place
) -> tuple[Interval, ...]:
    """Intervals cut to a band in few operations: on a GPU a launch takes longer than its work."""
    low, high = band
    last = place.rows(high)
    if low <= -FURTHEST:
        return tuple((a0.clamp_min(0), torch.minimum(a1, last)) for a0, a1 in pieces)
    first = place.rows(low)
    return tuple((torch.maximum(a0, first), torch.minimum(a1, last)) for a0, a1 in pieces)


def _check_masks(a: object, b: object, sign: str) -> None:
    for x in (a, b):
        if not isinstance(x, Mask):
            kind = f"{x.dtype} tensor" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"a {sign} b combines two headwise masks, and one of these is a {kind}; "
                "wrap a bool tensor (True = may attend) in hw.mask.dense(...)"
            )


def _counted(pieces: int, sign: str) -> int:
    if pieces > 2:
        raise ValueError(
            f"a {sign} b has {pieces} intervals per row; a headwise mask holds at most two. "
            "Use hw.mask.dense(bool_tensor), which takes memory for every pair"
        )
    return pieces


def _outer(
    a: int | Tensor, b: int | Tensor, tensors: Callable[..., Tensor], ints: Callable[..., int]
) -> int | Tensor:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        return ints(a, b)
    device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
    as_tensor = [torch.as_tensor(x, device=device, dtype=torch.int32) for x in (a, b)]
    result: Tensor = tensors(*as_tensor)
    return result
