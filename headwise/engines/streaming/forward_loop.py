"""The streaming engine's forward: `Partial` and `merge` over the blocks of a problem."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.blocks import Unit
from headwise.core.partial import Moments, Partial, join_moments, merge
from headwise.core.problem import Terms
from headwise.core.row_sums import (
    DISTANCE,
    ENTROPY,
    LOG_TOTAL,
    MOMENTS,
    ROW_SUMS,
    WIDE,
    Block,
    RowResults,
    RowTotals,
    asked_sums,
)
from headwise.core.schedule import KEYS, Segment
from headwise.engines.streaming.loop import LOG2_E, NO_WEIGHT, Loop, Selection


def logit_moments(s: Tensor, seen: Tensor | None, room: Tensor) -> Moments:
    """Return each row's moments of visible logits in a block s (b, h, G, R, C), (b·h, G·R) each.

    `room` is working memory of s's size. Hidden logits may be -inf if `seen` has the shape of s.
    """
    if seen is None:
        count = s.new_full(s.shape[:-1], s.shape[-1])
        mean = s.mean(-1)
        spread = torch.sub(s, mean[..., None], out=room).square_().sum(-1)
    else:
        share = seen.to(s.dtype).expand(*seen.shape[:-1], s.shape[-1])
        count = share.sum(-1).expand(s.shape[:-1])
        s = s.masked_fill(~seen, 0) if seen.shape == s.shape else s
        mean = torch.mul(s, share, out=room).sum(-1) / count.clamp_min(1)
        spread = torch.sub(s, mean[..., None], out=room).mul_(share).square_().sum(-1)
    return Moments(*(x.flatten(2).flatten(0, 1) for x in (count, mean, spread)))


class KeyMoments:
    """Count, mean and scatter matrix of stretches of keys; k (heads, M, D)."""

    def __init__(self, k: Tensor) -> None:
        self.k = k
        self._known: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}

    def of_rows(self, keys: slice, q: Tensor) -> Moments:
        """The moments of q·k over keys that every row sees; q (heads, G·R, D)."""
        count, mean, scatter = self._stretch(keys.start, keys.stop)
        mean_logit = torch.bmm(q, mean[..., None])[..., 0]
        spread = (torch.bmm(q, scatter) * q).sum(-1)
        return Moments(torch.full_like(mean_logit, count), mean_logit, spread)

    def _stretch(self, first: int, last: int) -> tuple[int, Tensor, Tensor]:
        """Count, mean (heads, D), scatter (heads, D, D); long stretches from shorter ones."""
        if (first, last) in self._known:
            return self._known[first, last]
        cut = (last - 1) // KEYS * KEYS
        if cut <= first:
            k = self.k[:, first:last]
            mean = k.mean(1)
            centred = k - mean[:, None]
            found = last - first, mean, torch.bmm(centred.transpose(1, 2), centred)
        else:
            found = _join_keys(self._stretch(first, cut), self._stretch(cut, last))
        self._known[first, last] = found
        return found


def _join_keys(
    a: tuple[int, Tensor, Tensor], b: tuple[int, Tensor, Tensor]
) -> tuple[int, Tensor, Tensor]:
    """Join count, mean and scatter by Chan's formula for vectors."""
    count = a[0] + b[0]
    gap = b[1] - a[1]
    outer = gap[:, :, None] * gap[:, None, :]
    return count, a[1] + gap * (b[0] / count), a[2] + b[2] + outer * (a[0] * b[0] / count)


HEADROOM = 20.0  # how far a logit may rise above its base: exp(20) is far from overflow


