"""The keys of a block that a policy keeps, for the streaming loops of outputs, gradients and maps.

Before a loop, `select` finds what tells a row's kept keys from the others: a logit, a few blocks or
keys, one set per head, or a distance. That takes memory linear in the length; the loop then asks
for one block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.policies import Blocks, Evicted, Indices, Policy, TopK, Window, per_head
from headwise.core.problem import Terms
from headwise.core.schedule import Segment, seen_keys
from headwise.engines.streaming.forward_loop import row_totals
from headwise.engines.streaming.loop import Loop, Selection


@dataclass(frozen=True, eq=False)
class Above(Selection):
    """Keys with a logit of at least `least`; of those below `above`, up to key `last`."""

    least: Tensor  # (B, Hq, N)
    above: Tensor  # (B, Hq, N)
    last: Tensor  # (B, Hq, N) int32
    tied: bool  # some row has more equal keys than room

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        least = _of_rows(loop, unit, rows, self.least)
        kept = (s < least).logical_not_()  # NaN stays, so that its row is NaN
        if self.tied:
            above, last = (_of_rows(loop, unit, rows, x) for x in (self.above, self.last))
            kept &= ((s < above) & (loop.blocks.columns[columns] > last)).logical_not_()
        return kept


@dataclass(frozen=True, eq=False)
class Chosen(Selection):
    """Some blocks of `size` keys for each row."""

    numbers: Tensor  # (B|1, Hq|1, N, count): of the blocks; -1 for none
    size: int

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        numbers = unit.of(loop.blocks.grouped(self.numbers))[..., rows, :].long()
        first, last = columns.start // self.size, -(-columns.stop // self.size)
        place = numbers - first
        place = place.masked_fill_((place < 0) | (numbers >= last), last - first)
        flags = s.new_zeros(*place.shape[:-1], last - first + 1, dtype=torch.bool)
        flags = flags.scatter_(-1, place, True)[..., :-1]
        if self.size == 1:
            return flags
        return flags[..., (loop.blocks.columns[columns] // self.size - first).long()]


@dataclass(frozen=True, eq=False)
class Columns(Selection):
    """The same keys for every row of a head."""

    some: Tensor  # (B|1, Hkv|Hq|1, M') bool; keys after M' are kept

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        some, blocks = self.some, loop.blocks
        queries = some.shape[1] == blocks.heads * blocks.group
        some = unit.of(blocks.grouped(some) if queries else some[:, :, None])[..., columns]
        some = torch.nn.functional.pad(some, (0, s.shape[-1] - some.shape[-1]), value=True)
        return some[..., None, :]


@dataclass(frozen=True, eq=False)
class Joint(Selection):
    """The keys that both of two selections keep."""

    a: Selection
    b: Selection

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        return self.a.kept(loop, unit, rows, columns, s) & self.b.kept(loop, unit, rows, columns, s)


@dataclass(frozen=True, eq=False)
class Band(Selection):
    """The keys from `left` before a row's own up to its own, and the first `sinks`."""

    left: int
    sinks: int

    def kept(self, loop: Loop, unit: Unit, rows: slice, columns: slice, s: Tensor) -> Tensor:
        distance = loop.blocks.distance(unit, rows, columns)
        first = loop.blocks.columns[columns] + loop.terms.first_key < self.sinks
        return ((distance >= 0) & (distance <= self.left)) | first


def select(policy: Policy, q: Tensor, k: Tensor, terms: Terms) -> Selection:
    """What a policy keeps in a call. q (B, Hq, N, D), k (B, Hkv, M, D)."""
    if isinstance(policy, Window):
        return Band(policy.left, policy.sinks)
    if isinstance(policy, Indices):
        return Chosen(policy.keys.to(k.device), 1)
    if isinstance(policy, Evicted):
        return Columns(policy.kept().to(k.device))
    if isinstance(policy, TopK):
        return largest(per_head(policy.k, q.device), q, k, terms)
    return BestBlocks(policy, q, k, terms).found()


def largest(count: Tensor, q: Tensor, k: Tensor, terms: Terms) -> Above:
    """The keys with the largest logits of each row; count (1,), (Hq,) or (B, Hq, N), at least 1."""
    return _Largest(count, q, k, terms).found()


