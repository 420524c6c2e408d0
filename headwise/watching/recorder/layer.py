"""One watched attention layer: its last pass row by row, its figures over all passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.api import attention_map
from headwise.core.observation import Observation
from headwise.maps.attention_map import AttentionMap
from headwise.watching.recorder.board import Slot
from headwise.watching.recorder.held_call import HeldCall
from headwise.watching.recorder.joined_calls import joined_call, joined_observation
from headwise.watching.recorder.seen_call import Kind, SeenCall, of_head, owned
from headwise.watching.table import Value

LARGEST = 1 << 24
"""A call whose logits are written out is kept for a map if it has no more weights than this."""


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
    late: Callable[[tuple[str, ...]], SeenCall | None] | None = field(default=None, repr=False)
    """The call that compiled code ran last, with these statistics; None if it ran none since."""
    width: int = 0  # of its queries; 0 if that is not known
    first_head: int = 0  # the number of its first head, if other ranks have the ones before
    share: tuple[int, int] | None = field(default=None, repr=False)
    """The number of its first head and that of all heads of the layer; None if that is unknown."""
    held: HeldCall | None = field(default=None, repr=False)  # the last call, for its effects
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

    def place(self, head: int) -> dict[str, Value]:
        """The columns that tell a row's head; `head` counts this rank's."""
        number = self.first_head + head
        return {"layer": self.number, "name": self.name, "kind": self.kind, "head": number}

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
        self.recorded, self.ended, self._ran = self.compiled, True, False
        self._calls = [part.emptied() if part.observation is None else part for part in self._calls]