class Forward(Loop):
    """Output and statistics of every row.

    Each block of rows writes its sums into a table, and all are divided at once at the end.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        wants: int,
        selection: Selection | None = None,
    ) -> None:
        super().__init__(q, k, v, terms, selection)
        self.wants, self.dtype = wants, self.blocks.wide if wants & WIDE else q.dtype
        self.sums = asked_sums(wants)
        lines = 3 + len(self.sums) + 3 * bool(wants & MOMENTS)  # base, maximum, total, and these
        self.table = self.nothing.new_zeros(lines, *q.shape[:-1])
        self.table[1] = -torch.inf
        # With sinks the division comes at the end, and until then needs full precision.
        dtype = self.dtype if terms.sinks is None else self.blocks.wide
        self.out = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=dtype)
        shape = (self.blocks.heads, self.blocks.group)
        self.places = self.table.unflatten(2, shape), self.out.unflatten(1, shape)
        self.numbers = torch.arange(k.shape[2], device=k.device, dtype=self.blocks.wide)
        self.key_moments = KeyMoments(self.k)

    def enter(self, unit: Unit) -> None:
        super().enter(unit)
        self.key_moments = KeyMoments(self.k)

    def run(self) -> RowResults:
        """Compute every row, unit by unit."""
        for unit, rows in self.row_blocks():
            seen = _Rows(self, unit, rows).run()
            self.keep(unit, rows, seen.part, seen.moments)
        return self.finish()

    def keep(self, unit: Unit, rows: slice, part: Partial | None, moments: Moments | None) -> None:
        """Write the weighted mean of the values of a block of rows, and its sums into the table."""
        out = self.places[1][unit.b0 : unit.b1, unit.h0 : unit.h1, :, rows]
        if part is None:  # no row sees a key, which is what the table starts with
            out.zero_()
            return
        share = part.total.clamp_min(torch.finfo(part.total.dtype).tiny).reciprocal_()
        torch.mul(part.values.view(out.shape), share.view(*out.shape[:-1], 1), out=out)
        sums = (part.base, part.maximum, part.total, *part.sums.values(), *(moments or ()))
        place = self.places[0][:, unit.b0 : unit.b1, unit.h0 : unit.h1, :, rows]
        place.copy_(torch.stack(sums).view(place.shape))

    def finish(self) -> RowResults:
        """Turn every row's sums into results."""
        base, maximum, total, *rest = self.table
        sums = dict(zip(self.sums, rest, strict=False))
        if "distance" in sums:
            sums["distance"] = sums["distance"] + total * self.from_origin()
        moments = None
        if self.wants & MOMENTS:  # results of their own, so that the table can go
            count, mean, spread = rest[-3:]
            moments = Moments(count.clone(), mean.clone(), spread)
        sinks = None if self.terms.sinks is None else self.terms.sinks.to(total.dtype)[:, None]
        part = Partial(base, maximum.clone(), total, self.out, sums, moments, sinks)
        out = self.out
        if sinks is not None:  # the keys' share of the total weight
            out = out.mul_((part.weight() * total)[..., None]).to(self.dtype)
        return part.results(out, bool(self.wants & LOG_TOTAL))

    def origin(self, row: int) -> int:
        """The key of the call from which a block of rows counts distances.

        It is near the rows, so that small distances stay exact.
        """
        return row + self.blocks.k.shape[2] - self.blocks.q.shape[3]

    def from_origin(self) -> Tensor:
        """The distance of each row from its block's origin, (B|1, 1, N)."""
        rows = torch.arange(self.blocks.q.shape[3], device=self.k.device)
        origin = self.origin(0) + rows // self.schedule.rows * self.schedule.rows
        return (self.terms.position - (self.terms.first_key + origin))[:, None]


