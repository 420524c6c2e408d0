"""Which keys a query may see: one or two intervals of keys for each query row.

Every mask here speaks of positions in the whole sequence. A `Place` says where a call's queries
and keys stand in it, so cached decoding, chunks and splits are not special cases.

>>> import headwise as hw
>>> place = Place(batch=1, heads=1, queries=3, keys=3)
>>> (hw.mask.causal() & hw.mask.window(1)).to_dense(place)[0, 0].int()
tensor([[1, 0, 0],
        [1, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Interval = tuple[Tensor, Tensor]  # first and last, each broadcastable to (B, Hq, N)
PerBatch = int | Sequence[int] | Tensor


@dataclass(frozen=True)
class Place:
    """Where a call's queries and keys stand in the whole sequence.

    `offset` is what an unstated alignment means: query i stands beside key i + offset.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0
    offset: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    whole: bool = True  # False: a part, so tensors of the whole sequence may be longer

    def rows(self) -> Tensor:
        """The queries' numbers in the whole sequence, (N,)."""
        first = self.first_query
        return torch.arange(first, first + self.queries, device=self.device, dtype=torch.int32)

    def columns(self) -> Tensor:
        """The keys' numbers in the whole sequence, (M,)."""
        first = self.first_key
        return torch.arange(first, first + self.keys, device=self.device, dtype=torch.int32)


