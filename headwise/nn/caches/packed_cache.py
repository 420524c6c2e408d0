"""Caches that store keys and values in another form than `hw.attention` takes: pages or int8."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
from torch import Tensor

from headwise.api import attention
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.engines.decoding import Stored
from headwise.engines.triton.stored_call import attend_stored
from headwise.nn.caches.cache import Cache, needs_grad, write_tokens
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

    def rollback(self, count: int) -> None:
        self._check_rollback(count)
        self._length -= count

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


LEVELS = 127


class Int8Cache(Packed):
    """Any length, eight bits per number, one scale per key and value of each token and head.

    A number x of a key becomes scale · round(x / scale) with scale = max |x| / 127 over that key,
    so it is off by at most max |x| / 254; values likewise.

    >>> import torch, headwise as hw
    >>> cache, k = hw.nn.Int8Cache(), torch.randn(1, 2, 100, 16)
    >>> keys, values = cache.append(k, k)
    >>> bool(((keys - k).abs() <= k.abs().amax(-1, keepdim=True) / 254 + 1e-6).all())
    True
    """

    _whole_keys: Tensor | None = None
    _whole_values: Tensor | None = None
    _key_scales: Tensor | None = None
    _value_scales: Tensor | None = None

    def write(self, keys: Tensor, values: Tensor) -> None:
        self._check(keys, values)
        self._keys, self._values = emptied(keys), emptied(values)
        whole, scales = quantised(keys)
        self._whole_keys = write_tokens(self._whole_keys, self._length, whole)
        self._key_scales = write_tokens(self._key_scales, self._length, scales)
        whole, scales = quantised(values)
        self._whole_values = write_tokens(self._whole_values, self._length, whole)
        self._value_scales = write_tokens(self._value_scales, self._length, scales)
        self._length += keys.shape[2]

    def read(self) -> tuple[Tensor, Tensor]:
        held, end = self.held(), self._length
        assert held.key_scales is not None and held.value_scales is not None
        assert self._keys is not None and self._values is not None
        keys = held.keys[:, :, :end] * held.key_scales[:, :, :end]
        values = held.values[:, :, :end] * held.value_scales[:, :, :end]
        return keys.to(self._keys.dtype), values.to(self._values.dtype)

    def held(self) -> Stored:
        if self._whole_keys is None or self._whole_values is None:
            raise ValueError(f"{self!r} is empty; append tokens before attending to them")
        assert self._key_scales is not None and self._value_scales is not None
        return Stored(
            self._whole_keys,
            self._whole_values,
            self._length,
            key_scales=self._key_scales,
            value_scales=self._value_scales,
        )

    def reorder(self, index: Tensor) -> None:
        super().reorder(index)
        for name in ("_whole_keys", "_whole_values", "_key_scales", "_value_scales"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.index_select(0, index))

    def fresh(self) -> Self:
        return type(self)()


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., D) as int8 and float32 scales (..., 1), x ≈ int8 · scale to within scale / 2.

    >>> whole, scale = quantised(torch.tensor([[0.0, 0.5, -127.0]]))
    >>> whole, scale
    (tensor([[   0,    0, -127]], dtype=torch.int8), tensor([[1.]]))
    """
    wide = x.detach().float()
    scale = wide.abs().amax(-1, keepdim=True) / LEVELS
    whole = (wide / scale.masked_fill(scale == 0, 1)).round_().clamp_(-LEVELS, LEVELS)
    return whole.to(torch.int8), scale
