"""Caches that store keys and values in another form than `hw.attention` takes: pages or int8."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from torch import Tensor

from headwise.api import attention
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.stored import Stored
from headwise.engines.triton.stored_call import attend_stored
from headwise.nn.caches.cache import Cache, needs_grad
from headwise.score import Score


class Packed(Cache):
    """A cache with its own `attend`: on a GPU the kernel reads its storage directly.

    Elsewhere, and for calls the kernel does not take, `read` makes ordinary keys and values of it.
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
        """Everything stored, as keys (B, Hkv, M, D) and values (B, Hkv, M, Dv)."""

    @abstractmethod
    def held(self) -> Stored:
        """The storage that a kernel reads."""

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
        """`hw.attention` of the last tokens' queries q (B, Hq, N, D) over everything stored.

        The options are those of `hw.attention`.
        """
        given = {"score": score, "mask": mask, "softcap": softcap, "sinks": sinks} | options
        out = None
        if not options.keys() - {"bias", "dropout", "engine"}:  # else `attention` refuses it
            out = attend_stored(q, self.held(), Options(**given))
        return attention(q, *self.read(), **given) if out is None else out

    def place(self, mask: Mask | None, queries: int) -> Mask | None:
        return mask

    def _check(self, keys: Tensor, values: Tensor) -> None:
        super()._check(keys, values)
        if needs_grad(keys, values):
            raise ValueError(
                f"{self!r} keeps no gradients; use torch.no_grad(), or a GrowingCache, which "
                "passes them on"
            )


def emptied(x: Tensor) -> Tensor:
    """A tensor (B, H, 0, D) that remembers x's widths, dtype and device, and shares no memory."""
    return x.new_empty(*x.shape[:2], 0, x.shape[3])


class WriteOnly(Cache):
    """A packed cache whose `append` writes tokens and reads nothing back."""

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
