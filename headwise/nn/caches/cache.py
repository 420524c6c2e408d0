"""Keys and values of the tokens so far, so that the next token costs only one row of attention.

A cache belongs to one layer: `GrowingCache` takes any length, `FixedCache` keeps its shapes (for
`torch.compile` and CUDA graphs), `SlidingCache` keeps a window, `PagedCache` takes pages from a
pool that many sequences share, `Int8Cache` stores eight bits per number. In compiled code only a
`FixedCache` avoids a new compilation for each length. A `Memory` holds the keys and values of a
context that does not change.

>>> import torch, headwise as hw
>>> attn = hw.nn.MultiHeadAttention(32, 4, mask=hw.mask.causal())
>>> x, cache = torch.randn(1, 6, 32), hw.nn.GrowingCache()
>>> steps = [attn(x[:, i : i + 1], cache=cache) for i in range(6)]
>>> torch.allclose(torch.cat(steps, 1), attn(x), atol=1e-6)
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from headwise.checks import check_count, check_integers, check_tensor
from headwise.core.intervals import Mask
from headwise.core.problem import describe


class Cache(ABC):
    """Keys (B, Hkv, M, D) and values (B, Hkv, M, Dv) of the tokens so far, for one layer."""

    _keys: Tensor | None = None
    _values: Tensor | None = None

    @property
    @abstractmethod
    def length(self) -> int | Tensor:
        """The number of tokens so far, which is the next position; a tensor () in a FixedCache."""

    @property
    def first(self) -> int:
        """The position of the first key that `append` returns."""
        return 0

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, Hkv, N, D) and values (B, Hkv, N, Dv); returns all there is to attend to."""

    @abstractmethod
    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        """A mask of the whole sequence, for the last `queries` tokens and the keys of `append`."""

    def place_bias(self, bias: Tensor) -> Tensor:
        """A bias (..., N, M) over all tokens so far, for the keys of `append`."""
        return bias

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""

    @abstractmethod
    def fresh(self) -> Self:
        """An empty cache of the same kind."""

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b], as beam search needs; index (B',)."""
        if self._keys is not None and self._values is not None:
            check_integers("index", index, 0, self._keys.shape[0] - 1, "batch")
            self._keys = self._keys.index_select(0, index)
            self._values = self._values.index_select(0, index)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        check_tensor("keys", keys, "batch", "heads", "length", "width")
        check_tensor("values", values, *keys.shape[:3], "width")
        for name, held, new in (("keys", self._keys, keys), ("values", self._values, values)):
            if held is None:
                continue
            have = (held.shape[0], held.shape[1], held.shape[3], held.dtype)
            given = (new.shape[0], new.shape[1], new.shape[3], new.dtype)
            if have != given:
                raise ValueError(
                    f"{self!r} holds {name} with (batch, heads, width, dtype) = {_join(have)}, not "
                    f"{_join(given)}; each layer and each batch needs a cache of its own"
                )

    def _check_rollback(self, count: int) -> None:
        check_count("count", count)
        if count > int(self.length):
            raise ValueError(f"{self!r} can't roll back {count} tokens; it has {int(self.length)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={int(self.length)})"


class GrowingCache(Cache):
    """Any length: storage doubles when it is full, so appending costs O(1) per token.

    If gradients are recorded, appending copies instead, and they flow to every token.
    """

    def __init__(self) -> None:
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._check(keys, values)
        start, end = self._length, self._length + keys.shape[2]
        self._keys = write_tokens(self._keys, start, keys)
        self._values = write_tokens(self._values, start, values)
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return mask

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        self._length -= count

    def fresh(self) -> Self:
        return type(self)()


@dataclass(frozen=True, eq=False)
class Memory:
    """A context's keys (B, Hkv, M, D) and values (B, Hkv, M, Dv), made by `attn.remember`."""

    keys: Tensor
    values: Tensor

    def __post_init__(self) -> None:
        _check_memory("keys", self.keys)
        _check_memory("values", self.values)

    def reorder(self, index: Tensor) -> Memory:
        """The memory whose batch entry b is entry index[b] of this one; index (B',)."""
        check_integers("index", index, 0, self.keys.shape[0] - 1, "batch")
        return Memory(self.keys.index_select(0, index), self.values.index_select(0, index))


def _check_memory(name: str, given: object) -> None:
    if not isinstance(given, Tensor) or given.ndim not in (3, 4):
        raise ValueError(
            f"{name} of a Memory must be a tensor (batch, heads, length, width), not "
            f"{describe(given)}"
        )


class RollbackOnError:
    """A context that rolls a cache back by `count` tokens if an exception leaves it."""

    def __init__(self, cache: Cache | None, count: int) -> None:
        self._cache, self._count = cache, count

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._cache is not None and error is not None:
            self._cache.rollback(self._count)


def check_cache(cache: object) -> None:
    """Raise ValueError unless `cache` is a cache or None."""
    if not (cache is None or isinstance(cache, Cache)):
        raise ValueError(f"cache={describe(cache)} is not a cache; try hw.nn.GrowingCache()")


def check_caches(caches: object, layers: int) -> None:
    """Raise ValueError unless there is one cache per layer, or None."""
    if caches is None:
        return
    if not isinstance(caches, Sequence) or len(caches) != layers:
        raise ValueError(f"caches must be one cache per layer, {layers}, not {describe(caches)}")
    for cache in caches:
        check_cache(cache)


def rollback_to_shortest(caches: Sequence[Cache]) -> None:
    """Give the caches of a model's layers one length again, after one of them refused tokens."""
    lengths = [int(cache.length) for cache in caches]
    for cache, length in zip(caches, lengths, strict=True):
        cache.rollback(length - min(lengths))


def needs_grad(*tensors: Tensor | None) -> bool:
    """True if autograd records what is done with one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def write_tokens(held: Tensor | None, start: int, new: Tensor) -> Tensor:
    """`held` with `new` written from `start` on: in place, in twice the room, or as a copy."""
    end = start + new.shape[2]
    if needs_grad(held, new):  # gradients can't follow storage that is written again
        return new if held is None else torch.cat((held[:, :, :start], new), 2)
    if held is None or held.shape[2] < end:
        room = max(end, 16 if held is None else 2 * held.shape[2])
        larger = new.new_zeros(*new.shape[:2], room, new.shape[3])
        if held is not None:
            larger[:, :, :start] = held[:, :, :start]
        held = larger
    held[:, :, start:end] = new
    return held


def _join(shape: tuple[object, ...]) -> str:
    return f"({', '.join(str(part).removeprefix('torch.') for part in shape)})"
