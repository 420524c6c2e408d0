"""The kinds of masks: causal, window, lengths, documents, any bounds, and dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor

from headwise.core.intervals import FURTHEST, Interval, Mask
from headwise.core.place import (
    Length,
    Place,
    check_keys,
    check_placed,
    fits,
    from_key,
    padded,
    placed,
)

PerBatch = int | Sequence[int] | Tensor
Number = (int, torch.SymInt)  # a length is a symbol when exported or compiled


class Aligned(Mask):
    """A mask in which query i stands at key i + offset."""

    offset: PerBatch | None
    shows_itself = True

    def alignment(self, place: Place) -> int | Tensor:
        if self.offset is None:
            return place.offset
        return self.offset if isinstance(self.offset, Number) else _tensor(self.offset, place)

    def later(self, first: int, keys: int) -> Mask:
        return self if self.offset is None else replace(self, offset=_less(self.offset, first))  # type: ignore[type-var]

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return replace(self, offset=start) if self.offset is None else self  # type: ignore[type-var]


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Aligned):
    """Query i sees keys j <= i + offset."""

    offset: PerBatch | None = None

    def __repr__(self) -> str:
        return f"causal({_keywords(offset=self.offset)})"

    def description(self) -> tuple[object, ...] | None:
        exact = type(self) is Causal  # a subclass may mean something else
        number = self.offset is None or type(self.offset) is int
        return ("causal", self.offset) if exact and number else None

    def check(self, place: Place) -> None:
        _check_per_batch("causal(offset=...)", self.offset, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        shift = self.alignment(place)
        if isinstance(shift, Tensor):
            last = place.rows(1) + _shift(shift, place)
        else:
            last = place.rows(shift + 1)
        return (_three_axes(torch.zeros_like(last), last),)

    def shows_all(self, place: Place) -> bool:
        shift = self.alignment(place)
        nothing_later = place.first_key + place.keys - 1
        return not isinstance(shift, Tensor) and place.first_query + shift >= nothing_later

    def band(self, place: Place) -> tuple[int, int] | None:
        shift = self.alignment(place)
        return None if isinstance(shift, Tensor) else (-FURTHEST, shift + 1)

    def is_lower_triangle(self, place: Place) -> bool:
        """True if row i is known to see exactly the keys j <= i of the call, N = M."""
        shift = self.alignment(place)
        return (
            not isinstance(shift, Tensor)
            and place.queries == place.keys
            and place.first_query + shift == place.first_key
        )


@dataclass(frozen=True, eq=False, repr=False)
class Window(Aligned):
    """Query i sees keys i + offset - left <= j <= i + offset + right."""

    left: int
    right: int = 0
    offset: PerBatch | None = None

    def __repr__(self) -> str:
        rest = _keywords(right=self.right or None, offset=self.offset, more=True)
        return f"window({self.left}{rest})"

    def description(self) -> tuple[object, ...] | None:
        given = self.left, self.right, self.offset
        return ("window", *given) if type(self) is Window and _numbers(*given) else None

    def check(self, place: Place) -> None:
        _check_per_batch("window(..., offset=...)", self.offset, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        low, high = (_shift(bound, place) for bound in self._reach(place))
        return (_three_axes(place.rows() + low, place.rows() + high),)

    def shows_all(self, place: Place) -> bool:
        band, first = self.band(place), place.first_query
        if band is None:
            return False
        from_first = first + place.queries - 1 + band[0] <= place.first_key
        return from_first and first + band[1] >= place.first_key + place.keys

    def band(self, place: Place) -> tuple[int, int] | None:
        low, high = self._reach(place)
        return None if isinstance(low, Tensor) or isinstance(high, Tensor) else (low, high)

    def _reach(self, place: Place) -> tuple[int | Tensor, int | Tensor]:
        """Query i sees keys [i + the first, i + the second)."""
        shift = self.alignment(place)
        if isinstance(shift, Tensor):
            shift = shift.long()
        return _near(shift - self.left), _near(shift + self.right + 1)


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Every row sees keys j < n: right padding, or a prefix."""

    n: PerBatch
    word: str = "lengths"

    def __repr__(self) -> str:
        return f"{self.word}({_short(self.n)})"

    def description(self) -> tuple[object, ...] | None:
        return ("lengths", self.n) if type(self) is Lengths and type(self.n) is int else None

    def check(self, place: Place) -> None:
        _check_per_batch(f"{self.word}(n)", self.n, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        if isinstance(self.n, Number):  # filled in on the device, as in `Stretch`
            last = torch.full((), _near(self.n), dtype=torch.int32, device=place.device)
        else:
            last = _tensor(self.n, place).reshape(-1, 1, 1)
        return (_three_axes(torch.zeros_like(last), last),)

    def shows_all(self, place: Place) -> bool:
        return isinstance(self.n, Number) and self.n >= place.first_key + place.keys

    @property
    def rows_alike(self) -> bool:
        return True

    def later(self, first: int, keys: int) -> Mask:
        return replace(self, n=_less(self.n, first))

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return self


@dataclass(frozen=True, eq=False, repr=False)
class Between(Mask):
    """Row i sees keys first[..., i] <= j < last[..., i]."""

    first: Tensor
    last: Tensor

    def __repr__(self) -> str:
        return f"between({_short(self.first)}, {_short(self.last)})"

    def check(self, place: Place) -> None:
        for name, bound in (("first", self.first), ("last", self.last)):
            wanted = (place.batch, place.heads, place.first_query + place.queries)
            if bound.ndim > 3 or not fits(bound.shape, wanted, exact=place.whole):
                raise ValueError(
                    f"hw.mask.between: {name} has shape {tuple(bound.shape)}, which does not "
                    f"broadcast to (batch, heads, queries) = {wanted}"
                )

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        return (_three_axes(self._rows(self.first, place), self._rows(self.last, place)),)

    @property
    def rows_alike(self) -> bool:
        return all(bound.ndim == 0 or bound.shape[-1] == 1 for bound in (self.first, self.last))

    def start(self, place: Place) -> Tensor:
        first, last = self.intervals(place)[0]
        first, last = torch.broadcast_tensors(first, last)
        if first.shape[-1] == 0:
            nothing: Tensor = first.new_zeros(*first.shape[:-1], 1)
            return nothing
        unseen = torch.iinfo(torch.int32).max
        start = first.masked_fill(first >= last, unseen).amin(-1, keepdim=True)
        found: Tensor = start.masked_fill(start == unseen, 0).clamp_min_(0)
        return found

    def later(self, first: int, keys: int) -> Mask:
        return Between(self.first - first, self.last - first)

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return self

    @staticmethod
    def _rows(bound: Tensor, place: Place) -> Tensor:
        bound = _near(bound.to(place.device))
        if bound.ndim and bound.shape[-1] > 1:
            bound = bound[..., place.first_query : place.first_query + place.queries]
        return bound


@dataclass(frozen=True, eq=False, repr=False)
class Stretch(Mask):
    """Every row sees keys first <= j < last, whole numbers: calls with it can be prepared."""

    first: int
    last: int

    def __repr__(self) -> str:
        return f"between({self.first}, {self.last})"

    def description(self) -> tuple[object, ...] | None:
        return ("stretch", self.first, self.last) if _numbers(self.first, self.last) else None

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        # filled in on the device: a copy from here could not be captured in a CUDA graph
        first, last = (
            torch.full((), bound, dtype=torch.int32, device=place.device)
            for bound in (self.first, self.last)
        )
        return (_three_axes(first, last),)

    @property
    def rows_alike(self) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """A query sees the keys of its document; the queries are the last N positions."""

    ids: Tensor
    bounds: Tensor = field(init=False)  # of each key's document, (1, 2, B|1, 1, M)
    shows_itself = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "bounds", _bounds(self.ids))

    def __repr__(self) -> str:
        return f"documents({_short(self.ids)})"

    def description(self) -> tuple[object, ...] | None:
        return ("documents", self.ids.shape) if type(self) is Documents else None

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.bounds,)

    def check(self, place: Place) -> None:
        shape, keys = tuple(self.ids.shape), place.first_key + place.keys
        numbered = len(shape) in (1, 2) and (
            shape[-1] == keys or (not place.whole and shape[-1] > keys)
        )
        if not numbered or not fits(shape[:-1], (place.batch,), exact=True):
            raise ValueError(
                f"hw.mask.documents: ids have shape {shape}; they need one id per key: "
                f"(batch or 1, keys) = ({place.batch}, {keys})"
            )

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        bounds = self.bounds.to(place.device)
        if bounds.shape[-1] == 0:  # no keys, so no documents
            nothing = bounds.new_zeros(1, 1, place.queries)
            return ((nothing, nothing),)
        starts, ends = bounds[0, 0, :, 0], bounds[0, 1, :, 0]
        stands = (place.rows() + place.offset).long()
        position = stands.clamp(0, starts.shape[-1] - 1)
        last = ends[..., position].masked_fill(stands != position, 0)  # outside of all documents
        return (_three_axes(starts[..., position][:, None], last[:, None]),)

    def table(self, place: Place) -> Tensor | None:
        same = place.first_query == place.first_key == place.offset == 0
        if not same or not self.bounds.shape[-1] == place.queries == place.keys:
            return None
        return self.bounds.to(place.device)

    def later(self, first: int, keys: int) -> Mask:
        check_keys("hw.mask.documents", self.ids, first + keys)
        return Documents(self.ids[..., first:])

    def start(self, place: Place) -> Tensor:
        ready = self.table(place)
        return self.intervals(place)[0][0] if ready is None else ready[0, 0]


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Any boolean tensor, True where a query may see a key; broadcast to (B, Hq, N, M)."""

    seen: Tensor
    pieces: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"dense({_short(self.seen)})"

    def check(self, place: Place) -> None:
        check_placed("mask", self.seen, place)

    def to_dense(self, place: Place) -> Tensor:
        return placed(self.seen.to(place.device), place)

    def later(self, first: int, keys: int) -> Mask:
        return Dense(from_key("hw.mask.dense", self.seen, first, keys))

    def stored(self, start: Tensor, keys: int, length: Length) -> Mask:
        return Dense(padded("hw.mask.dense", self.seen, keys, length))


def _bounds(ids: Tensor) -> Tensor:
    """The start and end of each key's document, (1, 2, B|1, 1, M)."""
    ids = torch.atleast_2d(ids).flatten(0, -2)
    change = torch.zeros_like(ids, dtype=torch.bool)
    change[:, 1:] = ids[:, 1:] != ids[:, :-1]
    number = change.cumsum(-1, dtype=torch.int32)  # of the document
    starts = torch.searchsorted(number, number, out_int32=True)
    ends = torch.searchsorted(number, number, right=True, out_int32=True)
    return torch.stack((starts, ends))[None, :, :, None]


