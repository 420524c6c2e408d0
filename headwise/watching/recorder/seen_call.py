"""One attention call that was seen: its statistics, and what its map needs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headwise.bias import ALiBi, Bias, RelativeBuckets, Sum, plus
from headwise.core.intervals import Mask
from headwise.core.mask_parts import PartOfMask
from headwise.core.mask_reading import TracedDense
from headwise.core.observation import Observation
from headwise.core.place import Place
from headwise.core.versions import Versions, may_be_overwritten
from headwise.distributed.head_options import options_of_part
from headwise.handover import SplitCalls
from headwise.nn.call import Call
from headwise.score import Additive, Cosine, Dot, General, Score

Kind = Literal["self", "cross", "window"]
"""A "window" has rows of one sequence, each with keys of its own."""


NOTHING = (None,) * 6  # tensors of a call


@dataclass(frozen=True)
class SeenCall:
    """One call: the prompt, or the tokens of one step while generating."""

    batch: int
    queries: int
    start: int  # the position of the first query: how many keys came before it
    observation: Observation | None  # its rows; None if no maps were wanted
    padding: Tensor | None  # (B, N) bool: rows that are padding
    call: Call | None  # what a map needs; None if no maps were wanted
    lse: Tensor | None  # (B, Hq, N), if every row was looked at
    not_linear: str | None = None  # why its logits are more than queries times keys
    keys: int = 0  # how many it saw
    newest: Tensor | None = None  # (B, Hkv, D): the key of its last query, if keys are known
    address: int = 0  # of its keys: the same keys again have the same address
    alike: Tensor | None = None  # True if it saw the keys of the call before; None if that is known
    kept: Versions | None = None  # the tensors that its map is made of
    split: tuple[SplitCalls, Call] | None = None
    """The call of this rank's part of a split sequence, and who makes its map with the others."""

    @property
    def lost(self) -> bool:
        """True if something that the map needs was written over."""
        return self.kept is not None and self.kept.modified() is not None

    def keeping(self, call: Call) -> SeenCall:
        """The same with this call, and a note of what its tensors hold."""
        return replace(self, call=call, kept=versions_of(call))

    def after(self, before: SeenCall) -> tuple[SeenCall, SeenCall]:
        """The call before and this one, which looks at the same other sequence: it is kept once.

        That the keys are the same is read when somebody asks for the map; a GPU need not wait.
        """
        if before.call is None or self.call is None:
            return before, self
        old, new = before.call.k, self.call.k
        alike = None if lie_together(old, new) else (old == new).all()
        return before.keeping(before.call._replace(k=new)), replace(self, alike=alike)

    def with_own_keys(self, first: bool) -> SeenCall:
        """The same with the keys of its own rows only: the next call holds the others too."""
        assert self.call is not None
        k = self.call.k[:, :, 0 if first else self.start : self.start + self.queries]
        return self.keeping(self.call._replace(k=k.clone()))

    def emptied(self) -> SeenCall:
        """The same without tensors: where the call stood, and how its logits were made."""
        held = (self.observation, self.padding, self.call, self.lse, self.newest, self.alike)
        if held == NOTHING and self.kept is None and self.split is None:
            return self
        return replace(
            self, observation=None, padding=None, call=None, lse=None, newest=None, alike=None,
            kept=None, split=None,
        )  # fmt: skip

    def cut(self, queries: int) -> SeenCall:
        """The first rows, without a map: the tokens after them were taken back."""
        if queries >= self.queries:
            return self
        return replace(
            self,
            queries=queries,
            observation=None if self.observation is None else _cut(self.observation, queries),
            padding=None if self.padding is None else self.padding[:, :queries],
            call=None,
            lse=None,
            kept=None,
        )


def _cut(seen: Observation, queries: int) -> Observation:
    """The first rows of an observation."""
    kept = queries if seen.rows is None else int((seen.rows < queries).sum())
    values = {name: value[:, :, :kept] for name, value in seen.values.items()}
    rows = None if seen.rows is None else seen.rows[:kept]
    return Observation(values, seen.highest[:, :, :kept], rows)


def versions_of(call: Call) -> Versions:
    """A note of what a call's tensors hold, to know whether they were written over."""
    return Versions({str(number): x for number, x in enumerate(tensors_of(tuple(call)))})


def owned(call: Call) -> Call:
    """The call with copies of what its model may write over: a cache's keys and parameters.

    A projection is fresh memory, which nobody writes to again: it is kept as it is.
    """
    q, k = (x.clone() if may_be_overwritten(x) else x for x in (call.q, call.k))
    sinks = None if call.sinks is None else _copy(call.sinks)
    own = call.changed(score=_score(call.score), bias=_bias(call.bias), sinks=sinks)
    return own._replace(q=q, k=k)


def of_head(call: Call, entries: range, head: int) -> Call:
    """A call of some batch entries and one query head; its mask stays as it is.

    The call may be a part of a sequence, to whose whole the mask refers.
    """
    part = slice(entries.start, entries.stop)
    key_head = head // (call.q.shape[1] // call.k.shape[1])
    options = call.given._replace(mask=None, dropout=0.0)
    own = range(head, head + 1)
    options = options_of_part(Place.of(call.q, call.k), entries, own, options)
    if call.mask is not None:
        mask = PartOfMask(call.mask, entries, own, len(call.q), call.q.shape[1])
        options = options._replace(mask=mask)
    q, k, v = call.q[part, head : head + 1], call.k[part, key_head : key_head + 1], call.v
    return Call(q, k, v[part, key_head : key_head + 1], options)


