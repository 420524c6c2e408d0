"""The blocks of a problem: units of heads, blocks of rows, and the keys that their rows can see.

Keys that no row of a block sees are skipped, and keys that all of its rows see need no mask; only
the edges in between do. Keys that no row of the call sees may hold anything, and are never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.intervals import rows_per_key
from headwise.core.problem import Terms

ROWS, KEYS = 256, 1024  # rows and keys of a block of a large problem
BLOCK = 1 << 19  # elements of a block: two float32 buffers of 2 MiB stay in a core's cache
GPU_BLOCK = 1 << 24  # on a GPU, whose operations then take longer than to launch them
WINDOW_ROWS = 128  # fewer rows if they see short stretches, so that less is masked


@dataclass(frozen=True)
class Segment:
    """Some keys of a block: part of a stretch of keys that some or all of its rows see."""

    columns: slice
    stretch: slice
    masked: bool  # True if some row does not see some of the stretch


@dataclass(frozen=True)
class GroupedShape:
    """The sizes of a problem with its query heads grouped by key head."""

    batch: int
    heads: int  # key heads
    group: int  # query heads per key head
    queries: int
    keys: int


class Schedule:
    """The blocks of a problem. intervals (P, 2, B|1, Hq|1, N); if `dense`, all are masked."""

    def __init__(
        self, shape: GroupedShape, intervals: Tensor | None, dense: bool, on_gpu: bool = False
    ) -> None:
        self.shape, self.dense = shape, dense
        self.block = GPU_BLOCK if on_gpu else BLOCK
        reach = _reach(intervals, shape.keys)  # of the row that sees the most keys in one piece
        rows, group = WINDOW_ROWS if reach <= KEYS // 2 else ROWS, max(1, shape.group)
        self.rows = max(1, min(shape.queries, max(16, rows // group)))
        widest = max(1, min(shape.keys, reach + self.rows))
        self.keys = min(widest, max(KEYS, self.block // (4 * self.rows * group)))
        self.bounds: _Bounds | None = None
        if intervals is not None and intervals.numel():
            self.bounds = _Bounds(intervals, self.rows, shape.group)

    def units(self) -> Iterator[Unit]:
        """Units of heads whose blocks fit the budget; small batch entries share one."""
        shape = self.shape
        if not shape.group:  # no query heads
            return
        fit = max(1, self.block // (self.rows * shape.group * self.keys))
        heads = min(shape.heads, fit)
        entries = max(1, min(shape.batch, fit // shape.heads))
        for b in range(0, shape.batch, entries):
            for h in range(0, shape.heads, heads):
                yield Unit(b, min(b + entries, shape.batch), h, min(h + heads, shape.heads))

    def row_blocks(self) -> Iterator[slice]:
        """The query rows, block by block."""
        for row in range(0, self.shape.queries, self.rows):
            yield slice(row, min(row + self.rows, self.shape.queries))

    def segments(self, unit: Unit, rows: slice) -> Iterator[Segment]:
        """The keys that some row of the block sees, in segments of at most `keys`."""
        if self.bounds is None:
            stretches = [(0, self.shape.keys, self.dense)]
        else:
            stretches = self.bounds.stretches(unit, rows.start // self.rows)
        for first, last, masked in stretches:
            start = first
            while start < last:
                # Cut at multiples of the block, so that different rows meet the same stretches.
                stop = last if last - start <= self.keys else (start // self.keys + 1) * self.keys
                yield Segment(slice(start, stop), slice(first, last), masked)
                start = stop


class _Bounds:
    """For each block of rows and piece: the keys that some row sees, and those that all see."""

    def __init__(self, intervals: Tensor, rows: int, group: int) -> None:
        pieces, _, batch, heads, queries = intervals.shape
        blocks = -(-queries // rows)
        index = intervals.new_tensor(range(blocks * rows)).clamp_max_(queries - 1)
        blocked = intervals.index_select(-1, index).unflatten(-1, (blocks, rows))
        first, last = blocked[:, 0], blocked[:, 1]
        empty = first >= last
        far, near = int(intervals.max()) + 1, 0
        low = first.masked_fill(empty, far).amin(-1)
        high = last.masked_fill(empty, near).amax(-1)
        inner_low = first.amax(-1)
        inner_high = last.masked_fill(empty, near).amin(-1)
        table = [x.permute(1, 2, 3, 0).tolist() for x in (low, high, inner_low, inner_high)]
        self.low, self.high, self.inner_low, self.inner_high = table
        self.per_batch, self.per_head, self.group, self.pieces = batch > 1, heads > 1, group, pieces

    def stretches(self, unit: Unit, block: int) -> list[tuple[int, int, bool]]:
        """(first, last, masked) of disjoint stretches, in order."""
        batch = range(unit.b0, unit.b1) if self.per_batch else range(1)
        heads = range(unit.h0 * self.group, unit.h1 * self.group) if self.per_head else range(1)
        places = [(b, h) for b in batch for h in heads]
        found = []
        for piece in range(self.pieces):
            low = min(self.low[b][h][block][piece] for b, h in places)
            high = max(self.high[b][h][block][piece] for b, h in places)
            inner_low = max(self.inner_low[b][h][block][piece] for b, h in places)
            inner_high = min(self.inner_high[b][h][block][piece] for b, h in places)
            if low < high:
                found.append((low, high, inner_low, inner_high))
        found.sort()
        if len(found) == 2 and found[1][0] < found[0][1]:  # the pieces of different rows overlap
            return [(found[0][0], max(found[0][1], found[1][1]), True)]
        return [part for piece in found for part in _split(*piece, worth=KEYS // 2)]


def _split(
    low: int, high: int, inner_low: int, inner_high: int, worth: int
) -> list[tuple[int, int, bool]]:
    """A stretch as edge, middle that all rows see, edge; undivided if the middle is short."""
    if inner_high - inner_low < worth:
        return [(low, high, not low == inner_low < inner_high == high)]
    parts = [(low, inner_low, True), (inner_low, inner_high, False), (inner_high, high, True)]
    return [part for part in parts if part[0] < part[1]]


def _reach(intervals: Tensor | None, keys: int) -> int:
    """The length of the longest interval of any row."""
    if intervals is None or intervals.numel() == 0:
        return keys
    return int((intervals[:, 1] - intervals[:, 0]).max())


def hide_unseen(terms: Terms, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """k and v with zeros for keys that no row sees, if such keys share a block with visible ones.

    A weight of zero times NaN is NaN, and the unwritten part of a cache may hold NaN.
    """
    seen = seen_keys(terms, k)
    if seen is None or bool(seen.all()):
        return k, v
    used = used_stretch(seen)
    if terms.dense is None and bool(seen[..., used].all()):
        return k, v  # the schedule of an interval mask never reaches outside that stretch
    return k.masked_fill(~seen[..., None], 0), v.masked_fill(~seen[..., None], 0)


def used_stretch(seen: Tensor) -> slice:
    """The keys from the first to the last that any row sees; seen (B|1, Hkv|1, M)."""
    used = seen.flatten(0, 1).any(0).nonzero()
    return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)


def seen_keys(terms: Terms, k: Tensor) -> Tensor | None:
    """The keys that some row sees, bool (B|1, Hkv|1, M); None if there is no mask."""
    heads, keys = k.shape[1], k.shape[2]
    if terms.dense is not None:
        seen = terms.dense.any(-2).expand(-1, -1, keys)
    elif terms.intervals is not None:
        seen = rows_per_key(terms.intervals, keys) > 0
    else:
        return None
    if seen.shape[1] > 1:  # a key head serves a group of query heads
        seen = seen.unflatten(1, (heads, -1)).any(2)
    return seen