def _numbers(*given: object) -> bool:
    """True if each of these is a plain int or None."""
    return all(x is None or type(x) is int for x in given)


def _tensor(values: Sequence[int] | Tensor, place: Place) -> Tensor:
    return _near(torch.as_tensor(values, device=place.device))


@overload
def _near(number: Tensor) -> Tensor: ...


@overload
def _near(number: int) -> int: ...


def _near(number: int | Tensor) -> int | Tensor:
    """A number of keys, clamped to FURTHEST, beyond which there are no keys."""
    if isinstance(number, Tensor):
        return number.long().clamp(-FURTHEST, FURTHEST).int()
    return max(-FURTHEST, min(FURTHEST, number))


def _less(values: PerBatch, first: int) -> int | Tensor:
    return values - first if isinstance(values, int) else torch.as_tensor(values) - first


def _shift(values: int | Tensor, place: Place) -> int | Tensor:
    """An int as it is; one number per batch entry as (B, 1, 1)."""
    return values.reshape(-1, 1, 1) if isinstance(values, Tensor) else values


def _three_axes(first: Tensor, last: Tensor) -> Interval:
    """Both bounds as (B|1, Hq|1, N|1)."""
    return first.reshape((1,) * (3 - first.ndim) + first.shape), last.reshape(
        (1,) * (3 - last.ndim) + last.shape
    )


def _check_per_batch(call: str, values: PerBatch | None, place: Place) -> None:
    if values is None or isinstance(values, Number):
        return
    shape = tuple(torch.as_tensor(values).shape)
    if not fits(shape, (place.batch,), exact=True):
        raise ValueError(
            f"hw.mask.{call} has shape {shape}; give an int, or one number for each of the "
            f"{place.batch} batch entries"
        )


def _short(value: object) -> str:
    """A value in an error message: a tensor by its shape."""
    return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _keywords(*, more: bool = False, **options: object) -> str:
    """The keywords that are not None, with a comma in front if they come after `more`."""
    parts = [f"{name}={_short(value)}" for name, value in options.items() if value is not None]
    return ", ".join(["", *parts] if more and parts else parts)
