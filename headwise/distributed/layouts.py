"""Layouts: the positions, or the heads, that each rank has, and how evenly they share the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.arguments import is_integer
from headwise.core.intervals import Mask
from headwise.core.place import Place
from headwise.core.problem import check_mask
from headwise.distributed.ranges import Range, Ranges, size, union

CHUNKS = 8  # pieces per rank from which `balanced` deals
EVEN = 1.05  # contiguous parts whose busiest rank is within this of the mean stay as they are


class Layout:
    """The positions of a sequence that each rank holds, in the order in which it holds them."""

    def pieces(self, length: int, ranks: int) -> tuple[Ranges, ...]:
        """The ranges of each rank for a sequence of this length."""
        raise NotImplementedError

    def of_lengths(self, lengths: Sequence[int]) -> tuple[Ranges, ...]:
        """The ranges of each rank if the ranks hold parts of these lengths; else ValueError."""
        found = self.pieces(sum(lengths), len(lengths))
        for rank, (have, ranges) in enumerate(zip(lengths, found, strict=True)):
            if have != size(ranges):
                raise ValueError(
                    f"rank {rank} holds {have} positions, and in the layout {self} of "
                    f"{sum(lengths)} positions over {len(lengths)} ranks it has {size(ranges)}; "
                    "hw.distributed.shard cuts a tensor that way"
                )
        return found


@dataclass(frozen=True)
class Contiguous(Layout):
    """One part per rank, in the order of the ranks."""

    def __str__(self) -> str:
        return "contiguous()"

    def pieces(self, length: int, ranks: int) -> tuple[Ranges, ...]:
        return tuple((part,) for part in equal_parts(length, ranks))

    def of_lengths(self, lengths: Sequence[int]) -> tuple[Ranges, ...]:
        ends = list(accumulate(lengths))  # any lengths: each part follows the one before
        return tuple(((end - n, end),) for n, end in zip(lengths, ends, strict=True))


@dataclass(frozen=True)
class HeadTail(Layout):
    """Rank r has the parts r and 2·ranks - 1 - r of 2·ranks parts."""

    def __str__(self) -> str:
        return "head_tail()"

    def pieces(self, length: int, ranks: int) -> tuple[Ranges, ...]:
        parts = equal_parts(length, 2 * ranks)
        return tuple((parts[r], parts[2 * ranks - 1 - r]) for r in range(ranks))


@dataclass(frozen=True, eq=False)
class Balanced(Layout):
    """Parts dealt so that the ranks have equally many rows and nearly as many visible pairs."""

    mask: Mask

    def __post_init__(self) -> None:
        check_mask(self.mask)

    def __str__(self) -> str:
        return f"balanced({self.mask!r})"

    def pieces(self, length: int, ranks: int) -> tuple[Ranges, ...]:
        try:
            work = visible_per_row(self.mask, length, length)
        except (RuntimeError, IndexError):
            raise ValueError(
                f"{self} was made for a mask of another length than {length}"
            ) from None
        plain = Contiguous().pieces(length, ranks)
        if imbalance([_work(work, ranges) for ranges in plain]) <= EVEN:
            return plain  # the layout that moves the fewest keys
        parts = equal_parts(length, CHUNKS * ranks)
        heaviest = sorted(parts, key=lambda part: -_work(work, (part,)))
        held: list[list[Range]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for part in heaviest:
            open_ranks = [rank for rank in range(ranks) if len(held[rank]) < CHUNKS]
            rank = min(open_ranks, key=lambda r: loads[r])
            held[rank].append(part)
            loads[rank] += _work(work, (part,))
        return tuple(union(ranges) for ranges in held)


def contiguous() -> Layout:
    """One part per rank, in order: the layout of `shard` unless another is given."""
    return Contiguous()


def head_tail() -> Layout:
    """An early and a late part per rank: under `causal()` all ranks have the same work.

    >>> [ranges for ranges in head_tail().pieces(8, 2)]
    [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    """
    return HeadTail()


def balanced(mask: Mask) -> Layout:
    """Parts dealt by the pairs that the mask shows: for documents, windows and padding.

    For self-attention, where a position is a row and a key. Contiguous parts stay where they are
    balanced already, because neighbours share keys.

    >>> import headwise as hw
    >>> documents = hw.mask.causal() & hw.mask.documents(torch.tensor([[0] * 48 + [1] * 16]))
    >>> pairs(documents, 64, 4), pairs(documents, 64, 4, balanced(documents))
    ([136, 392, 648, 136], [328, 328, 328, 328])
    """
    return Balanced(mask)


def pairs(
    mask: Mask | None,
    length: int,
    ranks: int,
    layout: Layout | None = None,
    keys: int | None = None,
) -> list[int]:
    """The visible pairs of each rank's rows, per head; summed over the mask's batch entries.

    >>> import headwise as hw
    >>> pairs(hw.mask.causal(), 8, 2), pairs(hw.mask.causal(), 8, 2, head_tail())
    ([10, 26], [18, 18])
    """
    if not is_integer(length) or not is_integer(ranks) or length < 0 or ranks < 1:
        raise ValueError(
            f"{length!r} positions over {ranks!r} ranks: give integers, 1 rank or more"
        )
    check_mask(mask)
    work = visible_per_row(mask, length, length if keys is None else keys)
    return [_work(work, ranges) for ranges in (layout or Contiguous()).pieces(length, ranks)]


def imbalance(work: Sequence[int]) -> float:
    """The work of the busiest rank, as a multiple of the mean.

    >>> imbalance([10, 26])
    1.4444444444444444
    """
    return max(work) * len(work) / sum(work) if sum(work) else 1.0


def visible_per_row(mask: Mask | None, queries: int, keys: int) -> Tensor:
    """The keys that each row sees, summed over the mask's batch entries and heads, int64 (N,)."""
    if mask is None:
        return torch.full((queries,), keys, dtype=torch.int64)
    place = Place(1, 1, queries, keys, offset=keys - queries)
    if mask.pieces == 0:
        seen = mask.to_dense(place).expand(-1, -1, queries, keys)
        return seen.sum((0, 1, 3))
    found = torch.zeros((1, 1, queries), dtype=torch.int64)
    for first, last in mask.intervals(place):
        first, last = first.long().clamp(0, keys), last.long().clamp(0, keys)
        found = found + (last - first).clamp_min(0)
    return found.sum((0, 1))


def equal_parts(length: int, parts: int) -> tuple[Range, ...]:
    """The sequence in consecutive parts, the first of which are one longer if they must be."""
    short, longer = divmod(length, parts)
    ends = list(accumulate([short + 1] * longer + [short] * (parts - longer)))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _work(work: Tensor, ranges: Ranges) -> int:
    return sum(int(work[first:last].sum()) for first, last in ranges)


class HeadShare(NamedTuple):
    """The query heads of one rank, and the key heads that they use."""

    queries: Range
    keys: Range


def head_shares(heads: int, kv_heads: int, ranks: int) -> tuple[HeadShare, ...]:
    """The heads of each rank, as equal as whole groups allow: a rank has whole groups or one part.

    With fewer key heads than ranks, several ranks use one key head.

    >>> [share.queries for share in head_shares(8, 8, 3)]
    [(0, 3), (3, 6), (6, 8)]
    >>> head_shares(6, 2, 4)[1:3]
    (HeadShare(queries=(2, 3), keys=(0, 1)), HeadShare(queries=(3, 5), keys=(1, 2)))
    """
    group = heads // kv_heads
    if kv_heads >= ranks:
        keys = equal_parts(kv_heads, ranks)
        return tuple(HeadShare((group * i, group * j), (i, j)) for i, j in keys)
    found = []
    for key, (first, last) in enumerate(equal_parts(ranks, kv_heads)):
        for i, j in equal_parts(group, last - first):
            queries = (key * group + i, key * group + j)
            found.append(HeadShare(queries, (key, key + (i < j))))
    return tuple(found)
