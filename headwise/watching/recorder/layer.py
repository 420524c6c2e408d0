"""One watched attention layer: its last pass row by row, its figures over all passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import mask as masks
from headwise.api import attention_map
from headwise.bias import parts_of, plus
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.place import Place, as_four_axes
from headwise.maps.attention_map import AttentionMap
from headwise.nn.call import Call
from headwise.watching.recorder.board import Slot
from headwise.watching.recorder.held_call import HeldCall
from headwise.watching.recorder.seen_call import Kind, SeenCall, of_head, owned
from headwise.watching.table import Value


def joined_call(parts: list[SeenCall], calls: list[Call], across: bool, title: str) -> Call:
    """The calls of a pass as one, for its map: all of their queries against all keys.

    `parts` tell where each call stands in the pass; `across` is True if they look at another
    sequence. ValueError, with the layer's title, if the last call lacks keys that others saw.
    """
    if across and not all(part.alike is None or bool(part.alike) for part in parts):
        raise ValueError(
            f"the rows of {title} saw different keys: the sequence that it looks at changed while "
            "the model generated. Watch a single step to have its map"
        )
    last, end = calls[-1], parts[-1].start + parts[-1].queries
    before = [] if across else [call.k for call in calls[:-1]]
    begun = sum(k.shape[2] for k in before)
    k = torch.cat([*before, last.k[:, :, begun:end]], 2) if before else last.k
    if not across and not torch.equal(k, last.k[:, :, :end]):
        raise ValueError(
            f"the keys that earlier rows of {title} saw are gone: a cache forgot or rounded them, "
            "or beams changed places. Watch a pass over the whole text, or a single step, to have "
            "its map"
        )
    places = [
        Place.of(call.q, k) if across else _place_in_pass(call, part, k)
        for call, part in zip(calls, parts, strict=True)
    ]
    bias = last.bias
    tensors = [parts_of(call.bias)[1] for call in calls]
    if any(tensor is not None for tensor in tensors):  # an experiment may add one to some calls
        none = torch.zeros(1, device=k.device)
        given = [none if tensor is None else tensor for tensor in tensors]
        pairs = zip(given, places, strict=True)
        wide = [_widened(tensor, place, k.shape[2], 0.0) for tensor, place in pairs]
        shape = torch.broadcast_shapes(*(x.shape[:2] for x in wide))
        every = torch.cat([x.expand(*shape, -1, -1) for x in wide], 2)
        bias = plus(parts_of(bias)[0], every)
    mask = _joined_mask([call.mask for call in calls], places, k.shape[2])
    whole = last._replace(q=torch.cat([call.q for call in calls], 2), k=k)
    return whole.changed(mask=mask, bias=bias)


def joined_observation(seen: list[Observation], lengths: list[int]) -> Observation:
    """The statistics of all rows, from those of calls with so many rows each."""
    if len(seen) == 1:
        return seen[0]
    values = {name: torch.cat([x.values[name] for x in seen], 2) for name in seen[-1].values}
    rows = _joined_rows(seen, lengths)
    return Observation(values, torch.cat([x.highest for x in seen], 2), rows)


def _place_in_pass(call: Call, part: SeenCall, k: Tensor) -> Place:
    """The place of a call among the keys of the pass up to its own."""
    heads, keys = call.q.shape[1], part.start + part.queries
    return Place(len(k), heads, part.queries, keys, offset=part.start, device=k.device)


def _joined_mask(parts: list[Mask | None], places: list[Place], keys: int) -> Mask:
    """Each call's mask for its own rows; keys that came later stay hidden."""
    known = [
        (masks.lengths([place.keys] * place.batch) if mask is None else mask, place)
        for mask, place in zip(parts, places, strict=True)
    ]
    if any(mask.pieces == 0 for mask, _ in known):
        dense = [_widened(mask.to_dense(place), place, keys, False) for mask, place in known]
        return masks.dense(torch.cat(dense, 2))
    pieces = [mask.intervals(place) for mask, place in known]
    shape = torch.broadcast_shapes(*(x.shape[:-1] for part in pieces for x in part[0]))
    whole: Mask | None = None
    for number in range(max(map(len, pieces))):
        bounds = [part[number] if number < len(part) else None for part in pieces]
        first, last = (_joined_bounds(bounds, end, places, shape) for end in (0, 1))
        piece = masks.between(first, last)
        whole = piece if whole is None else whole | piece
    assert whole is not None
    return whole


def _joined_bounds(
    bounds: list[tuple[Tensor, Tensor] | None], end: int, places: list[Place], shape: torch.Size
) -> Tensor:
    """One end of an interval for the rows of all calls; a call without one sees nothing there."""
    found = []
    for bound, place in zip(bounds, places, strict=True):
        none = torch.zeros(1, dtype=torch.int32, device=place.device)
        edge = none if bound is None else bound[end].clamp(0, place.keys)
        found.append(edge.expand(*shape, place.queries))
    return torch.cat(found, -1)


