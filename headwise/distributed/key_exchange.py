"""Ways to bring keys to the rows that see them, and their gradients back to their owners.

`RangeExchange` moves the ranges that each rank needs, all at once. `RingExchange` passes every
rank's keys around, so that a rank never holds more than three parts. Both compute while they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.distributed.geometry import Geometry
from headwise.distributed.ranges import Ranges, common, size, take_ranges, union
from headwise.distributed.transport import Arrivals, RankGroup, packed, unpacked

Pair = tuple[Tensor, Tensor]  # keys and values, or their gradients


@dataclass(frozen=True, eq=False)
class KeyRun:
    """Neighbouring keys [first, last) of the sequence: k (B, Hkv, n, D), v (B, Hkv, n, Dv)."""

    first: int
    last: int
    k: Tensor
    v: Tensor


Differentiate = Callable[[KeyRun], Pair]


class KeyExchange:
    """One call's movement of keys: `runs` in the forward, `gradients` in the backward."""

    def __init__(self, ranks: RankGroup, geometry: Geometry) -> None:
        self.ranks, self.geometry, self.own = ranks, geometry, ranks.own
        self.held = tuple(union(ranges) for ranges in geometry.keys)

    def runs(self, k: Tensor, v: Tensor) -> Iterator[KeyRun]:
        """The runs of keys that this rank's rows see."""
        raise NotImplementedError

    def gradients(self, k: Tensor, v: Tensor, differentiate: Differentiate) -> Pair:
        """The gradients of this rank's keys and values, from the rows of every rank.

        An error of `differentiate` is raised when all messages have moved: other ranks wait for
        them.
        """
        failure: Exception | None = None

        def tried(run: KeyRun) -> Pair:
            nonlocal failure
            if failure is None:
                try:
                    return differentiate(run)
                except Exception as error:
                    failure = error
            return _zeros(run.k), _zeros(run.v)

        total = self._gradients(k, v, tried)
        if failure is not None:
            raise failure
        return total

    def _gradients(self, k: Tensor, v: Tensor, differentiate: Differentiate) -> Pair:
        raise NotImplementedError

    def seen(self, owner: int, k: Tensor, v: Tensor) -> list[KeyRun]:
        """The runs that this rank's rows see of the keys that an owner holds."""
        found = self.geometry.moves(self.own, owner)
        inside = within_part(found, self.held[owner])
        return [
            KeyRun(*keys, k[:, :, i:j], v[:, :, i:j])
            for keys, (i, j) in zip(found, inside, strict=True)
        ]


class RangeExchange(KeyExchange):
    """Each rank receives the ranges that its rows see, in one exchange, and keeps them."""

    def __init__(self, ranks: RankGroup, geometry: Geometry) -> None:
        super().__init__(ranks, geometry)
        self.wanted = {peer: geometry.moves(self.own, peer) for peer in ranks.others}
        self.asked = {
            peer: within_part(geometry.moves(peer, self.own), self.held[self.own])
            for peer in ranks.others
        }
        self.far: list[KeyRun] = []

    def runs(self, k: Tensor, v: Tensor) -> Iterator[KeyRun]:
        sends = {
            peer: packed(take_ranges(k, 2, asked), take_ranges(v, 2, asked))
            for peer, asked in self.asked.items()
        }
        sizes = {peer: size(wanted) * _bytes(k, v) for peer, wanted in self.wanted.items()}
        arrivals = self.ranks.exchange(sends, sizes, k.device)
        yield from self.seen(self.own, k, v)
        self.far = self._arrived(arrivals.take(), k, v)
        yield from self.far

    def _gradients(self, k: Tensor, v: Tensor, differentiate: Differentiate) -> Pair:
        far = [(run, differentiate(run)) for run in self.far]
        wide = _widened(k), _widened(v)
        sends = {
            peer: packed(*(self._given_back(far, wanted, side) for side in (0, 1)))
            for peer, wanted in self.wanted.items()
            if wanted
        }
        sizes = {peer: size(asked) * _bytes(*wide) for peer, asked in self.asked.items()}
        arrivals = self.ranks.exchange(sends, sizes, k.device)
        total = _zeros(k), _zeros(v)
        for run in self.seen(self.own, k, v):
            (at,) = within_part(((run.first, run.last),), self.held[self.own])
            _add(total, (at,), differentiate(run))
        for peer, message in arrivals.take().items():
            asked = self.asked[peer]
            _add(total, asked, _unpacked_pair(message, *total, size(asked)))
        return total

    def _arrived(self, found: dict[int, Tensor], k: Tensor, v: Tensor) -> list[KeyRun]:
        """The ranges that arrived, neighbours joined, so that few runs are computed."""
        parts: list[KeyRun] = []
        for peer, message in found.items():
            wanted = self.wanted[peer]
            keys, values = _unpacked_pair(message, k, v, size(wanted))
            at = 0
            for first, last in wanted:
                inside = slice(at, at + last - first)
                parts.append(KeyRun(first, last, keys[:, :, inside], values[:, :, inside]))
                at += last - first
        parts.sort(key=lambda run: run.first)
        joined: list[list[KeyRun]] = []
        for part in parts:
            if joined and joined[-1][-1].last == part.first:
                joined[-1].append(part)
            else:
                joined.append([part])
        return [_joined(runs) for runs in joined]

    def _given_back(self, far: list[tuple[KeyRun, Pair]], wanted: Ranges, side: int) -> Tensor:
        """The gradients of the ranges that one owner gave, one after the other."""
        parts = []
        for first, last in wanted:
            run, pair = next(each for each in far if each[0].first <= first < each[0].last)
            parts.append(pair[side][:, :, first - run.first : last - run.first])
        return torch.cat(parts, 2)


