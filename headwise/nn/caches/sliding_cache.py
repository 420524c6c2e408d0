"""A cache that keeps a window of the last tokens."""

from __future__ import annotations

from typing import Self

from torch import Tensor

from headwise import mask as masks
from headwise.checks import check_count, check_size
from headwise.core.intervals import Mask
from headwise.core.place import from_key
from headwise.nn.caches.cache import Cache, needs_grad, write_tokens
from headwise.nn.caches.cache_masks import LaterKeys


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
