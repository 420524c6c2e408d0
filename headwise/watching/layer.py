"""What was seen of one attention layer: its last pass row by row, its figures over all passes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise import mask as masks
from headwise.api import attention_map
from headwise.core.intervals import Mask
from headwise.core.observation import Observation, Reduction
from headwise.core.place import Place, four
from headwise.core.versions import Versions
from headwise.maps.attention_map import AttentionMap
from headwise.nn.call import Call
from headwise.watching.kept_calls import noted, owned
from headwise.watching.table import Value

Kind = Literal["self", "cross"]

LARGEST = 1 << 24
"""So many weights a call may have where they are written out, to be kept for a map."""

WITHIN = ("self_mass", "previous_mass", "distance")
"""Statistics that mean nothing where the tokens of one sequence look at another."""


@dataclass(frozen=True)
class Part:
    """One call: the prompt, or the tokens of one step while generating."""

    queries: int
    start: int  # the position of the first of them: how many keys came before
    observation: Observation
    padding: Tensor | None  # (B, N) bool: rows that are padding
    call: Call | None  # what a map needs; None: no maps were wanted
    lse: Tensor | None  # (B, Hq, N), where every row was looked at
    bent: str | None = None  # why its logits are more than queries times keys
    keys: int = 0  # where its keys lie: the same ones again are the same memory
    kept: Versions | None = None  # what its map is made of

    @property
    def lost(self) -> bool:
        """Whether something that a map needs was written over."""
        return self.kept is not None and self.kept.modified() is not None


@dataclass
class Layer:
    """An attention layer of a watched model, by its number in the order of execution and its name.

    A pass is a forward of the whole model; while a model generates, the steps after the prompt add
    their rows to its pass.
    """

    number: int
    name: str
    kind: Kind
    heads: int
    sampled: bool = False  # its figures are of a sample of the rows, and named so
    ended: bool = False  # the next call begins a new pass, whatever it looks like
    _parts: list[Part] = field(default_factory=list, repr=False)
    _reduction: Reduction | None = field(default=None, repr=False)

    def add(self, part: Part, continuing: bool) -> None:
        """Keep a call: as further rows of the last pass, or as a new one."""
        if not continuing:
            self._parts.clear()
        self.ended = False
        while self._parts and self.kind == "self" and self._parts[-1].start >= part.start > 0:
            self._parts.pop()  # tokens that were taken back
        if self._parts and self.kind == "self":
            self._parts[-1] = _cut(self._parts[-1], part.start - self._parts[-1].start)
        if self._parts and self._parts[-1].call is not None and not self._parts[-1].lost:
            self._parts[-1] = _own_keys(self._parts[-1], first=len(self._parts) == 1)
        self._parts.append(part if part.call is None else _keeping(part, owned(part.call)))
        found = Reduction.of(part.observation, part.padding)
        found = replace(found, sampled=found.sampled or self.sampled)
        self._reduction = found if self._reduction is None else self._reduction + found

    @property
    def title(self) -> str:
        """Its name, for people: a model that is one layer has none."""
        return self.name or "the model"

    @property
    def prompted(self) -> bool:
        """Whether the pass began with more than one token, as generating does."""
        return bool(self._parts) and self._parts[0].queries > 1

    @property
    def last(self) -> Part | None:
        """The last call that was kept."""
        return self._parts[-1] if self._parts else None

    @property
    def observation(self) -> Observation:
        """The statistics of the last pass, (B, Hq, N) each."""
        parts = self._parts
        if not parts:
            raise ValueError(f"nothing of {self.title} is kept row by row")
        if len(parts) == 1:
            return parts[0].observation
        seen = [part.observation for part in parts]
        values = {name: torch.cat([x.values[name] for x in seen], 2) for name in seen[-1].values}
        return Observation(values, torch.cat([x.highest for x in seen], 2), _rows(parts))

    @property
    def padding(self) -> Tensor | None:
        """Which rows of the last pass are padding, (B, N); None: no row is."""
        if all(part.padding is None for part in self._parts):
            return None
        batch = self._parts[0].observation.sees
        return torch.cat(
            [
                batch.new_zeros(batch.shape[0], part.queries)
                if part.padding is None
                else part.padding
                for part in self._parts
            ],
            1,
        )

    def map(self) -> AttentionMap:
        """The weights of the last pass, as a matrix (B, Hq, N, M) that is never stored."""
        calls = [part.call for part in self._parts if part.call is not None]
        if not calls or len(calls) < len(self._parts):
            raise ValueError(
                f"no map of {self.title} was kept: hw.watch(..., maps=True) keeps one, but for a "
                "model that takes tokens back while it generates, and for attention that is "
                f"written out and has more than {LARGEST:,} weights a call"
            )
        if any(part.lost for part in self._parts):
            raise ValueError(
                f"what {self.title} saw was written over: the model computes in place, or a cache "
                "was used again. Look at the map before, or copy the weights that you need"
            )
        sums = [part.lse for part in self._parts if part.lse is not None]
        lse = torch.cat(sums, 2) if len(sums) == len(calls) else None
        call = calls[0] if len(calls) == 1 else self._joined(calls)
        options = call.options()
        del options["dropout"], options["engine"]
        return attention_map(call.q, call.k, **options, lse=lse)

    def _joined(self, calls: list[Call]) -> Call:
        """The calls of a model that generates as one: all queries against all keys."""
        last, end = calls[-1], self._parts[-1].start + self._parts[-1].queries
        across = self.kind == "cross"
        before = [] if across else [call.k for call in calls[:-1]]
        begun = sum(k.shape[2] for k in before)
        k = torch.cat([*before, last.k[:, :, begun:end]], 2) if before else last.k
        if not across and not torch.equal(k, last.k[:, :, :end]):
            raise ValueError(
                f"the keys that earlier rows of {self.title} saw are gone: a cache forgot them, or "
                "beams changed places. Watch a pass over the whole text to have its map"
            )
        places = [
            Place(*_sizes(call.q), part.start + part.queries, offset=part.start, device=k.device)
            if not across
            else Place.of(call.q, k)
            for call, part in zip(calls, self._parts, strict=True)
        ]
        bias = last.bias
        if isinstance(bias, Tensor):
            found = zip([_tensor(call.bias) for call in calls], places, strict=True)
            bias = torch.cat([_wide(*pair, k.shape[2], 0.0) for pair in found], 2)
        mask = _joined_mask([call.mask for call in calls], places, k.shape[2])
        return last._replace(q=torch.cat([call.q for call in calls], 2), k=k, mask=mask, bias=bias)

    def place(self, head: int) -> dict[str, Value]:
        """The columns of a table that say which head a row is of."""
        return {"layer": self.number, "name": self.name, "kind": self.kind, "head": head}

    def figures(self) -> dict[str, Tensor]:
        """A figure a head, (Hq,), over every pass since the last step."""
        return {} if self._reduction is None else self._reduction.figures()

    def close(self) -> None:
        """Start the figures anew, and end the pass."""
        self._reduction, self.ended = None, True


def _joined_mask(parts: list[Mask | None], places: list[Place], keys: int) -> Mask:
    """Each call's mask for its own rows; keys that came later stay hidden."""
    known = [
        (masks.lengths([place.keys] * place.batch) if mask is None else mask, place)
        for mask, place in zip(parts, places, strict=True)
    ]
    if any(mask.pieces == 0 for mask, _ in known):
        dense = [_wide(mask.to_dense(place), place, keys, False) for mask, place in known]
        return masks.dense(torch.cat(dense, 2))
    pieces = [mask.intervals(place) for mask, place in known]
    shape = torch.broadcast_shapes(*(x.shape[:-1] for part in pieces for x in part[0]))
    whole: Mask | None = None
    for number in range(max(map(len, pieces))):
        bounds = [part[number] if number < len(part) else None for part in pieces]
        first, last = (_stretched(bounds, end, places, shape) for end in (0, 1))
        piece = masks.between(first, last)
        whole = piece if whole is None else whole | piece
    assert whole is not None
    return whole