def _widened(x: Tensor, place: Place, keys: int, fill: float) -> Tensor:
    """A (B|1, Hq|1, N|1, M|1) tensor with all rows, and columns for keys that came later."""
    x = as_four_axes(x)
    x = x.expand(*x.shape[:2], place.queries, max(place.keys, x.shape[3]))[..., : place.keys]
    return F.pad(x, (0, keys - place.keys), value=fill)


def _joined_rows(seen: list[Observation], lengths: list[int]) -> Tensor | None:
    """The rows of the pass that were looked at; None if all were."""
    if all(part.rows is None for part in seen):
        return None
    found, start = [], 0
    for part, queries in zip(seen, lengths, strict=True):
        rows = part.rows
        rows = torch.arange(queries, device=part.highest.device) if rows is None else rows
        found.append(rows + start)
        start += queries
    return torch.cat(found)


LARGEST = 1 << 24
"""A call whose logits are written out is kept for a map if it has no more weights than this."""


class LayerPlace(NamedTuple):
    """Where the heads of a layer are among those of the model."""

    number: int
    name: str
    kind: Kind
    first_head: int

    def of_head(self, head: int) -> dict[str, Value]:
        """The columns that tell a row's head; `head` counts this rank's."""
        number = self.first_head + head
        return {"layer": self.number, "name": self.name, "kind": self.kind, "head": number}


