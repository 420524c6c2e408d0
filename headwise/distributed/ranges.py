"""Half-open ranges of positions: their union, what two have in common, and few for many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

Range = tuple[int, int]  # first <= position < last
Ranges = tuple[Range, ...]


def union(ranges: Iterable[Range]) -> Ranges:
    """The positions of all ranges, in order; neighbours become one range.

    >>> union([(6, 8), (0, 2), (2, 3), (7, 9), (4, 4)])
    ((0, 3), (6, 9))
    """
    found: list[Range] = []
    for first, last in sorted(r for r in ranges if r[0] < r[1]):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def common(a: Iterable[Range], b: Iterable[Range]) -> Ranges:
    """The positions that lie in both.

    >>> common([(0, 5), (8, 9)], [(3, 9)])
    ((3, 5), (8, 9))
    """
    b = tuple(b)
    cut = ((max(x, first), min(y, last)) for x, y in a for first, last in b)
    return union(cut)


def size(ranges: Iterable[Range]) -> int:
    """The number of positions in disjoint ranges."""
    return sum(last - first for first, last in ranges)


def at_most(ranges: Sequence[Range], count: int) -> Ranges:
    """At most `count` ranges that hold all of these: the smallest gaps are closed.

    >>> at_most([(0, 1), (2, 3), (9, 10)], 2)
    ((0, 3), (9, 10))
    """
    found = list(union(ranges))
    while len(found) > count:
        gaps = [found[i + 1][0] - found[i][1] for i in range(len(found) - 1)]
        i = gaps.index(min(gaps))
        found[i : i + 2] = [(found[i][0], found[i + 1][1])]
    return tuple(found)


def of_flags(flags: Tensor) -> Ranges:
    """The stretches of True of a bool tensor (M,).

    >>> of_flags(torch.tensor([True, True, False, True]))
    ((0, 2), (3, 4))
    """
    edges = torch.nn.functional.pad(flags.int(), (1, 1)).diff()
    firsts, lasts = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))


def positions(ranges: Iterable[Range], device: torch.device | str = "cpu") -> Tensor:
    """The positions of the ranges, one after the other, int64 (size,)."""
    parts = [torch.arange(first, last, device=device) for first, last in ranges]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def take_ranges(x: Tensor, dim: int, ranges: Iterable[Range]) -> Tensor:
    """The parts of a tensor at these ranges of an axis, one after the other."""
    parts = [x.narrow(dim, first, last - first) for first, last in ranges]
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0)