class RingExchange(KeyExchange):
    """Each rank passes keys on to the next and receives those of the one before, in ranks steps."""

    def runs(self, k: Tensor, v: Tensor) -> Iterator[KeyRun]:
        for owner, pair in self._around((k, v)):
            yield from self.seen(owner, *pair)

    def _gradients(self, k: Tensor, v: Tensor, differentiate: Differentiate) -> Pair:
        # The gradients of a rank's keys follow the keys, one step behind, and end at home.
        ranks, coming = self.ranks, None
        total: Pair = _zeros(k), _zeros(v)
        for owner, pair in self._around((k, v)):
            count = pair[0].shape[2]
            shares = [
                (within_part(((run.first, run.last),), self.held[owner]), differentiate(run))
                for run in self.seen(owner, *pair)
            ]
            if coming is None:
                total = _zeros(pair[0]), _zeros(pair[1])
            else:
                total = _unpacked_pair(_message(coming), *total, count)
            for at, share in shares:
                _add(total, at, share)
            if ranks.count > 1:
                coming = self._pass_on(total, owner)
        if coming is not None:
            total = _unpacked_pair(_message(coming), *total, k.shape[2])
        return total

    def _around(self, pair: Pair) -> Iterator[tuple[int, Pair]]:
        """Every rank's keys and values, this one's first; the next are under way meanwhile."""
        for step in range(self.ranks.count):
            owner = (self.own - step) % self.ranks.count
            last = step == self.ranks.count - 1
            coming = None if last else self._pass_on(pair, owner)
            yield owner, pair
            if coming is not None:
                before = (owner - 1) % self.ranks.count
                pair = _unpacked_pair(_message(coming), *pair, size(self.held[before]))

    def _pass_on(self, pair: Pair, owner: int) -> Arrivals:
        """Send what belongs to an owner to the next rank; receive what is one owner further."""
        count = self.ranks.count
        after, before = (self.own + 1) % count, (self.own - 1) % count
        expected = size(self.held[(owner - 1) % count]) * _bytes(*pair)
        sends = {after: packed(*pair)}
        return self.ranks.exchange(sends, {before: expected}, pair[0].device)


def within_part(ranges: Ranges, held: Ranges) -> Ranges:
    """Ranges of the whole sequence as ranges of a rank's part, which holds all of them.

    >>> within_part(((6, 7), (10, 12)), ((5, 8), (10, 14)))
    ((1, 2), (3, 5))
    """
    found, at = [], 0
    for first, last in held:
        found += [(at + i - first, at + j - first) for i, j in common(ranges, ((first, last),))]
        at += last - first
    return tuple(found)


def _bytes(k: Tensor, v: Tensor) -> int:
    """The bytes of one key and value, of all heads and batch entries."""
    each: int = k.shape[0] * k.shape[1] * (k.shape[3] * k.itemsize + v.shape[3] * v.itemsize)
    return each


def _widened(x: Tensor) -> Tensor:
    return x[:, :, :0].to(torch.promote_types(x.dtype, torch.float32))


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _unpacked_pair(message: Tensor, k: Tensor, v: Tensor, count: int) -> Pair:
    """Keys and values like these, `count` of them, from their bytes."""
    shapes = [((*x.shape[:2], count, x.shape[3]), x.dtype) for x in (k, v)]
    keys, values = unpacked(message, *shapes)
    return keys, values


def _message(coming: Arrivals) -> Tensor:
    """The one message that was expected, empty if it had no bytes."""
    found = list(coming.take().values())
    return found[0] if found else torch.empty(0, dtype=torch.uint8, device=coming.device)


def _joined(runs: list[KeyRun]) -> KeyRun:
    if len(runs) == 1:
        return runs[0]
    k, v = torch.cat([run.k for run in runs], 2), torch.cat([run.v for run in runs], 2)
    return KeyRun(runs[0].first, runs[-1].last, k, v)


def _add(total: Pair, ranges: Ranges, share: Pair) -> None:
    """Add gradients at these ranges of a part."""
    for whole, part in zip(total, share, strict=True):
        at = 0
        for first, last in ranges:
            whole[:, :, first:last] += part[:, :, at : at + last - first]
            at += last - first