@dataclass
class WatchedLayer:
    """An attention layer of a watched model: its number in the order of execution, and its name.

    A pass is a forward of the whole model; while a model generates, the steps after the prompt add
    their rows to its pass.
    """

    number: int
    name: str
    kind: Kind
    heads: int
    sampled: bool = False  # its figures are of a sample of the rows, and named so
    stats: tuple[str, ...] = ()  # that are seen of it
    slot: Slot | None = field(default=None, repr=False)  # where its figures accumulate
    recorded: bool = False  # something of it was seen since the last step
    compiled: bool = False  # its rows are recorded by compiled code, which does not tell when
    replayed: bool = False  # or by CUDA graphs
    late: Callable[[tuple[str, ...]], SeenCall | None] | None = field(default=None, repr=False)
    """The call that compiled code ran last, with these statistics; None if it ran none since."""
    width: int = 0  # of its queries; 0 if that is not known
    first_head: int = 0  # the number of its first head, if other ranks have the ones before
    share: tuple[int, int] | None = field(default=None, repr=False)
    """The number of its first head and that of all heads of the layer; None if that is unknown."""
    held: HeldCall | None = field(default=None, repr=False)  # the last call, for its effects
    parts: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Which of the last call's first keys are of an image, a video or a text: (B, keys) bool."""
    ended: bool = False  # the next call begins a new pass, whatever it looks like
    _ran: bool = False  # in compiled code, since the last step
    _calls: list[SeenCall] = field(default_factory=list, repr=False)

    def adopt(self) -> None:
        """Take over the call that compiled code ran last: it is a pass of its own."""
        found = None if self.late is None else self.late(self.stats)
        if found is not None:
            self._calls, self.ended, self._ran = [found], False, True

    def has_run(self) -> bool:
        """True if compiled code ran it since the last step."""
        self.adopt()
        return self._ran

    def add(self, seen: SeenCall, continuing: bool) -> None:
        """Keep a call: as further rows of the last pass, or as a new one."""
        self.adopt()
        if not continuing:
            self._calls.clear()
        self.ended = False
        while self._calls and self.kind == "self" and self._calls[-1].start >= seen.start > 0:
            self._calls.pop()  # tokens that were taken back
        if self._calls and self.kind == "self":
            self._calls[-1] = self._calls[-1].cut(seen.start - self._calls[-1].start)
        seen = seen if seen.call is None else seen.keeping(owned(seen.call))
        if self._calls and self._calls[-1].call is not None and not self._calls[-1].lost:
            if self.kind == "cross":
                self._calls[-1], seen = seen.after(self._calls[-1])
            else:
                self._calls[-1] = self._calls[-1].with_own_keys(first=len(self._calls) == 1)
        self._calls.append(seen)

    @property
    def module(self) -> str:
        """The name of its module: a layer that runs at several depths has a number after it."""
        return self.name.partition("#")[0]

    @property
    def title(self) -> str:
        """Its name, for people: a model that is one layer has none."""
        return self.name or "the model"

    @property
    def prompted(self) -> bool:
        """True if the pass began with more than one token, as generating does."""
        self.adopt()
        return bool(self._calls) and self._calls[0].queries > 1

    @property
    def last(self) -> SeenCall | None:
        """The last call that was kept."""
        self.adopt()
        return self._calls[-1] if self._calls else None

    @property
    def length(self) -> int:
        """The number of query rows in the last pass."""
        self.adopt()
        return sum(part.queries for part in self._calls)

    @property
    def observation(self) -> Observation:
        """The statistics of the last pass, (B, Hq, N) each; ValueError if no rows were kept."""
        seen = self._rows_seen()
        return joined_observation(seen, [part.queries for part in self._calls])

    def _rows_seen(self) -> list[Observation]:
        self.adopt()
        seen = [part.observation for part in self._calls if part.observation is not None]
        if not seen or len(seen) < len(self._calls):
            raise ValueError(
                f"nothing of {self.title} is kept row by row: hw.watch(..., maps=True) keeps the "
                "rows of the last pass, and maps=False its figures only"
            )
        return seen

    @property
    def padding(self) -> Tensor | None:
        """The rows of the last pass that are padding, (B, N) bool; None if no row is."""
        batch = self._rows_seen()[0].highest
        if all(part.padding is None for part in self._calls):
            return None
        return torch.cat(
            [
                batch.new_zeros(batch.shape[0], part.queries, dtype=torch.bool)
                if part.padding is None
                else part.padding
                for part in self._calls
            ],
            1,
        )

    def map(self) -> AttentionMap:
        """The weights of the last pass, as a matrix (B, Hq, N, M) that is never stored."""
        self.adopt()
        calls = [part.call for part in self._calls if part.call is not None]
        if not calls or len(calls) < len(self._calls):
            raise ValueError(
                f"no map of {self.title} was kept: hw.watch(..., maps=True) keeps maps, except for "
                "a model that takes tokens back while it generates, for a sequence that is split "
                "between ranks, of which seen.map(layer, head) on every rank has maps, and for "
                f"attention that is written out and has more than {LARGEST:,} weights per call"
            )
        self._refuse_lost()
        sums = [part.lse for part in self._calls if part.lse is not None]
        lse = torch.cat(sums, 2) if len(sums) == len(calls) else None
        call = calls[0]
        if len(calls) > 1:
            call = joined_call(self._calls, calls, self.kind == "cross", self.title)
        return attention_map(call.q, call.k, **call.given.of_weights(), lse=lse)

    @property
    def split(self) -> bool:
        """True if its last pass was over a sequence that is split between ranks."""
        last = self.last
        return last is not None and last.split is not None

    def split_map(self, batch: int, head: int) -> AttentionMap:
        """The map of one head over the whole of a split sequence; every rank must ask for it."""
        last = self.last
        assert last is not None
        assert last.split is not None
        self._refuse_lost()
        calls, call = last.split
        lse = None if last.lse is None else last.lse[batch : batch + 1, head : head + 1]
        one = of_head(call, range(batch, batch + 1), head)
        return calls.attention_map(one.q, one.k, one.given, lse=lse)

    def _refuse_lost(self) -> None:
        if any(part.lost for part in self._calls):
            raise ValueError(
                f"the queries or keys of {self.title} were written over: the model computes in "
                "place, or a cache was used again. Read the map earlier, or copy the weights that "
                "you need"
            )

    def take_place(self, share: tuple[int, int] | None) -> None:
        """Number its heads as those of the whole layer: the first here, and all; None: unknown."""
        if share is not None:
            self.share, self.first_head = share, share[0]

    @property
    def total(self) -> int:
        """The number of heads of the whole layer, as far as this rank knows."""
        return max(self.heads, 0 if self.share is None else self.share[1])

    @property
    def own_place(self) -> LayerPlace:
        """Where its heads are among those of the model."""
        return LayerPlace(self.number, self.name, self.kind, self.first_head)

    def place(self, head: int) -> dict[str, Value]:
        """The columns that tell a row's head; `head` counts this rank's."""
        return self.own_place.of_head(head)

    def own_head(self, head: int) -> int:
        """The place of a head among this rank's, -1 being the last; ValueError if it has not it."""
        place = head - self.first_head if head >= 0 else head
        if not -self.heads <= place < self.heads or (head >= 0 and place < 0):
            first, last = self.first_head, self.first_head + self.heads - 1
            here = " on this rank" if self.total > self.heads else ""
            raise ValueError(
                f"there is no head {head} in layer {self.number} ({self.name}); its heads{here} "
                f"are {first} to {last}"
            )
        return place % self.heads

    def figures(self) -> dict[str, Tensor]:
        """One value per head, (Hq,), for each figure, over every pass since the last step."""
        if self.slot is None or not self.recorded:
            return {}
        columns = self.slot.board.columns
        return columns.figures(self.slot.read(), self.sampled, self.stats)

    def counted(self) -> Tensor:
        """The number of rows that the figures are of, (Hq,)."""
        if self.slot is None:
            raise ValueError(f"nothing of {self.title} is being recorded")
        return self.slot.read()[0]

    def close(self) -> None:
        """Note that a step has ended: the figures start anew, and the pass ends."""
        self.adopt()
        self.recorded, self.ended, self._ran = self.compiled or self.replayed, True, False
        self._calls = [part.emptied() if part.observation is None else part for part in self._calls]
