"""Attention of several requests at once, whose keys lie anywhere in one pool: continuous batching.

The queries of all requests are packed one after the other, and tables say which rows of the pool
hold their keys. A request's last query stands beside its last key. On a GPU one kernel serves all
requests; elsewhere those with equally many queries are one call of `hw.observe`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.api import attention, attention_map, observe
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.engines.triton.ragged_call import observe_by_kernel
from headwise.nn.call import Call
from headwise.score import Dot


class Pages(NamedTuple):
    """Where the keys of each request lie, in rows of a pool.

    Key j of request r is token j % page of the page entries[first + j // page], where first is
    r · width, or the number of keys before the request's if width is 0. Without entries the keys
    of all requests are packed as the queries are.
    """

    entries: Tensor | None  # (any,) integers
    page: int = 1
    width: int = 0

    def rows(self, request: Tensor, before: Tensor, key: Tensor) -> Tensor:
        """The rows of keys of requests, which have so many keys before theirs."""
        if self.entries is None:
            return before + key
        first = request * self.width if self.width else before
        return self.entries[first + key // self.page].long() * self.page + key % self.page


class Marks(NamedTuple):
    """Where something is noted about each key of a batch, and about the keys of its queries."""

    pages: Pages
    own: Tensor  # (T,): that of each query's own key
    received: Tensor  # (slots, Hq) float32: the weight that a key has received so far


@dataclass(frozen=True)
class RaggedBatch:
    """The attention of a step of continuous batching in one layer."""

    q: Tensor  # (T, Hq, D): the queries of all requests
    keys: Tensor  # (rows, Hkv, D): the pool
    values: Tensor  # (rows, Hkv, Dv)
    query_ends: Tensor  # (R + 1,): where the queries of a request begin and end
    key_ends: Tensor  # (R + 1,): the same, if the keys were packed
    pages: Pages
    longest: int  # the most queries of a request
    scale: float
    window: int | None = None  # how many keys a query sees at most, its own included
    softcap: float | None = None
    sinks: Tensor | None = None  # (Hq,)

    def attend(self) -> Tensor:
        """The output (T, Hq, Dv), 0 for queries of no request."""
        found = observe_by_kernel(self, (), 1, None)
        if found is not None:
            return found[0]
        out = self._room()
        for tokens, _, call in self._calls():
            out[tokens] = attention(*call[:3], **call.options()).transpose(1, 2)
        return out

    def observe(
        self, stats: Sequence[str], sink_keys: int = 1, marks: Marks | None = None
    ) -> tuple[Tensor, Observation]:
        """The output, and statistics of each query, (1, Hq, T).

        Adds the weight that each key receives to its mark, after emptying the marks of the queries'
        own keys, which are new.
        """
        if marks is not None:
            marks.received.index_fill_(0, marks.own, 0)
        found = observe_by_kernel(self, stats, sink_keys, marks)
        if found is not None:
            out, values, highest = found
            return out, Observation(values, highest)
        out, names = self._room(), tuple(dict.fromkeys((*stats, "lse", "max_logit")))
        width = torch.promote_types(self.q.dtype, torch.float32)
        shape = (len(names), self.q.shape[1], self.q.shape[0])
        figures = self.q.new_zeros(shape, dtype=width)
        figures[names.index("max_logit")] = -torch.inf
        for tokens, rows_of, call in self._calls():
            given = call.options()
            part, seen = observe(*call[:3], **given, stats=names, sink_keys=sink_keys)
            out[tokens] = part.transpose(1, 2)
            for place, name in enumerate(names):
                figures[place, :, tokens] = seen.values[name].transpose(0, 1).to(width)
            if marks is not None:
                lse = seen.values["lse"]
                amap = attention_map(call.q, call.k, **call.given.of_weights(), lse=lse)
                weight = amap.received().transpose(1, 2)  # (B, M, Hq), 0 for keys that no row sees
                slots = marks.pages.rows(*rows_of).flatten()
                marks.received.index_add_(0, slots, weight.flatten(0, 1).to(torch.float32))
        values = {name: x[None] for name, x in zip(names, figures, strict=True)}
        highest = values["max_logit"]
        return out, Observation({name: values[name] for name in (*stats, "lse")}, highest)

    def _room(self) -> Tensor:
        return self.q.new_zeros(*self.q.shape[:2], self.values.shape[2])

    def _calls(self) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor, Tensor], Call]]:
        """Calls that compute the batch: tokens (B, N), their keys as `Pages.rows` takes them."""
        device = self.q.device
        ends, key_ends = self.query_ends.tolist(), self.key_ends.tolist()
        groups: dict[int, list[int]] = {}
        for r, (first, last) in enumerate(pairwise(ends)):
            groups.setdefault(last - first, []).append(r)
        groups.pop(0, None)
        for count, requests in groups.items():
            begin = torch.tensor([ends[r] for r in requests], device=device)
            tokens = begin[:, None] + torch.arange(count, device=device)
            lengths = [key_ends[r + 1] - key_ends[r] for r in requests]
            held = torch.tensor(lengths, device=device)
            key = torch.arange(max(lengths), device=device).expand(len(requests), -1)
            of = torch.tensor(requests, device=device)[:, None]
            place = (of, self.key_ends[of].long(), torch.minimum(key, held[:, None] - 1))
            rows = self.pages.rows(*place)
            k, v = (x[rows].transpose(1, 2) for x in (self.keys, self.values))
            offset = held - count if len(set(lengths)) > 1 else None
            yield tokens, place, Call(self.q[tokens].transpose(1, 2), k, v, self._options(offset))

    def _options(self, offset: Tensor | None) -> Options:
        mask: Mask = masks.causal(offset)
        if self.window is not None:
            mask = mask & masks.window(self.window - 1, 0, offset)
        return Options(Dot(self.scale), mask, None, self.softcap, self.sinks)

    def whole(self) -> Call:
        """The batch as one call, (1, Hq, T, D) and all keys, for a comparison with its output."""
        ends, key_ends = self.query_ends.long(), self.key_ends.long()
        token = torch.arange(len(self.q), device=self.q.device)
        request = torch.searchsorted(ends, token, right=True) - 1
        there = request < len(ends) - 1  # else padding, which sees nothing
        request = request.clamp_max(len(ends) - 2)
        past = key_ends.diff() - ends.diff()
        begin = key_ends[request]
        last = torch.where(there, begin + past[request] + token - ends[request] + 1, 0)
        first = begin if self.window is None else torch.maximum(begin, last - self.window)
        key = torch.arange(int(key_ends[-1]), device=self.q.device)
        of = torch.searchsorted(key_ends, key, right=True) - 1
        rows = self.pages.rows(of, key_ends[of], key - key_ends[of])
        mask = masks.between(*(x.int()[None, None] for x in (torch.minimum(first, last), last)))
        options = Options(Dot(self.scale), mask, None, self.softcap, self.sinks)
        q, k, v = (x.transpose(0, 1)[None] for x in (self.q, self.keys[rows], self.values[rows]))
        return Call(q, k, v, options)