class Rows:
    """Some rows of a unit of heads, and the logits of their keys, block by block."""

    def __init__(self, loop: Loop, unit: Unit, rows: slice) -> None:
        self.loop, self.unit, self.rows = loop, unit, rows
        self.q = loop.blocks.queries(unit, rows)
        self.shape = (
            unit.b1 - unit.b0,
            unit.h1 - unit.h0,
            loop.blocks.group,
            rows.stop - rows.start,
        )

    def blocks(self) -> Iterator[tuple[Segment, Tensor]]:
        """Every block of keys in order, and its logits (b, h, G, R, C), -inf where hidden."""
        loop, unit = self.loop, self.unit
        for segment in loop.schedule.segments(unit, self.rows):
            s = loop.logits(unit, self.rows, segment, self.q)
            loop.hide(unit, s, loop.seen(unit, self.rows, segment, s))
            yield segment, loop.blocks.five(unit, s)

    def of_heads(self, numbers: Tensor) -> Tensor:
        """Numbers (1,), (Hq,) or (B, Hq, N) as (b|1, h|1, G|1, R|1)."""
        if numbers.ndim == 3:
            return self.unit.of(self.loop.blocks.grouped(numbers))[..., self.rows]
        if len(numbers) == 1:
            return numbers.reshape(1, 1, 1, 1)
        blocks, unit = self.loop.blocks, self.unit
        heads: Tensor = numbers.unflatten(0, (blocks.heads, blocks.group))
        return heads[None, unit.h0 : unit.h1, :, None]

    def put(self, target: Tensor, found: Tensor) -> None:
        """Write (b, h, G, R, ...) into a (B, Hq, N, ...) tensor."""
        unit = self.unit
        five = self.loop.blocks.grouped(target)
        five[unit.b0 : unit.b1, unit.h0 : unit.h1, :, self.rows] = found


class _Choice:
    """A loop over all rows of a call that finds what a policy keeps."""

    def __init__(self, q: Tensor, k: Tensor, terms: Terms) -> None:
        self.loop = Loop(q, k, k[..., :0], terms)
        self.q, self.keys = q, k.shape[2]

    def row_blocks(self) -> Iterator[Rows]:
        for unit, rows in self.loop.row_blocks():
            yield Rows(self.loop, unit, rows)


class _Largest(_Choice):
    """The k-th largest logit of each row, and the last key that equals it and is kept."""

    def __init__(self, count: Tensor, q: Tensor, k: Tensor, terms: Terms) -> None:
        super().__init__(q, k, terms)
        self.k = count
        self.most = min(int(count.max()), self.keys) if count.numel() else 0
        self.least = q.new_full(q.shape[:3], -torch.inf, dtype=self.loop.blocks.wide)
        self.last = torch.full(q.shape[:3], self.keys, dtype=torch.int32, device=q.device)

    def found(self) -> Above:
        tied = False
        for rows in self.row_blocks():
            tied |= self.of_rows(rows)
        above = torch.nextafter(self.least, self.least.new_tensor(torch.inf))
        return Above(self.least, above, self.last, tied)

    def of_rows(self, rows: Rows) -> bool:
        """Find the bounds of some rows; True if one of them has more equal keys than room."""
        if not self.most:
            return False
        best = self.least.new_full((*rows.shape, self.most), -torch.inf)
        lost = torch.zeros(rows.shape, dtype=torch.int64, device=best.device)
        for _, s in rows.blocks():
            both = torch.cat((best, s), -1)
            before, best = best[..., -1], both.topk(self.most).values
            lost.masked_fill_(best[..., -1] > before, 0)  # of the keys that equal the last of best
            lost += (both >= best[..., -1:]).sum(-1) - self.most
        k = rows.of_heads(self.k)
        place = (k.clamp_max(self.most) - 1)[..., None].expand(*rows.shape, 1)
        least = best.gather(-1, place)[..., 0].masked_fill(k > self.most, -torch.inf)
        room = k - (best > least[..., None]).sum(-1)
        equal = (best == least[..., None]).sum(-1) + lost * (least == best[..., -1])
        crowded = (equal > room) & (least > -torch.inf)
        rows.put(self.least, least)
        if not bool(crowded.any()):
            return False
        last = torch.full(rows.shape, self.keys, dtype=torch.int32, device=best.device)
        met = torch.zeros_like(lost)
        for segment, s in rows.blocks():
            equals = s == least[..., None]
            number = equals.cumsum(-1) + met[..., None]
            filled, at = (equals & (number == room[..., None])).max(-1)
            here = filled & crowded
            last = torch.where(here, at.to(torch.int32) + segment.columns.start, last)
            met = number[..., -1]
        rows.put(self.last, last)
        return True


