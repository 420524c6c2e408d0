"""What continuous batching did for each request: noted beside its paged cache, key by key.

Every token of a request has a slot: its place in the cache of the layers that see everything.
Tensors of as many slots hold, for every layer, the statistics of its row and the weight that its
key has received, and nothing moves them: a step writes to them on the device, also when a CUDA
graph replays it. A request is read by the pages that it holds, on the stream of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core.observation import Observation
from headwise.nn.call import Call
from headwise.watching.recorder.ragged_batch import Marks, Pages, RaggedBatch

MOST_REQUESTS = 64
"""Requests that have ended and can still be read; the oldest go first."""

WARM_UP = "__warmup_"  # how the requests begin with which transformers captures CUDA graphs


@dataclass(frozen=True)
class PagedCall:
    """The attention of one step in one layer."""

    batch: RaggedBatch
    cache: Any  # transformers' PagedAttentionCache
    layer: int  # by the numbers of the cache
    k: Tensor  # (T, Hkv, D): the keys of the queries' own tokens
    index: Mapping[str, Any]  # the step's tensors, as transformers names them
    tokens: Tensor | None = None  # (1, T)
    step: int = 0  # the number of the forward

    @property
    def home(self) -> Any:
        """The allocator whose slots tokens are noted by; None if every layer has a window."""
        every = self.cache.cache_allocators.values()
        return next((x for x in every if getattr(x, "sliding_window", None) is None), None)

    def slots(self) -> tuple[Pages, Tensor]:
        """The slots of the tokens that layers without a window see, and those of the queries."""
        home, index = self.home, self.index
        table = index.get("block_table")
        if table is not None:
            own, pages = own_rows(home, index)
            page = home.block_physical_stride // home.tokens_per_page
            assert pages.entries is not None
            return pages._replace(entries=pages.entries // page), slots_of(home, own)
        own = slots_of(home, index["write_index"][home.index])
        read = index["read_index"][home.index]
        return Pages(slots_of(home, read) if read.numel() else own), own

    def keys_in(self, whole: Pages) -> Pages:
        """The slots of this layer's keys, given those of layers without a window."""
        ends, batch = self.index["cu_seq_lens_k"], self.batch
        if batch.window is None or whole.entries is None:
            return whole
        # The keys of a window are the last of those that other layers see.
        key = torch.arange(len(batch.keys), device=batch.q.device)
        mine, theirs = batch.key_ends, ends[self.home.layer_type]
        of = torch.searchsorted(mine, key, right=True).clamp(1, len(mine) - 1)
        at = key + (theirs[of] - mine[of])
        return Pages(whole.entries[at.clamp(0, len(whole.entries) - 1)])


def own_rows(allocator: Any, index: Mapping[str, Any]) -> tuple[Tensor, Pages]:
    """The rows of the queries' own keys by a table of pages, and the pages of all keys."""
    table = index["block_table"]
    page, width = allocator.tokens_per_page, table.shape[2]
    pages = Pages(table[allocator.index].flatten().clamp_min(0), page, width)
    ends = index["cu_seq_lens_k"][allocator.layer_type].long()
    request = torch.arange(len(ends) - 1, device=table.device)
    return pages.rows(request, ends[:-1], (ends.diff() - 1).clamp_min(0)), pages


class HeldLayer(NamedTuple):
    """One layer of a request, token by token; longer than the request where pages are not full."""

    received: Tensor  # (slots, Hq)
    figures: Tensor  # (slots, statistics, Hq)
    stats: tuple[str, ...]  # and the lse
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
    shared: bool  # its pages may be those of other requests too

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
    stats: tuple[str, ...]
    received: Tensor
    figures: Tensor
    q: Tensor | None
    k: Tensor | None  # of a layer with a window, whose cache overwrites its keys
    batch: RaggedBatch