def first_position(call: Call) -> int:
    """Where the first query stands among the keys: how many tokens came before it."""
    place = Place.of(call.q, call.k)
    if call.mask is None or place.queries == place.keys:
        return max(0, place.offset)
    stands = call.mask.alignment(place)
    if isinstance(stands, int):
        return max(0, stands)
    if call.mask.pieces:  # it stands beside the last key that it sees
        return max(0, max(int(last[..., 0].max()) for _, last in call.mask.intervals(place)) - 1)
    row = call.mask.to_dense(place)[:, :, 0].flatten(0, 1).any(0)  # (M,)
    return int(row.nonzero().max()) if row.any() else 0


def padding_rows(mask: Mask | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Rows that are padding, (B, N) bool: tokens that no row may look at, not even themselves.

    q (B, Hq, N, D) are the last N of the tokens of k (B, Hkv, M, D), unless the mask says where
    they stand. None if there is no padding.

    >>> import headwise as hw
    >>> x = torch.zeros(2, 1, 4, 8)
    >>> padding_rows(hw.mask.lengths([4, 3]), x, x).int()
    tensor([[0, 0, 0, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    if mask is None or mask.shows_itself:
        return None
    place = Place.of(q, k)
    shown = _shown_keys(mask, place)
    stands = mask.alignment(place)
    if isinstance(stands, Tensor):
        own = stands.reshape(-1, 1) + torch.arange(place.queries, device=shown.device)
        own = own.clamp(0, place.keys - 1).long().expand(q.shape[0], -1)
        return ~shown.expand(q.shape[0], -1).gather(1, own)
    first = place.offset if stands is None else stands
    return ~shown[:, first : first + place.queries].expand(q.shape[0], -1)


def why_not_linear(call: Call) -> str | None:
    """The reason why a logit is more than queries times keys times a number; None if it is not."""
    score, _, bias, softcap, *_ = call.given
    if softcap is not None:
        return f"its logits are capped at {softcap:g}"
    if not isinstance(score, Dot | General | None):
        return f"a {type(score).__name__.lower()} score is not proportional to its weights"
    if isinstance(bias, Tensor | Sum):
        return "its logits are written out, or a tensor is added to them"
    return None if bias is None else f"{type(bias).__name__} is added to its logits"


def kind_of(name: str) -> Kind:
    """The kind of attention that a module's name states."""
    last = name.lower().rsplit(".", 1)[-1]
    across = ("cross" in last, "encoder_attn" in last, "encdec" in last, "multihead_attn" in last)
    return "cross" if any(across) else "self"


def newest_key(call: Call, last: int) -> Tensor | None:
    """A copy of the key at this place, (B, Hkv, D), to know a cache by.

    None if keys stand for written-out logits, or have gradients: then they are of no cache.
    """
    if call.k.requires_grad or (isinstance(call.bias, Tensor) and call.k.shape[-1] == 1):
        return None
    return call.k[:, :, last].detach().clone() if 0 <= last < call.k.shape[2] else None


def address(x: Tensor) -> int:
    """Where a tensor lies in memory; 0 where PyTorch's transforms hide it."""
    try:
        return x.data_ptr()
    except RuntimeError:
        return 0


def lie_together(x: Tensor, y: Tensor) -> bool:
    """True if two tensors of one shape are the same place in memory."""
    where = address(x)
    return where != 0 and where == address(y) and x.stride() == y.stride()


def _shown_keys(mask: Mask, place: Place) -> Tensor:
    """The keys that some row may look at, (B|1, M) bool."""
    if isinstance(mask, TracedDense):
        return mask.shown.any(1)
    if mask.pieces == 0:
        dense = mask.to_dense(place)
        if dense.shape[-2:] != (place.queries, place.keys):
            dense = dense.expand(*dense.shape[:2], place.queries, place.keys)
        return dense.any(2).any(1)
    edges = torch.zeros(1, place.keys + 1, dtype=torch.int32, device=place.device)
    for first, last in mask.intervals(place):
        first, last = (x.clamp(0, place.keys) for x in torch.broadcast_tensors(first, last))
        first, last = (x.reshape(-1, *x.shape[-2:]).flatten(1) for x in (first, last))
        full = last > first
        # +1 where an interval opens, -1 where it closes: a running sum counts those that are open
        marks = torch.zeros(first.shape[0], place.keys + 1, dtype=torch.int32, device=place.device)
        marks.scatter_add_(1, first.long(), full.int())
        marks.scatter_add_(1, last.long(), -full.int())
        edges = edges + marks
    return edges.cumsum(1)[:, :-1] > 0


def tensors_of(x: object) -> Iterator[Tensor]:
    """The tensors that a call is made of, those of its score, bias and mask included."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, tuple | list):
        for part in x:
            yield from tensors_of(part)
    elif is_dataclass(x):
        for part in fields(x):
            yield from tensors_of(getattr(x, part.name))


def _score(score: Score) -> Score:
    if isinstance(score, Additive | General):
        return type(score)(_copy(score.weight))
    if isinstance(score, Cosine) and isinstance(score.temperature, Tensor):
        return Cosine(_copy(score.temperature))
    return score


def _bias(bias: Bias | None) -> Bias | None:
    if isinstance(bias, Sum):
        return plus(_bias(bias.distances), bias.tensor)
    if isinstance(bias, ALiBi):
        return ALiBi(_copy(bias.slopes))
    return replace(bias, table=_copy(bias.table)) if isinstance(bias, RelativeBuckets) else bias


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone()
