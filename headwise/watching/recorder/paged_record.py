"""What continuous batching did for each request: noted beside its paged cache, key by key.

Every token of a request has a slot in the cache. Tensors of as many slots hold the statistics of
its row and the weight that its key has received, and nothing moves them: a step writes to them on
the device, also when CUDA graphs replay it. A request is read by the pages that it holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core.observation import Observation
from headwise.nn.call import Call
from headwise.watching.recorder.ragged_batch import Marks, Pages, RaggedBatch

MOST_REQUESTS = 64
"""Requests that have ended and can still be read; the oldest go first."""


@dataclass(frozen=True)
class PagedCall:
    """The attention of one step in one layer, and where its tokens lie in the cache."""

    batch: RaggedBatch
    cache: Any  # transformers' PagedAttentionCache
    layer: int  # by the numbers of the cache
    slots: Pages  # of the keys
    own: Tensor  # (T,): the slots of the queries' own keys
    tokens: Tensor | None = None  # (1, T)


class HeldLayer(NamedTuple):
    """One layer of a request, token by token; longer than the request where pages are not full."""

    received: Tensor  # (slots, Hq)
    figures: Tensor  # (slots, statistics, Hq)
    q: Tensor | None  # (slots, Hq, D)
    k: Tensor | None  # (slots, Hkv, D)
    batch: RaggedBatch  # for its options


@dataclass(frozen=True)
class HeldRequest:
    """What was noted about a request, until it ended or was asked for."""

    id: str
    stamps: Tensor  # (slots,): the position of each token, plus one
    tokens: Tensor  # (slots,)
    layers: dict[str, HeldLayer]
    stats: tuple[str, ...]

    def length(self) -> int:
        """The number of its tokens; ValueError if some were computed before the watch saw it."""
        expected = torch.arange(1, len(self.stamps) + 1, device=self.stamps.device)
        seen = int((self.stamps == expected).cumprod(0).sum())
        if not seen or int((self.stamps > 0).sum()) != seen:
            raise ValueError(
                f"the request {self.id!r} holds keys that were copied, or computed before the "
                "watch began: forks, and requests that were taken out of the cache while they "
                "ran, can't be read"
            )
        return seen


@dataclass
class _Layer:
    name: str
    received: Tensor
    figures: Tensor
    q: Tensor | None
    batch: RaggedBatch


@dataclass
class _Group:
    """The layers of one allocator, which share slots."""

    allocator: Any  # transformers' CacheAllocator
    stamps: Tensor
    tokens: Tensor
    layers: dict[int, _Layer] = field(default_factory=dict)

    def slots(self, request: str) -> Tensor | None:
        """The slots of a request, (pages · page,); None if it holds no pages."""
        pages = self.allocator.block_table.get(request)
        if not pages:
            return None
        page = self.allocator.tokens_per_page
        first = torch.tensor(pages, device=self.stamps.device)[:, None] * page
        slots: Tensor = first + torch.arange(page, device=first.device)
        return slots.flatten()


@dataclass
class PagedRecords:
    """The requests of a watched model that generates by continuous batching."""

    stats: tuple[str, ...]
    maps: bool
    sink_keys: int
    _cache: Any = None
    _groups: dict[int, _Group] = field(default_factory=dict)
    _ended: dict[str, HeldRequest] = field(default_factory=dict)

    def observe(self, name: str, call: PagedCall) -> tuple[Tensor, Observation]:
        """Compute a step in one layer, and note what it tells about its requests."""
        batch, allocator = call.batch, call.cache.layer_to_allocator[call.layer]
        if self._cache is not call.cache:
            self._follow(call.cache)
        group = self._group(allocator, batch.q.device)
        # Slots of a window are written again: only the weight that its keys receive is kept.
        stats = tuple(x for x in self.stats if batch.window is None or x != "sink_mass")
        layer = group.layers.get(call.layer)
        if layer is None:
            layer = group.layers[call.layer] = self._layer(name, group, batch)
        marks = Marks(call.slots, call.own, layer.received)
        out, seen = batch.observe(stats, self.sink_keys, marks)
        if batch.window is None:
            figures = torch.stack([seen.values[x][0] for x in (*stats, "lse")])  # (S, Hq, T)
            layer.figures.index_copy_(0, call.own, figures.permute(2, 0, 1).to(torch.float32))
            if layer.q is not None:
                layer.q.index_copy_(0, call.own, batch.q)
            if layer is next(iter(group.layers.values())):
                self._stamp(group, call)
        return out, seen

    def _stamp(self, group: _Group, call: PagedCall) -> None:
        """Note which tokens are where."""
        batch, token = call.batch, torch.arange(len(call.own), device=call.own.device)
        ends, key_ends = batch.query_ends, batch.key_ends
        request = torch.searchsorted(ends, token, right=True, out_int32=True) - 1
        there, request = request < len(ends) - 1, request.clamp_max(len(ends) - 2).long()
        past = key_ends.diff() - ends.diff()
        position = past[request] + token - ends[request]
        group.stamps.index_copy_(0, call.own, torch.where(there, position + 1, 0).int())
        if call.tokens is not None:
            group.tokens.index_copy_(0, call.own, call.tokens.flatten().long())

    def _group(self, allocator: Any, device: torch.device) -> _Group:
        if allocator.index not in self._groups:
            # Two sectors come before those that requests get.
            blocks = allocator.num_blocks + 2 * allocator.blocks_per_sector
            slots = blocks * allocator.tokens_per_page
            stamps = torch.zeros(slots, dtype=torch.int32, device=device)
            tokens = torch.zeros(slots, dtype=torch.int64, device=device)
            self._groups[allocator.index] = _Group(allocator, stamps, tokens)
        return self._groups[allocator.index]

    def _layer(self, name: str, group: _Group, batch: RaggedBatch) -> _Layer:
        slots, (_, heads, width) = len(group.stamps), batch.q.shape
        whole = batch.window is None
        received = batch.q.new_zeros(slots, heads, dtype=torch.float32)
        figures = received.new_zeros(slots if whole else 0, len(self.stats) + 1, heads)
        q = batch.q.new_zeros(slots, heads, width) if self.maps and whole else None
        return _Layer(name, received, figures, q, batch)

    def _follow(self, cache: Any) -> None:
        """Hold what is known of each request of a cache when it ends."""
        self.release()
        free, free_all = cache.free_blocks, cache.free_all_requests

        def free_blocks(request_id: str, *given: Any, **options: Any) -> None:
            self._end(request_id)
            free(request_id, *given, **options)

        def free_all_requests(*given: Any, **options: Any) -> None:
            for request in self._running():
                self._end(request)
            free_all(*given, **options)

        cache.free_blocks, cache.free_all_requests = free_blocks, free_all_requests
        self._cache = cache

    def release(self) -> None:
        """Leave the cache as it was, and forget it; requests that have ended can still be read."""
        for request in self._running():
            self._end(request)
        for name in ("free_blocks", "free_all_requests"):
            getattr(self._cache, "__dict__", {}).pop(name, None)
        self._cache = None
        self._groups.clear()

    def _running(self) -> list[str]:
        whole = [group for group in self._groups.values() if len(group.layers)]
        return list(dict.fromkeys(x for group in whole for x in group.allocator.block_table))

    def _end(self, request: str) -> None:
        held = self._hold(request)
        if held is None:
            return
        self._ended.pop(request, None)
        for group in self._groups.values():
            slots = group.slots(request)
            if slots is not None:
                group.stamps.index_fill_(0, slots, 0)
        self._ended[request] = held
        while len(self._ended) > MOST_REQUESTS:
            self._ended.pop(next(iter(self._ended)))

    def _hold(self, request: str) -> HeldRequest | None:
        """A copy of what is known of a request; None if it holds no pages."""
        stamps = tokens = None
        layers: dict[str, HeldLayer] = {}
        for group in self._groups.values():
            slots = group.slots(request)
            if slots is None:
                continue
            for number, layer in group.layers.items():
                if layer.batch.window is not None:
                    continue
                k = None
                if layer.q is not None:
                    k = rows_of(self._cache, number)[0][physical(group.allocator, slots)]
                q = None if layer.q is None else layer.q[slots]
                kept = (layer.received[slots], layer.figures[slots], q, k, layer.batch)
                layers[layer.name] = HeldLayer(*kept)
                stamps, tokens = group.stamps[slots], group.tokens[slots]
        if stamps is None or tokens is None:
            return None
        return HeldRequest(request, stamps, tokens, layers, self.stats)

    def held(self) -> dict[str, HeldRequest]:
        """The requests by their names: those that have ended, and those that run."""
        cache = self._cache
        if cache is not None and cache.use_prefix_sharing:
            raise ValueError(
                "requests share pages of this cache, so that a key may belong to several: "
                "generate with ContinuousBatchingConfig(allow_block_sharing=False)"
            )
        running = {request: self._hold(request) for request in self._running()}
        return {**self._ended, **{key: x for key, x in running.items() if x is not None}}


def rows_of(cache: Any, layer: int) -> tuple[Tensor, Tensor]:
    """The keys and values of a layer that sees everything, as rows (any, Hkv, D)."""
    k, v = cache.layer_to_allocator[layer].get_cache_for_block_table(layer)
    return k.flatten(0, 1), v.flatten(0, 1)


def physical(allocator: Any, slots: Tensor) -> Tensor:
    """The rows of a layer's keys that belong to slots."""
    page = allocator.tokens_per_page
    found: Tensor = slots // page * allocator.block_physical_stride + slots % page
    return found


def slots_of(allocator: Any, rows: Tensor) -> Tensor:
    """The slots that belong to rows of a layer's keys: pages without those of other layers."""
    page = allocator.tokens_per_page
    found: Tensor = rows // allocator.block_physical_stride * page + rows % page
    return found


def whole_call(layer: HeldLayer, length: int) -> Call | None:
    """The attention of a request in one layer, as if it had run alone; None without maps."""
    if layer.q is None or layer.k is None:
        return None
    q, k = (x[:length].transpose(0, 1)[None] for x in (layer.q, layer.k))
    return Call(q, k, k[..., :0], layer.batch._options(None))
