"""Caches that keep keys and values in another form than `hw.attention` takes: pages, or int8."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor

from headwise.api import attention
from headwise.core.intervals import Mask
from headwise.core.stored import Stored
from headwise.engines.triton.stored_call import attend_stored
from headwise.nn.caches.cache import Cache, recorded
from headwise.score import Score


class Packed(Cache):
    """A cache that `attend`s by itself: on a GPU the kernel reads what it holds as it lies there.

    Elsewhere, and for what the kernel does not do, `read` makes ordinary keys and values of it.
    """

    _length = 0

    @property
    def length(self) -> int:
        return self._length

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.write(keys, values)
        return self.read()

    @abstractmethod
    def write(self, keys: Tensor, values: Tensor) -> None:
        """Add keys (B, Hkv, N, D) and values (B, Hkv, N, Dv)."""

    @abstractmethod
    def read(self) -> tuple[Tensor, Tensor]:
        """Everything held, as keys (B, Hkv, M, D) and values (B, Hkv, M, Dv)."""

    @abstractmethod
    def held(self) -> Stored:
        """What a kernel reads."""

    def attend(
        self,
        q: Tensor,
        *,
        score: Score | None = None,
        mask: Mask | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """What `hw.attention` gives the last tokens' queries q (B, Hq, N, D) over all that is held.

        Its other options are `hw.attention`'s own.
        """
        given = {"score": score, "mask": mask, "softcap": softcap, "sinks": sinks} | options
        out = None
        if not options.keys() - {"bias", "dropout", "engine"}:  # else `attention` refuses it
            out = attend_stored(q, self.held(), **given)
        return attention(q, *self.read(), **given) if out is None else out

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return mask

    def _check(self, keys: Tensor, values: Tensor) -> None:
        super()._check(keys, values)
        if recorded(keys, values):
            raise ValueError(
                f"{self!r} keeps no gradients; torch.no_grad() would do, or a GrowingCache, "
                "through which they flow"
            )


def emptied(x: Tensor) -> Tensor:
    """None of the tokens of x (B, H, N, D), but its widths, dtype and device: no part of it."""
    return x.new_empty(*x.shape[:2], 0, x.shape[3])


class Unread(Cache):
    """A packed cache to which tokens are added and from which nothing is read."""

    def __init__(self, cache: Packed) -> None:
        self.cache = cache

    @property
    def length(self) -> int:
        return self.cache.length

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.cache.write(keys, values)
        return keys, values

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return self.cache.place(mask, queries)

    def rollback(self, count: int) -> None:
        self.cache.rollback(count)

    def fresh(self) -> Self:
        return type(self)(self.cache.fresh())