class BestBlocks(_Choice):
    """The blocks of keys that rank highest in each row."""

    def __init__(self, policy: Blocks, q: Tensor, k: Tensor, terms: Terms) -> None:
        super().__init__(q, k, terms)
        if terms.additive is not None and policy.by != "exact":
            raise ValueError(
                f"hw.sparse.Blocks(by={policy.by!r}) ranks blocks by a dot product, and this "
                "score is hw.Additive; use by='exact'"
            )
        self.by, self.size, self.terms = policy.by, policy.size, terms
        self.count = per_head(policy.count, q.device)
        self.blocks = -(-self.keys // policy.size)
        self.most = min(int(self.count.max()), self.blocks)
        if self.by == "exact":
            self.loop.divide_by(row_totals(q, k, terms))
        else:
            self.least, self.largest = self._summaries(k)

    def found(self) -> Chosen:
        shape = (*self.q.shape[:3], self.most)
        chosen = torch.full(shape, -1, dtype=torch.int32, device=self.q.device)
        for rows in self.row_blocks() if self.most else ():
            scores = self.masses(rows) if self.by == "exact" else self.estimates(rows)
            best, order = scores.sort(dim=-1, descending=True, stable=True)
            number = torch.arange(self.most, device=order.device)
            none = best[..., : self.most] == -torch.inf
            none |= number >= rows.of_heads(self.count)[..., None]
            rows.put(chosen, order[..., : self.most].masked_fill(none, -1).int())
        return Chosen(chosen, self.size)

    def estimates_of(self, rows: slice) -> Tensor:
        """The estimated scores of the blocks for some rows of all heads, (B, Hq, R, blocks)."""
        whole = Rows(self.loop, Unit(0, self.q.shape[0], 0, self.loop.blocks.heads), rows)
        return self.estimates(whole).expand(*whole.shape, -1).flatten(1, 2)

    def masses(self, rows: Rows) -> Tensor:
        """The weight of each block, (b, h, G, R, blocks)."""
        loop, unit = self.loop, rows.unit
        scores = self.q.new_zeros(*rows.shape, self.blocks, dtype=loop.blocks.wide)
        for segment, s in rows.blocks():
            flat = s.flatten(0, 1).flatten(1, 2)
            p = loop.blocks.five(unit, loop.log_weights(unit, rows.rows, flat).exp2_())
            scores.index_add_(-1, (loop.blocks.columns[segment.columns] // self.size).long(), p)
        return scores

    def estimates(self, rows: Rows) -> Tensor:
        """The scores of each block by its mean key, or by its smallest and largest keys."""
        loop, unit, q = self.loop, rows.unit, rows.q
        least, largest = unit.flat(self.least).mT, unit.flat(self.largest).mT
        if self.by == "mean":
            s = torch.bmm(q, least)
        else:
            s = torch.bmm(q.clamp_min(0), largest) + torch.bmm(q.clamp_max(0), least)
        s = loop.blocks.five(unit, s)
        s = s.masked_fill(~self.visible(rows), -torch.inf)
        own = unit.of(loop.blocks.position)[..., rows.rows, None] // self.size
        own = own == torch.arange(self.blocks, device=s.device)
        return s.masked_fill(own & (s != -torch.inf), torch.inf)

    def visible(self, rows: Rows) -> Tensor:
        """True for the blocks of which a row sees a key; broadcasts to (b, h, G, R, blocks)."""
        blocks, unit, terms = self.loop.blocks, rows.unit, self.terms
        first = torch.arange(self.blocks, device=self.q.device) * self.size
        if terms.dense is None and terms.bias is None and blocks.intervals is not None:
            shown = None
            for low, high in blocks.intervals.unflatten(0, (-1, 2)):
                low, high = (unit.of(x)[..., rows.rows, None] for x in (low, high))
                meets = (low < high) & (low < first + self.size) & (high > first)
                shown = meets if shown is None else shown | meets
            assert shown is not None
            return shown
        shown = blocks.visible(unit, rows.rows, slice(0, self.keys))
        if blocks.bias is not None:
            bias = unit.of(blocks.bias)
            bias = bias if bias.shape[-2] == 1 else bias[..., rows.rows, :]
            shown = bias != -torch.inf if shown is None else shown & (bias != -torch.inf)
        if shown is None:
            return torch.ones((), dtype=torch.bool, device=first.device)
        if shown.shape[-1] == 1:
            return shown
        spare = self.blocks * self.size - self.keys
        whole: Tensor = torch.nn.functional.pad(shown, (0, spare)).unflatten(-1, (-1, self.size))
        return whole.any(-1)

    def _summaries(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Smallest and largest key of each block, or twice its mean, (B, Hkv, blocks, D) each."""
        wide = self.loop.blocks.wide
        seen = seen_keys(self.terms, k)
        seen = seen.new_ones(()) if seen is not None and bool(seen.all()) else seen
        known = torch.ones(1, 1, self.keys, dtype=torch.bool, device=k.device)
        known = known if seen is None or seen.ndim == 0 else seen
        spare = self.blocks * self.size - self.keys
        known = torch.nn.functional.pad(known, (0, spare)).unflatten(-1, (-1, self.size))[..., None]
        keys = torch.nn.functional.pad(k.to(wide), (0, 0, 0, spare))
        keys = keys.unflatten(2, (self.blocks, self.size))  # (B, Hkv, blocks, size, D)
        if self.by == "mean":
            mean = keys.masked_fill(~known, 0).sum(3) / known.sum(3).clamp_min(1)
            return mean, mean
        least, largest = (
            cast(Tensor, keys.masked_fill(~known, bound)) for bound in (torch.inf, -torch.inf)
        )
        none = ~known.any(3)
        return least.amin(3).masked_fill(none, 0), largest.amax(3).masked_fill(none, 0)


def _of_rows(loop: Loop, unit: Unit, rows: slice, x: Tensor) -> Tensor:
    """A block's part of a (B, Hq, N) tensor, (b, h, G, R, 1)."""
    return unit.of(loop.blocks.grouped(x))[..., rows, None]
