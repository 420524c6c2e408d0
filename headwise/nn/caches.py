"""Keys and values of the tokens so far, so that the next token costs one row.

Three kinds, each a small object for one layer: `GrowingCache` takes any length, `FixedCache` keeps
its shapes (for `torch.compile` and CUDA graphs), `SlidingCache` keeps a window. A `Memory` holds
the keys and values of a context that does not change.

>>> import torch, headwise as hw
>>> attn = hw.nn.MultiHeadAttention(32, 4, mask=hw.mask.causal())
>>> x, cache = torch.randn(1, 6, 32), hw.nn.GrowingCache()
>>> steps = [attn(x[:, i : i + 1], cache=cache) for i in range(6)]
>>> torch.allclose(torch.cat(steps, 1), attn(x), atol=1e-6)
True
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.mask import Mask
from headwise.nn.placing import aligned, padded, shifted


class Cache(ABC):
    """Keys (B, Hkv, M, D) and values (B, Hkv, M, Dv) of the tokens so far, for one layer."""

    _keys: Tensor | None = None
    _values: Tensor | None = None

    @property
    @abstractmethod
    def length(self) -> int | Tensor:
        """How many tokens were appended, a tensor () in a `FixedCache`: the next one's position."""

    @property
    def first(self) -> int:
        """The position of the first key that `append` hands out."""
        return 0

    @abstractmethod
    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add keys (B, Hkv, N, D) and values (B, Hkv, N, Dv); what there is now to attend to."""

    @abstractmethod
    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        """A mask of the whole sequence for the last `queries` tokens and the keys handed out."""

    def place_bias(self, bias: Tensor) -> Tensor:
        """A bias (..., N, M) over all tokens so far for the keys handed out."""
        return bias

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Forget the last `count` tokens."""

    @abstractmethod
    def fresh(self) -> Self:
        """An empty cache of the same kind."""

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b], as beam search asks; index (B',)."""
        if self._keys is not None and self._values is not None:
            self._keys = self._keys.index_select(0, index)
            self._values = self._values.index_select(0, index)

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.ndim != 4 or values.ndim != 4:
            raise ValueError(
                f"a cache takes keys and values (batch, heads, length, width); these have shapes "
                f"{tuple(keys.shape)} and {tuple(values.shape)}"
            )
        for name, held, new in (("keys", self._keys, keys), ("values", self._values, values)):
            if held is None:
                continue
            have = (held.shape[0], held.shape[1], held.shape[3], held.dtype)
            given = (new.shape[0], new.shape[1], new.shape[3], new.dtype)
            if have != given:
                raise ValueError(
                    f"{self!r} holds {name} with (batch, heads, width, dtype) = {_say(have)} and "
                    f"was given {_say(given)}; each layer and each batch needs a cache of its own"
                )

    def _check_rollback(self, count: int) -> None:
        if not 0 <= count <= int(self.length):
            raise ValueError(f"{self!r} can't forget {count} tokens; it has {int(self.length)}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={int(self.length)})"


class GrowingCache(Cache):
    """Any length: storage doubles when it is full, so that appending costs O(1) a token.

    Where gradients are recorded, appending copies instead, and they flow to every token.
    """

    def __init__(self) -> None:
        self._length = 0

    @property
    def length(self) -> int:
        return self._length

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._check(keys, values)
        start, end = self._length, self._length + keys.shape[2]
        self._keys = _written(self._keys, start, keys)
        self._values = _written(self._values, start, values)
        self._length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return mask

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        self._length -= count

    def fresh(self) -> Self:
        return type(self)()


class FixedCache(Cache):
    """Room for `capacity` tokens and not one more; shapes never change, and `length` is a tensor.

    `reserve` makes the room ahead of the first token, so that a compiled step never sees it made.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"FixedCache(capacity={capacity}) has room for no token")
        self.capacity = capacity
        self._length: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        return 0 if self._length is None else self._length

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Make room for keys (B, Hkv, any, D) and values (B, Hkv, any, Dv) such as these."""
        room = keys.shape[0], keys.shape[1], self.capacity
        self._keys = keys.new_zeros(*room, keys.shape[3])
        self._values = values.new_zeros(*room, values.shape[3])
        self._length = torch.zeros((), device=keys.device, dtype=torch.int64)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._check(keys, values)
        if self._keys is None:
            self.reserve(keys, values)
        assert self._keys is not None and self._values is not None and self._length is not None
        count = keys.shape[2]
        if not torch.compiler.is_compiling() and int(self._length) + count > self.capacity:
            raise ValueError(
                f"{self!r} is full: {count} more tokens do not fit its capacity of "
                f"{self.capacity}; make it larger, or use a growing or sliding cache"
            )
        at = self._length + torch.arange(count, device=keys.device)
        if _recorded(self._keys, keys, self._values, values):
            self._keys = self._keys.index_copy(2, at, keys)
            self._values = self._values.index_copy(2, at, values)
        else:
            self._keys.index_copy_(2, at, keys)
            self._values.index_copy_(2, at, values)
        self._length += count
        return self._keys, self._values

    def place(self, mask: Mask | None, queries: int) -> Mask:
        assert self._length is not None
        start = self._length - queries
        # The window hides nothing: it says where the queries stand, which distances depend on.
        written = masks.lengths(self._length) & masks.window(self.capacity, self.capacity, start)
        return written if mask is None else aligned(mask, start, self.capacity) & written

    def place_bias(self, bias: Tensor) -> Tensor:
        return padded(bias, self.capacity)

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        if self._length is not None:
            self._length -= count

    def reorder(self, index: Tensor) -> None:
        keys, values = self._keys, self._values
        super().reorder(index)
        if keys is not None and self._keys is not None and keys.shape == self._keys.shape:
            assert values is not None and self._values is not None
            # The same storage stays in use: a CUDA graph knows it by its address.
            self._keys, self._values = keys.copy_(self._keys), values.copy_(self._values)

    def fresh(self) -> Self:
        return type(self)(self.capacity)

    def __repr__(self) -> str:
        return f"FixedCache(capacity={self.capacity}, length={int(self.length)})"


class SlidingCache(Cache):
    """The last `window` tokens: a query sees itself and window - 1 before it, whatever the mask.

    `spare` more are kept, so that as many can be rolled back.
    """

    def __init__(self, window: int, spare: int = 0) -> None:
        if window < 1 or spare < 0:
            raise ValueError(f"SlidingCache(window={window}, spare={spare}) would see no token")
        self.window, self.spare = window, spare
        self._length = 0  # of the whole sequence
        self._held = 0  # tokens at the front of the storage
        self._out = 0  # tokens handed out by the last append

    @property
    def length(self) -> int:
        return self._length

    @property
    def first(self) -> int:
        return self._length - self._out

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._check(keys, values)
        self._make_room(keys.shape[2])
        start, end = self._held, self._held + keys.shape[2]
        self._keys = _written(self._keys, start, keys)
        self._values = _written(self._values, start, values)
        self._held, self._length = end, self._length + keys.shape[2]
        first = max(0, start - (self.window - 1))
        self._out = end - first
        return self._keys[:, :, first:end], self._values[:, :, first:end]

    def _make_room(self, count: int) -> None:
        """Drop what no token can see any more, once it is most of the storage: O(1) a token."""
        kept = min(self._held, self.window - 1 + self.spare)
        if self._keys is None or self._values is None or self._held < 2 * kept:
            return
        if self._held + count > self._keys.shape[2]:
            self._keys = _last(self._keys, self._held, kept)
            self._values = _last(self._values, self._held, kept)
            self._held = kept

    def place(self, mask: Mask | None, queries: int) -> Mask:
        seen = masks.window(self.window - 1, queries)
        return seen if mask is None else shifted(mask, self.first, self._out) & seen

    def place_bias(self, bias: Tensor) -> Tensor:
        return bias if bias.shape[-1] == 1 else bias[..., self.first :]

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        if self._held - count < min(self._length - count, self.window - 1):
            raise ValueError(
                f"{self!r} no longer has what {count} tokens fewer would see; "
                f"SlidingCache({self.window}, spare={count}) would"
            )
        self._held, self._length = self._held - count, self._length - count

    def fresh(self) -> Self:
        return type(self)(self.window, self.spare)

    def __repr__(self) -> str:
        return f"SlidingCache(window={self.window}, spare={self.spare}, length={self._length})"


@dataclass(frozen=True, eq=False)
class Memory:
    """A context's keys (B, Hkv, M, D) and values (B, Hkv, M, Dv), made by `attn.remember`."""

    keys: Tensor
    values: Tensor

    def reorder(self, index: Tensor) -> Memory:
        """The memory whose batch entry b is entry index[b] of this one; index (B',)."""
        return Memory(self.keys.index_select(0, index), self.values.index_select(0, index))


def _recorded(*tensors: Tensor | None) -> bool:
    """Whether a gradient will be asked through one of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _written(held: Tensor | None, start: int, new: Tensor) -> Tensor:
    """`held` with `new` written from `start` on: in place, in twice the room, or as a copy."""
    end = start + new.shape[2]
    if _recorded(held, new):  # a gradient can't follow storage that is written again
        return new if held is None else torch.cat((held[:, :, :start], new), 2)
    if held is None or held.shape[2] < end:
        room = max(end, 16 if held is None else 2 * held.shape[2])
        larger = new.new_zeros(*new.shape[:2], room, new.shape[3])
        if held is not None:
            larger[:, :, :start] = held[:, :, :start]
        held = larger
    held[:, :, start:end] = new
    return held


def _last(held: Tensor, end: int, count: int) -> Tensor:
    """The last `count` of the first `end` tokens, moved to the front."""
    kept = held[:, :, end - count : end]
    if _recorded(held):
        return kept
    if held.shape[2] > 8 * max(count, 16):  # a long prompt's storage is given back
        return kept.clone()
    held[:, :, :count] = kept.clone()
    return held


def _say(shape: tuple[object, ...]) -> str:
    return f"({', '.join(str(part).removeprefix('torch.') for part in shape)})"