def _stretched(
    bounds: list[tuple[Tensor, Tensor] | None], end: int, places: list[Place], shape: torch.Size
) -> Tensor:
    """One end of an interval for the rows of all calls; nothing is seen where a call has none."""
    found = []
    for bound, place in zip(bounds, places, strict=True):
        none = torch.zeros(1, dtype=torch.int32, device=place.device)
        edge = none if bound is None else bound[end].clamp(0, place.keys)
        found.append(edge.expand(*shape, place.queries))
    return torch.cat(found, -1)


def _tensor(bias: object) -> Tensor:
    assert isinstance(bias, Tensor)  # a layer's bias does not change its kind from call to call
    return bias


def _wide(x: Tensor, place: Place, keys: int, fill: float) -> Tensor:
    """A (B|1, Hq|1, N|1, M|1) tensor with all rows, and columns for keys that came later."""
    x = four(x)
    x = x.expand(*x.shape[:2], place.queries, max(place.keys, x.shape[3]))[..., : place.keys]
    return F.pad(x, (0, keys - place.keys), value=fill)


def _cut(part: Part, queries: int) -> Part:
    """The first rows of a part, without a map: those after them were taken back."""
    if queries >= part.queries:
        return part
    seen = part.observation
    kept = queries if seen.rows is None else int((seen.rows < queries).sum())
    values = {name: value[:, :, :kept] for name, value in seen.values.items()}
    rows = None if seen.rows is None else seen.rows[:kept]
    return replace(
        part,
        queries=queries,
        observation=Observation(values, seen.highest[:, :, :kept], rows),
        padding=None if part.padding is None else part.padding[:, :queries],
        call=None,
        lse=None,
        kept=None,
    )


def _own_keys(part: Part, first: bool) -> Part:
    """A part that keeps the keys of its own rows only: the next one's hold the others too."""
    assert part.call is not None
    k = part.call.k[:, :, 0 if first else part.start : part.start + part.queries]
    return _keeping(part, part.call._replace(k=k.clone()))


def _keeping(part: Part, call: Call) -> Part:
    """A part with this call, and a note of what its tensors hold."""
    return replace(part, call=call, kept=noted(call))


def _sizes(q: Tensor) -> tuple[int, int, int]:
    batch, heads, queries, _ = q.shape
    return batch, heads, queries


def _rows(parts: list[Part]) -> Tensor | None:
    """Which rows of the pass were looked at; None: all of them."""
    if all(part.observation.rows is None for part in parts):
        return None
    found, start = [], 0
    for part in parts:
        rows = part.observation.rows
        device = part.observation.sees.device
        rows = torch.arange(part.queries, device=device) if rows is None else rows
        found.append(rows + start)
        start += part.queries
    return torch.cat(found)