class Mask:
    """Which keys each query may see. Combine masks with `&` and `|`."""

    pieces: int = 1  # intervals a row, known before any tensor is; 0 for a dense mask

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        """The disjoint intervals of each row, in positions of the whole sequence."""
        raise NotImplementedError

    def check(self, place: Place) -> None:
        """Raise ValueError where the mask was made for another shape."""

    def shows_all(self, place: Place) -> bool:
        """Whether it is certain, without reading a tensor, that every row sees every key."""
        return False

    @property
    def rows_alike(self) -> bool:
        """Whether it is certain, without reading a tensor, that every row sees the same keys."""
        return False

    def alignment(self, place: Place) -> int | Tensor | None:
        """Query i stands beside key i + alignment: an int, one a batch entry, or None: unstated."""
        return None

    def start(self, place: Place) -> int | Tensor:
        """The key at which each row's sequence or document begins, for `sink_mass`."""
        return 0

    def to_dense(self, place: Place) -> Tensor:
        """The mask as booleans, (B|1, Hq|1, N, M)."""
        columns = place.columns()
        seen = None
        for first, last in self.intervals(place):
            inside = (columns >= first[..., None]) & (columns < last[..., None])
            seen = inside if seen is None else seen | inside
        assert seen is not None  # every interval mask has a piece
        return _four(seen)

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """Query i sees keys j <= i + offset."""

    offset: PerBatch | None = None

    def __repr__(self) -> str:
        return f"causal({_said(offset=self.offset)})"

    def check(self, place: Place) -> None:
        _check_per_batch("causal(offset=...)", self.offset, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        last = place.rows() + _shift(self.alignment(place), place) + 1
        return (_three(torch.zeros_like(last), last),)

    def shows_all(self, place: Place) -> bool:
        shift = self.alignment(place)
        nothing_later = place.first_key + place.keys - 1
        return isinstance(shift, int) and place.first_query + shift >= nothing_later

    def is_lower_triangle(self, place: Place) -> bool:
        """Whether it is certain that row i sees exactly the keys j <= i of the call, N = M."""
        shift = self.alignment(place)
        return (
            isinstance(shift, int)
            and place.queries == place.keys
            and place.first_query + shift == place.first_key
        )

    def alignment(self, place: Place) -> int | Tensor:
        return _alignment(self.offset, place)


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """Query i sees keys i + offset - left <= j <= i + offset + right."""

    left: int
    right: int = 0
    offset: PerBatch | None = None

    def __repr__(self) -> str:
        return (
            f"window({self.left}{_said(right=self.right or None, offset=self.offset, more=True)})"
        )

    def check(self, place: Place) -> None:
        _check_per_batch("window(..., offset=...)", self.offset, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        middle = place.rows() + _shift(self.alignment(place), place)
        return (_three(middle - self.left, middle + self.right + 1),)

    def shows_all(self, place: Place) -> bool:
        shift = self.alignment(place)
        if not isinstance(shift, int):
            return False
        first_row, last_row = (
            place.first_query + shift,
            place.first_query + place.queries - 1 + shift,
        )
        past = place.first_key + place.keys
        return last_row - self.left <= place.first_key and first_row + self.right + 1 >= past

    def alignment(self, place: Place) -> int | Tensor:
        return _alignment(self.offset, place)


@dataclass(frozen=True, eq=False, repr=False)
class Lengths(Mask):
    """Every row sees keys j < n: padding on the right, or a prefix."""

    n: PerBatch
    word: str = "lengths"

    def __repr__(self) -> str:
        return f"{self.word}({_short(self.n)})"

    def check(self, place: Place) -> None:
        _check_per_batch(f"{self.word}(n)", self.n, place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        last = _shift(self.n if isinstance(self.n, int) else _tensor(self.n, place), place)
        last = torch.as_tensor(last, device=place.device, dtype=torch.int32)
        return (_three(torch.zeros_like(last), last),)

    def shows_all(self, place: Place) -> bool:
        return isinstance(self.n, int) and self.n >= place.first_key + place.keys

    @property
    def rows_alike(self) -> bool:
        return True


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
            if bound.ndim > 3 or not _fits(bound.shape, wanted, exact=place.whole):
                raise ValueError(
                    f"hw.mask.between: {name} has shape {tuple(bound.shape)}, which does not "
                    f"broadcast to (batch, heads, queries) = {wanted}"
                )

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        return (_three(self._rows(self.first, place), self._rows(self.last, place)),)

    @property
    def rows_alike(self) -> bool:
        return all(bound.ndim == 0 or bound.shape[-1] == 1 for bound in (self.first, self.last))

    def start(self, place: Place) -> Tensor:
        first, last = self.intervals(place)[0]
        first, last = torch.broadcast_tensors(first, last)
        unseen = torch.iinfo(torch.int32).max
        start = first.masked_fill(first >= last, unseen).amin(-1, keepdim=True)
        found: Tensor = start.masked_fill(start == unseen, 0)
        return found

    @staticmethod
    def _rows(bound: Tensor, place: Place) -> Tensor:
        bound = bound.to(place.device, torch.int32)
        if bound.ndim and bound.shape[-1] > 1:
            bound = bound[..., place.first_query : place.first_query + place.queries]
        return bound


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """A query sees the keys of its own document; the queries are the last N positions."""

    ids: Tensor

    def __repr__(self) -> str:
        return f"documents({_short(self.ids)})"

    def check(self, place: Place) -> None:
        shape, keys = tuple(self.ids.shape), place.first_key + place.keys
        fits = len(shape) in (1, 2) and (shape[-1] == keys if place.whole else shape[-1] >= keys)
        if not fits or (len(shape) == 2 and shape[0] not in (1, place.batch)):
            raise ValueError(
                f"hw.mask.documents: ids have shape {shape}; they number every key, so "
                f"(batch or 1, keys) = ({place.batch}, {keys}) would work"
            )

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        starts, ends = self._bounds(place)
        stands = (place.rows() + place.offset).long()
        position = stands.clamp(0, max(0, starts.shape[-1] - 1))
        last = ends[..., position].masked_fill(stands != position, 0)  # outside every document
        return (_three(starts[..., position][:, None], last[:, None]),)

    def start(self, place: Place) -> Tensor:
        return self.intervals(place)[0][0]

    def _bounds(self, place: Place) -> Interval:
        ids = self.ids.to(place.device)
        ids = ids if ids.ndim == 2 else ids[None]
        n = ids.shape[-1]
        number = torch.arange(n, device=place.device, dtype=torch.int32)
        change = ids[:, 1:] != ids[:, :-1]
        starts = torch.zeros_like(ids, dtype=torch.int32)
        starts[:, 1:] = torch.where(change, number[1:], 0)
        ends = torch.full_like(starts, n)
        ends[:, :-1] = torch.where(change, number[1:], n)
        return starts.cummax(-1).values, ends.flip(-1).cummin(-1).values.flip(-1)


@dataclass(frozen=True, eq=False, repr=False)
class Dense(Mask):
    """Any boolean tensor, True where the query may see the key; broadcast to (B, Hq, N, M)."""

    seen: Tensor
    pieces: int = field(default=0, init=False)

    def __repr__(self) -> str:
        return f"dense({_short(self.seen)})"

    def check(self, place: Place) -> None:
        check_placed("mask", self.seen, place)

    def to_dense(self, place: Place) -> Tensor:
        return placed(self.seen.to(place.device), place)


@dataclass(frozen=True, eq=False, repr=False)
class Both(Mask):
    """Keys that both masks show."""

    a: Mask
    b: Mask
    pieces: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pieces", _counted(self.a.pieces * self.b.pieces, "&"))

    def __repr__(self) -> str:
        return f"({self.a!r} & {self.b!r})"

    def check(self, place: Place) -> None:
        self.a.check(place)
        self.b.check(place)

    def intervals(self, place: Place) -> tuple[Interval, ...]:
        return tuple(
            (torch.maximum(a0, b0), torch.minimum(a1, b1))
            for a0, a1 in self.a.intervals(place)
            for b0, b1 in self.b.intervals(place)
        )

    def shows_all(self, place: Place) -> bool:
        return self.a.shows_all(place) and self.b.shows_all(place)

    @property
    def rows_alike(self) -> bool:
        return self.a.rows_alike and self.b.rows_alike

    def alignment(self, place: Place) -> int | Tensor | None:
        return _first_stated(self.a.alignment(place), self.b.alignment(place))

    def start(self, place: Place) -> int | Tensor:
        return _outer(self.a.start(place), self.b.start(place), torch.maximum, max)

    def to_dense(self, place: Place) -> Tensor:
        return self.a.to_dense(place) & self.b.to_dense(place)


@dataclass(frozen=True, eq=False, repr=False)
class Either(Mask):
    """Keys that at least one mask shows, none counted twice."""

    a: Mask
    b: Mask
    pieces: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        dense = self.a.pieces == 0 or self.b.pieces == 0
        count = 0 if dense else _counted(self.a.pieces + self.b.pieces, "|")
        object.__setattr__(self, "pieces", count)

    def __repr__(self) -> str:
        return f"({self.a!r} | {self.b!r})"

    def check(self, place: Place) -> None:
        self.a.check(place)
        self.b.check(place)

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

    @property
    def rows_alike(self) -> bool:
        return self.a.rows_alike and self.b.rows_alike

    def alignment(self, place: Place) -> int | Tensor | None:
        return _first_stated(self.a.alignment(place), self.b.alignment(place))

    def start(self, place: Place) -> int | Tensor:
        return _outer(self.a.start(place), self.b.start(place), torch.minimum, min)

    def to_dense(self, place: Place) -> Tensor:
        return self.a.to_dense(place) | self.b.to_dense(place)


def causal(offset: PerBatch | None = None) -> Mask:
    """Query i sees keys j <= i + offset; without offset the last query stands at the last key.

    offset is an int, or one for each batch entry (B,).
    """
    return Causal(offset)


def window(left: int, right: int = 0, offset: PerBatch | None = None) -> Mask:
    """Query i sees keys i + offset - left <= j <= i + offset + right.

    A sliding window of 9 keys that ends at the query is `causal() & window(8)`.
    """
    if left + right < 0:
        raise ValueError(f"hw.mask.window(left={left}, right={right}) shows no key to any query")
    return Window(left, right, offset)


def prefix(p: PerBatch) -> Mask:
    """Every query sees keys j < p. A prefix language model is `causal() | prefix(p)`."""
    return Lengths(p, "prefix")


def lengths(n: PerBatch) -> Mask:
    """Every query of batch entry b sees keys j < n[b]: padding on the right. n is (B,)."""
    return Lengths(n)


def between(first: Tensor, last: Tensor) -> Mask:
    """Query i sees keys first <= j < last; tensors broadcast to (B, Hq, N)."""
    return Between(torch.as_tensor(first), torch.as_tensor(last))


def documents(ids: Tensor) -> Mask:
    """A query sees its own document only. ids (B|1, M); a change of id starts a document."""
    return Documents(torch.as_tensor(ids))


def dense(seen: Tensor) -> Mask:
    """Any boolean tensor, True = may attend, broadcast to (B, Hq, N, M)."""
    if seen.dtype != torch.bool:
        raise ValueError(
            f"hw.mask.dense takes a bool tensor (True = may attend), not {seen.dtype}; "
            "what is added to the logits goes into bias="
        )
    return Dense(seen)


def placed(tensor: Tensor, place: Place) -> Tensor:
    """The part of a whole-sequence (B, Hq, N, M) tensor that belongs to this call."""
    tensor = _four(tensor)
    if tensor.shape[-2] > 1:
        tensor = tensor[..., place.first_query : place.first_query + place.queries, :]
    if tensor.shape[-1] > 1:
        tensor = tensor[..., place.first_key : place.first_key + place.keys]
    return tensor


def check_placed(name: str, tensor: Tensor, place: Place) -> None:
    """Raise ValueError unless the tensor broadcasts to (B, Hq, N, M) of the whole sequence."""
    rows, columns = place.first_query + place.queries, place.first_key + place.keys
    wanted = (place.batch, place.heads, rows, columns)
    if tensor.ndim > 4 or not _fits(tensor.shape, wanted, exact=place.whole):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}, which does not broadcast to "
            f"(batch, query heads, queries, keys) = {wanted}"
        )


def _fits(shape: Sequence[int], wanted: Sequence[int], exact: bool) -> bool:
    """Whether shape broadcasts to wanted; if not exact, the sequence axes may be longer."""
    for have, want, axis in zip(
        reversed(shape), reversed(wanted), range(len(wanted)), strict=False
    ):
        longer = not exact and axis < len(wanted) - 2 and have >= want
        if have not in (1, want) and not longer:
            return False
    return len(shape) <= len(wanted)


def _counted(pieces: int, sign: str) -> int:
    if pieces > 2:
        raise ValueError(
            f"a {sign} b has {pieces} intervals a row; a headwise mask holds at most two. "
            "hw.mask.dense(bool_tensor) takes any shape, with memory for every pair"
        )
    return pieces


def _alignment(offset: PerBatch | None, place: Place) -> int | Tensor:
    if offset is None:
        return place.offset
    return offset if isinstance(offset, int) else _tensor(offset, place)


def _tensor(values: Sequence[int] | Tensor, place: Place) -> Tensor:
    return torch.as_tensor(values, device=place.device, dtype=torch.int32)


def _shift(values: int | Tensor, place: Place) -> int | Tensor:
    """An int as it is; one number a batch entry as (B, 1, 1)."""
    return values if isinstance(values, int) else values.reshape(-1, 1, 1)


def _three(first: Tensor, last: Tensor) -> Interval:
    """Both bounds as (B|1, Hq|1, N|1)."""
    return first.reshape((1,) * (3 - first.ndim) + first.shape), last.reshape(
        (1,) * (3 - last.ndim) + last.shape
    )


def _four(tensor: Tensor) -> Tensor:
    return tensor.reshape((1,) * (4 - tensor.ndim) + tensor.shape)


def _check_per_batch(call: str, values: PerBatch | None, place: Place) -> None:
    if values is None or isinstance(values, int):
        return
    shape = tuple(torch.as_tensor(values).shape)
    if shape not in ((), (1,), (place.batch,)):
        raise ValueError(
            f"hw.mask.{call} has shape {shape}; an int or one number for each of the "
            f"{place.batch} batch entries would work"
        )


def _short(value: object) -> str:
    """A value in an error message: a tensor by its shape."""
    return f"tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _said(*, more: bool = False, **options: object) -> str:
    """The keywords that were given, after others where `more`."""
    said = [f"{name}={_short(value)}" for name, value in options.items() if value is not None]
    return ", ".join(["", *said] if more and said else said)


def _first_stated(a: int | Tensor | None, b: int | Tensor | None) -> int | Tensor | None:
    return b if a is None else a


def _outer(a: int | Tensor, b: int | Tensor, tensors, ints) -> int | Tensor:  # type: ignore[no-untyped-def]
    if isinstance(a, int) and isinstance(b, int):
        return int(ints(a, b))
    device = a.device if isinstance(a, Tensor) else b.device  # type: ignore[union-attr]
    as_tensor = [torch.as_tensor(x, device=device, dtype=torch.int32) for x in (a, b)]
    result: Tensor = tensors(*as_tensor)
    return result