class _Rows:
    """One block of rows and its sums over the keys visited so far."""

    def __init__(self, loop: Forward, unit: Unit, rows: slice) -> None:
        self.loop, self.unit, self.rows = loop, unit, rows
        self.q = loop.blocks.queries(unit, rows)
        numbers = loop.numbers
        self.steps = loop.origin(rows.start) - numbers if loop.wants & DISTANCE else numbers
        self.moments: Moments | None = None
        self.part: Partial | None = None
        self.limit: Tensor | None = None  # logits up to here can use the part's base

    def run(self) -> _Rows:
        """Visit every key that some row sees."""
        for segment in self.loop.schedule.segments(self.unit, self.rows):
            self.merge_segment(segment)
        return self

    def merge_segment(self, segment: Segment) -> None:
        """Merge the keys of a segment into the part."""
        loop, wants = self.loop, self.loop.wants
        s = loop.logits(self.unit, self.rows, segment, self.q)
        seen = loop.seen(self.unit, self.rows, segment, s)
        clean = loop.clean and seen is None
        if wants & MOMENTS:
            self.count_moments(segment, s, seen)
        loop.hide(self.unit, s, seen)
        maximum = s.amax(-1)
        part = self.part if self.shares(maximum) else None
        if part is not None:
            base = part.base
        else:
            base = maximum.clone() if clean else maximum.masked_fill(maximum == -torch.inf, 0)
        s.sub_(base[..., None]).mul_(LOG2_E)
        weight = torch.exp2(s, out=loop.buffer(1, s.shape))
        total = weight.sum(-1)
        if wants & ENTROPY and not clean:
            s = s.clamp_min_(NO_WEIGHT)
        tile = Block(weight, s, self.steps[segment.columns])
        sums = {name: ROW_SUMS[name].of_block(tile) for name in loop.sums}
        if loop.terms.seed is not None:
            kept = loop.blocks.keep(self.unit, self.rows, segment.columns)
            weight.mul_(kept).mul_(1 / (1 - loop.terms.dropout))
        v = loop.v[:, segment.columns]
        if part is not None:  # with the same base, merging is adding
            add(part, maximum, total, sums)
            part.values.baddbmm_(weight, v)
            return
        block = Partial(base, maximum, total, torch.bmm(weight, v), sums)
        if self.part is not None:
            block = merge(self.part, block)
        self.part, self.limit = block, None

    def shares(self, maximum: Tensor) -> bool:
        """True if a block can use the part's base: no logit is far above it."""
        part = self.part
        if part is None:
            return False
        if self.limit is None:  # a row that has seen no key has no base to share
            unseen = part.maximum == -torch.inf
            self.limit = (part.base + HEADROOM).masked_fill_(unseen, -torch.inf)
        return bool((maximum <= self.limit).all())

    def count_moments(self, segment: Segment, s: Tensor, seen: Tensor | None) -> None:
        """Update mean and variance of the logits, from the keys' moments if possible."""
        loop = self.loop
        stretch, width = segment.stretch, self.q.shape[-1]
        long = stretch.stop - stretch.start > 4 * width  # for fewer keys, their moments cost more
        if seen is not None or not long or not loop.terms.plain:
            five, room = (loop.blocks.five(self.unit, x) for x in (s, loop.buffer(1, s.shape)))
            if not loop.clean:  # a bias of -inf hides a key too
                open_keys = five != -torch.inf
                seen = open_keys if seen is None else seen & open_keys
            new = logit_moments(five, seen, room)
        elif segment.columns.start == stretch.start:  # once for the whole stretch
            new = loop.key_moments.of_rows(stretch, self.q)
        else:
            return
        self.moments = new if self.moments is None else join_moments(self.moments, new)


def add(part: Partial, maximum: Tensor, total: Tensor, sums: dict[str, Tensor]) -> None:
    """Add a block's sums to those of a part on the same base, in place."""
    torch.maximum(part.maximum, maximum, out=part.maximum)
    part.total.add_(total)
    for name, x in sums.items():
        part.sums[name].add_(x)


def row_totals(q: Tensor, k: Tensor, terms: Terms) -> RowTotals:
    """The totals that turn logits into weights: a pass over the keys without values."""
    terms = terms._replace(seed=None, dropout=0.0)
    return Forward(q, k, k[..., :0], terms, LOG_TOTAL).run().totals()
