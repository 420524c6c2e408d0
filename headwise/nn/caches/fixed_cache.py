"""Caches with room for a fixed number of tokens: of a whole text, or of a sliding window."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.checks import check_count, check_size, check_tensor
from headwise.core.intervals import Mask
from headwise.core.mask_parts import LaterKeys
from headwise.core.place import from_key, padded
from headwise.engines.operators import define
from headwise.nn.caches.cache import Cache, needs_grad, write_tokens


class FixedCache(Cache):
    """Room for exactly `capacity` tokens; shapes never change, and `length` is a tensor.

    `reserve` allocates before the first token, so that a compiled step never has to.
    """

    def __init__(self, capacity: int) -> None:
        check_size("capacity", capacity)
        self.capacity = capacity
        self._length: Tensor | None = None

    @property
    def length(self) -> int | Tensor:
        return 0 if self._length is None else self._length.clone()  # ours changes in place

    def reserve(self, keys: Tensor, values: Tensor) -> None:
        """Allocate for keys (B, Hkv, any, D) and values (B, Hkv, any, Dv) like these."""
        check_tensor("keys", keys, "batch", "heads", "length", "width")
        check_tensor("values", values, *keys.shape[:2], "length", "width")
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
        if not _captured(self._length):
            at = _free_slots(self._length, count, self.capacity)
        elif self._length.is_cuda:  # reading the length would wait for the GPU
            at = self._length + torch.arange(count, device=keys.device)
        else:
            at = _checked_slots(self._length, count, self.capacity)
        if needs_grad(self._keys, keys, self._values, values):
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
        # The window hides nothing: it aligns queries and keys, which distances depend on.
        written = masks.lengths(self.length) & masks.window(self.capacity, self.capacity, start)
        if mask is None:
            return written
        return mask.stored(start, self.capacity, self._known_length) & written

    def place_bias(self, bias: Tensor) -> Tensor:
        return padded("bias", bias, self.capacity, self._known_length)

    def _known_length(self) -> int | None:
        """The number of tokens, or None while a compiler or CUDA graph records the call."""
        assert self._length is not None
        return None if _captured(self._length) else int(self._length)

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        if self._length is not None:
            self._length -= count

    def reorder(self, index: Tensor) -> None:
        keys, values = self._keys, self._values
        super().reorder(index)
        if keys is not None and self._keys is not None and keys.shape == self._keys.shape:
            assert values is not None and self._values is not None
            # The same storage stays in use, because a CUDA graph knows it by its address.
            self._keys, self._values = keys.copy_(self._keys), values.copy_(self._values)

    def fresh(self) -> Self:
        return type(self)(self.capacity)

    def __repr__(self) -> str:
        return f"FixedCache(capacity={self.capacity}, length={int(self.length)})"


def _captured(length: Tensor) -> bool:
    """True while a compiler or a CUDA graph records the call, and no number may be read."""
    if torch.compiler.is_compiling():
        return True
    return length.is_cuda and torch.cuda.is_current_stream_capturing()


def _free_slots(length: Tensor, count: int, capacity: int) -> Tensor:
    """The places (count,) of the next tokens; ValueError if there are not as many."""
    if int(length) + count > capacity:
        raise ValueError(
            f"FixedCache(capacity={capacity}, length={int(length)}) is full: {count} more tokens "
            f"do not fit its capacity of {capacity}; make it larger, or use a GrowingCache or "
            "SlidingCache"
        )
    return length + torch.arange(count, device=length.device)


# As an operator, so that compiled code can raise the error too.
_checked_slots = define(
    "cache_slots",
    "(Tensor length, SymInt count, SymInt capacity) -> Tensor",
    _free_slots,
    lambda length, count, capacity: length.new_empty(count),
)


class SlidingCache(Cache):
    """The last `window` tokens: a query sees itself and at most window - 1 tokens before it.

    `spare` more are stored, so that up to this many can be rolled back.
    """

    def __init__(self, window: int, spare: int = 0) -> None:
        check_size("window", window)
        check_count("spare", spare)
        self.window, self.spare = window, spare
        self._length = 0  # of the whole sequence
        self._held = 0  # tokens at the front of the storage
        self._out = 0  # tokens returned by the last append

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
        self._keys = write_tokens(self._keys, start, keys)
        self._values = write_tokens(self._values, start, values)
        self._held, self._length = end, self._length + keys.shape[2]
        first = max(0, start - (self.window - 1))
        self._out = end - first
        return self._keys[:, :, first:end], self._values[:, :, first:end]

    def _make_room(self, count: int) -> None:
        """Drop tokens that are out of sight once they fill most of the storage: O(1) per token."""
        kept = min(self._held, self.window - 1 + self.spare)
        if self._keys is None or self._values is None or self._held < 2 * kept:
            return
        if self._held + count > self._keys.shape[2]:
            self._keys = _last(self._keys, self._held, kept)
            self._values = _last(self._values, self._held, kept)
            self._held = kept

    def place(self, mask: Mask | None, queries: int) -> Mask:
        seen = masks.window(self.window - 1, queries)
        later = seen if mask is None else mask.later(self.first, self._out)
        return LaterKeys(later, seen, mask, self.first) if self.first else later & seen

    def place_bias(self, bias: Tensor) -> Tensor:
        return from_key("bias", bias, self.first, self._out)

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        if self._held - count < min(self._length - count, self.window - 1):
            raise ValueError(
                f"{self!r} no longer has the tokens that would be in sight {count} tokens ago; "
                f"use SlidingCache({self.window}, spare={count})"
            )
        self._held, self._length = self._held - count, self._length - count
        self._out = max(0, self._out - count)

    def fresh(self) -> Self:
        return type(self)(self.window, self.spare)

    def __repr__(self) -> str:
        return f"SlidingCache(window={self.window}, spare={self.spare}, length={self._length})"


def _last(held: Tensor, end: int, count: int) -> Tensor:
    """The last `count` of the first `end` tokens, moved to the front."""
    kept = held[:, :, end - count : end]
    if needs_grad(held):
        return kept
    if held.shape[2] > 8 * max(count, 16):  # free a long prompt's storage
        return kept.clone()
    held[:, :, :count] = kept.clone()
    return held