@dataclass
class _Table:
    """Room for the layers of a model, by the slots of one allocator."""

    allocator: Any  # transformers' CacheAllocator
    stamps: Tensor
    tokens: Tensor
    layers: dict[int, _Layer] = field(default_factory=dict)
    step: int = -1  # the forward that these slots are of
    slots: tuple[Pages, Tensor] | None = None

    @staticmethod
    def beside(allocator: Any, device: torch.device) -> _Table:
        """An empty table."""
        # Two sectors come before those that requests get.
        blocks = allocator.num_blocks + 2 * allocator.blocks_per_sector
        slots = blocks * allocator.tokens_per_page
        stamps = torch.zeros(slots, dtype=torch.int32, device=device)
        return _Table(allocator, stamps, stamps.long())

    def of_blocks(self, blocks: Sequence[int]) -> Tensor:
        """The slots of some blocks, (blocks · page,)."""
        page, device = self.allocator.tokens_per_page, self.stamps.device
        first = torch.tensor(blocks, pin_memory=device.type == "cuda")
        first = first.to(device, non_blocking=True)[:, None] * page
        slots: Tensor = first + torch.arange(page, device=device)
        return slots.flatten()


@dataclass
class PagedRecords:
    """The requests of a watched model that generates by continuous batching."""

    stats: tuple[str, ...]
    maps: bool
    sink_keys: int
    _cache: Any = None
    _table: _Table | None = None
    _ended: dict[str, HeldRequest] = field(default_factory=dict)
    _stream: Any = None  # the CUDA stream on which the steps run

    def observe(self, name: str, call: PagedCall) -> tuple[Tensor, Observation]:
        """Compute a step in one layer, and note what it tells about its requests."""
        batch, home = call.batch, call.home
        # The keys of a window are numbered from its first.
        stats = tuple(x for x in self.stats if batch.window is None or x != "sink_mass")
        if batch.q.is_cuda:
            self._stream = torch.cuda.current_stream(batch.q.device)
        if self._cache is not call.cache:
            self._follow(call)
        table = self._table
        if table is None:
            return batch.observe(stats, self.sink_keys)
        if table.step != call.step or table.slots is None:
            table.step, table.slots = call.step, call.slots()
            self._stamp(table, call, home)
        layer = table.layers.get(call.layer)
        if layer is None:
            layer = table.layers[call.layer] = self._layer(name, table, call, stats)
        pages, own = table.slots
        marks = Marks(call.keys_in(pages), own, layer.received)
        out, seen = batch.observe(stats, self.sink_keys, marks)
        figures = torch.stack([seen.values[x][0] for x in (*stats, "lse")])  # (S, Hq, T)
        layer.figures.index_copy_(0, own, figures.permute(2, 0, 1).to(torch.float32))
        for kept, new in ((layer.q, batch.q), (layer.k, call.k)):
            if kept is not None:
                kept.index_copy_(0, own, new)
        return out, seen

    def warms_up(self, call: PagedCall) -> bool:
        """True in a forward of made-up requests, which transformers runs before it captures it."""
        every = call.cache.cache_allocators.values()
        warm = any(name.startswith(WARM_UP) for each in every for name in each.block_table)
        return warm and not captures(call.batch.q)

    def _stamp(self, table: _Table, call: PagedCall, home: Any) -> None:
        """Note which tokens are where."""
        assert table.slots is not None
        own, ends = table.slots[1], call.batch.query_ends
        token = torch.arange(len(own), device=own.device)
        request = torch.searchsorted(ends, token, right=True, out_int32=True) - 1
        there, request = request < len(ends) - 1, request.clamp_max(len(ends) - 2).long()
        past = call.index["cu_seq_lens_k"][home.layer_type].diff() - ends.diff()
        position = past[request] + token - ends[request]
        table.stamps.index_copy_(0, own, torch.where(there, position + 1, 0).int())
        if call.tokens is not None:
            table.tokens.index_copy_(0, own, call.tokens.flatten().long())

    def _layer(self, name: str, table: _Table, call: PagedCall, stats: tuple[str, ...]) -> _Layer:
        batch, slots = call.batch, len(table.stamps)
        received = batch.q.new_zeros(slots, batch.q.shape[1], dtype=torch.float32)
        figures = received.new_zeros(slots, len(stats) + 1, batch.q.shape[1])
        q = batch.q.new_zeros(slots, *batch.q.shape[1:]) if self.maps else None
        windowed = self.maps and batch.window is not None
        k = call.k.new_zeros(slots, *call.k.shape[1:]) if windowed else None
        return _Layer(name, stats, received, figures, q, k, batch)

    def _follow(self, call: PagedCall) -> None:
        """Hold what is known of each request of a cache when it ends."""
        self.release()
        cache, home = call.cache, call.home
        self._cache = cache
        if home is None:
            return
        table = self._table = _Table.beside(home, call.batch.q.device)
        free, free_all = cache.free_blocks, cache.free_all_requests
        taken = home.pool.get_free_blocks

        def free_blocks(request_id: str, *given: Any, **options: Any) -> None:
            self._end(request_id)
            free(request_id, *given, **options)

        def free_all_requests(*given: Any, **options: Any) -> None:
            for request in self._running():
                self._end(request)
            free_all(*given, **options)

        def get_free_blocks(index: int, count: int) -> list[int]:
            blocks: list[int] = taken(index, count)
            if index == home.index and blocks:
                with self._in_order():  # nobody's tokens are there any more
                    table.stamps.index_fill_(0, table.of_blocks(blocks), 0)
            return blocks

        cache.free_blocks, cache.free_all_requests = free_blocks, free_all_requests
        home.pool.get_free_blocks = get_free_blocks

    def release(self) -> None:
        """Leave the cache as it was, and forget it; requests that have ended can still be read."""
        for request in self._running():
            self._end(request)
        replaced = ((self._cache, "free_blocks"), (self._cache, "free_all_requests"))
        pool = None if self._table is None else self._table.allocator.pool
        for owner, name in (*replaced, (pool, "get_free_blocks")):
            getattr(owner, "__dict__", {}).pop(name, None)
        self._cache = self._table = None

    def _running(self) -> list[str]:
        table = self._table
        return [] if table is None or not table.layers else list(table.allocator.block_table)

    @contextmanager
    def _in_order(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Work after the steps that were started, and before those that follow.

        Gives a function for tensors that whoever asked is going to use.
        """
        if self._stream is None:
            yield lambda x: x
            return
        here = torch.cuda.current_stream(self._stream.device)

        def hand_over(x: Tensor) -> Tensor:
            x.record_stream(here)
            return x

        with torch.cuda.stream(self._stream):
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("a CUDA graph is being captured: ask for requests after that")
            yield hand_over
        here.wait_stream(self._stream)

    def _end(self, request: str) -> None:
        held = None if request.startswith(WARM_UP) else self._hold(request)
        if held is None:
            return
        self._ended.pop(request, None)
        self._ended[request] = held
        while len(self._ended) > MOST_REQUESTS:
            self._ended.pop(next(iter(self._ended)))

    def _hold(self, request: str) -> HeldRequest | None:
        """A copy of what is known of a request; None if it holds no pages."""
        table = self._table
        blocks = None if table is None else table.allocator.block_table.get(request)
        if table is None or not blocks or not table.layers:
            return None
        layers: dict[str, HeldLayer] = {}
        with self._in_order() as ours:
            slots = table.of_blocks(blocks)
            for number, layer in table.layers.items():
                q, k = (None if x is None else ours(x[slots]) for x in (layer.q, layer.k))
                if q is not None and k is None:
                    rows = physical(table.allocator, slots)
                    k = ours(rows_of(self._cache, number)[0][rows])
                received, figures = ours(layer.received[slots]), ours(layer.figures[slots])
                layers[layer.name] = HeldLayer(received, figures, layer.stats, q, k, layer.batch)
            stamps, tokens = ours(table.stamps[slots]), ours(table.tokens[slots])
        shared = bool(self._cache.use_prefix_sharing)
        return HeldRequest(request, stamps, tokens, layers, shared)

    def held(self) -> dict[str, HeldRequest]:
        """The requests by their names: those that have ended, and those that run."""
        if self._cache is not None and self._table is None:
            raise ValueError(
                "every layer of this model has a sliding window, whose keys are overwritten: its "
                "requests can't be told apart; seen.heads() has the figures over all of them"
            )
        running = {request: self._hold(request) for request in self._running()}
        return {**self._ended, **{key: x for key, x in running.items() if x is not None}}


def captures(x: Tensor) -> bool:
    """True while a CUDA graph is being captured, which runs nothing."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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
