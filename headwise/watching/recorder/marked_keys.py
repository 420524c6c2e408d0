"""The weight on tokens of one kind, such as those of images, found in what a model is called with.

They may lie anywhere: several images, tiles with separators between them. The keys of a kind are
gathered, and as they stay in order, an interval of all keys is an interval of theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from headwise import mask as masks
from headwise.api import statistics
from headwise.bias import parts_of
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.place import Place, as_four_axes
from headwise.core.spans import NEEDED, SPAN_PREFIX, share
from headwise.nn.call import Call


class Marked(NamedTuple):
    """Where the tokens of a kind are: the same for all layers of a pass."""

    shown: Tensor  # (B, tokens) bool
    order: Tensor  # (B, most): their positions; the rest of a shorter row is not marked

    @staticmethod
    def of(shown: Tensor) -> Marked:
        """The places of these tokens; reads their number."""
        most = int(shown.sum(-1).max()) if shown.numel() else 0
        order = (~shown).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
        return Marked(shown, order)


@dataclass
class MarkedKeys:
    """The tokens of the pass that runs, by the names of their spans."""

    ids: Mapping[str, tuple[int, ...]]  # the numbers of the tokens that stand for each kind
    found: dict[str, Marked] = field(default_factory=dict)
    rows: int = 0  # tokens of this forward
    _length: int = 0  # of what is known: these tokens, and those before them
    _cache: weakref.ref[Any] | None = None  # that holds them, once it was seen

    def note(self, tokens: Tensor | None, past: int = 0, cache: object = None) -> None:
        """A pass over tokens (B, N) begins, after so many that are in a cache.

        If the cache is not the one of the pass before, or holds more tokens than were seen, it is
        not known which of them are of a kind.
        """
        if not self.ids:
            return
        self.rows = 0 if tokens is None else tokens.shape[1]
        known = None if self._cache is None else self._cache()
        if past and (past > self._length or (self._cache is not None and known is not cache)):
            self.found = {}
        self._cache = None if cache is None or isinstance(cache, tuple) else weakref.ref(cache)
        self._length = past + self.rows
        if tokens is None:
            self.found = {}
        elif not past:
            self.found = {name: Marked.of(_among(tokens, ids)) for name, ids in self.ids.items()}
        elif tokens.shape[1] > 1:
            before = {name: each.shown[:, :past] for name, each in self.found.items()}
            before = {name: pad(x, (0, past - x.shape[1])) for name, x in before.items()}
            whole = {
                name: torch.cat((before[name], _among(tokens, ids)), 1)
                for name, ids in self.ids.items()
                if name in before and len(before[name]) == len(tokens)
            }
            self.found = {name: Marked.of(shown) for name, shown in whole.items()}
        # a token that was generated is none of them


def weigh(
    found: Mapping[str, Marked], call: Call, forgotten: int, sampled: int | None, seen: Observation
) -> None:
    """Add the weights on marked keys of a call to its statistics."""
    for name, marked in found.items():
        weight = weight_on(marked, call, forgotten, sampled, seen)
        if weight is not None:
            seen.values[SPAN_PREFIX + name] = weight


def _among(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    found = tokens == ids[0]
    for id in ids[1:]:
        found = found | (tokens == id)
    return found


def weight_on(
    marked: Marked, call: Call, forgotten: int, sampled: int | None, seen: Observation
) -> Tensor | None:
    """The weight on the marked keys, (B, Hq, N); None if it can't be told of this call.

    The call's first key comes after `forgotten` others; `seen` has its largest logits and weights.
    """
    q, k, given = call.q.detach(), call.k.detach(), call.given
    batch, keys = q.shape[0], k.shape[2]
    distances, added = parts_of(given.bias)
    if len(marked.shown) != batch or distances is not None or forgotten >= marked.shown.shape[1]:
        return None
    known = [seen.highest, seen.values["top_prob"]]
    most = marked.order.shape[1]
    if not most:
        return torch.zeros_like(known[0])
    device = k.device
    shown, order = marked.shown[:, forgotten:].to(device), marked.order.to(device) - forgotten
    shown = pad(shown, (0, max(0, keys - shown.shape[1])))[:, :keys]
    gone = marked.shown[:, :forgotten].to(device).sum(-1, keepdim=True)
    before = gone + pad(shown.cumsum(-1), (1, 0))  # (B, M + 1): gathered keys before each key
    number, total = torch.arange(most, device=device), before[:, -1:]
    inside = (number >= gone) & (number < total)
    order, place = order.clamp(0, keys - 1), Place.of(q, k)

    def along_keys(x: Tensor) -> Tensor:
        x = as_four_axes(x)
        x = x.expand(batch, -1, -1, keys)
        at = order[:, None, None].expand(-1, x.shape[1], x.shape[2], -1)
        return x.gather(3, at)

    mask: Mask | None = None
    if given.mask is not None and given.mask.pieces == 0:
        seen_pairs = along_keys(given.mask.to_dense(place))
        mask = masks.dense(seen_pairs & inside[:, None, None])
    else:
        whole = torch.zeros(1, 1, 1, dtype=torch.int32, device=device)
        pieces = [(whole, whole + keys)] if given.mask is None else given.mask.intervals(place)
        for first, last in pieces:
            edges = []
            for edge in torch.broadcast_tensors(first, last):
                edge = edge.clamp(0, keys).expand(batch, -1, -1).long()
                rows = before[:, None].expand(-1, edge.shape[1], -1)
                edges.append(rows.gather(2, edge).int())
            piece = masks.between(edges[0], torch.minimum(edges[1], total[:, None].int()))
            mask = piece if mask is None else mask | piece
    some = k.gather(2, order[:, None, :, None].expand(-1, k.shape[1], -1, k.shape[3]))
    if added is not None:
        added = along_keys(added)
    options = given._replace(mask=mask, bias=added, sinks=None, dropout=0.0)
    part = statistics(q, some, some[..., :0], options, stats=NEEDED, rows=sampled)
    return share(known, [part.values[name] for name in NEEDED])
