"""Masks of the whole sequence, rewritten for the keys that a cache returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.intervals import Both, Either, Mask
from headwise.core.patterns import Between, Causal, Dense, Documents, Lengths, Window
from headwise.core.place import Place
from headwise.core.problem import describe

Length = Callable[[], int | None]  # tokens so far, read only if needed; None if it can't be


@dataclass(frozen=True, eq=False, repr=False)
class LaterKeys(Both):
    """A mask for keys `first` and later that knows where the sequence began, before them.

    Only `sink_mass` depends on that, so `plain` is the same mask for a call without statistics: it
    has a description, by which the next call is recognised.
    """

    whole: Mask | None = None  # the mask of the whole sequence
    first: int = 0

    @property
    def plain(self) -> Mask:
        """The same keys, without the beginning."""
        return Both(self.a, self.b)

    def shows_all(self, place: Place) -> bool:
        return False  # a mask that hides nothing is left out, and the beginning with it

    def start(self, place: Place) -> int | Tensor:
        if self.whole is None:
            return -self.first
        first_key, offset = place.first_key + self.first, place.offset + self.first
        return self.whole.start(replace(place, first_key=first_key, offset=offset)) - self.first


def shifted(mask: Mask, first: int, keys: int) -> Mask:
    """The mask for keys [first, first + keys) of the whole sequence, whose last are the queries.

    >>> from headwise import mask
    >>> shifted(mask.lengths(10), 4, 8)
    lengths(6)
    """
    if first == 0:
        return mask
    if isinstance(mask, Causal | Window):
        return mask if mask.offset is None else replace(mask, offset=_less(mask.offset, first))
    if isinstance(mask, Lengths):
        return replace(mask, n=_less(mask.n, first))
    if isinstance(mask, Between):
        return Between(mask.first - first, mask.last - first)
    if isinstance(mask, Documents):
        check_keys("hw.mask.documents", mask.ids, first + keys)
        return Documents(mask.ids[..., first:])
    if isinstance(mask, Dense):
        return Dense(from_key("hw.mask.dense", mask.seen, first, keys))
    if isinstance(mask, Both | Either):
        return type(mask)(shifted(mask.a, first, keys), shifted(mask.b, first, keys))
    raise ValueError(f"a SlidingCache does not support {mask!r}; use a GrowingCache")


def aligned(mask: Mask, offset: Tensor, keys: int, length: Length) -> Mask:
    """The mask with query 0 at position `offset`, for storage of `keys` keys.

    >>> from headwise import mask
    >>> aligned(mask.causal(), torch.tensor(3), 8, lambda: 4).offset
    tensor(3)
    """
    if isinstance(mask, Causal | Window):
        return replace(mask, offset=offset) if mask.offset is None else mask
    if isinstance(mask, Lengths | Between):
        return mask
    if isinstance(mask, Dense):
        return Dense(padded("hw.mask.dense", mask.seen, keys, length))
    if isinstance(mask, Both | Either):
        parts = (aligned(part, offset, keys, length) for part in (mask.a, mask.b))
        return type(mask)(*parts)
    raise ValueError(f"a FixedCache does not support {mask!r}; use a GrowingCache")


def from_key(name: str, pairs: Tensor, first: int, keys: int) -> Tensor:
    """A tensor (..., N, M) over all pairs, for the last `keys` keys, which begin at `first`."""
    if _for_any_key(pairs):
        return pairs
    check_keys(name, pairs, first + keys)
    return pairs[..., first:]


def padded(name: str, pairs: Tensor, keys: int, length: Length) -> Tensor:
    """A tensor (..., N, M) over pairs of tokens so far, padded to `keys` keys with 0 or False."""
    missing = 0 if _for_any_key(pairs) else keys - pairs.shape[-1]
    if missing == 0:
        return pairs
    tokens = length()
    if tokens is not None:
        check_keys(name, pairs, tokens)
    if missing < 0:
        raise ValueError(f"{name} {describe(pairs)} is for more keys than the cache has, {keys}")
    return F.pad(pairs, (0, missing))


def check_keys(name: str, pairs: Tensor, length: int) -> None:
    """Raise ValueError unless the last axis has one entry per token so far."""
    if pairs.shape[-1] != length:
        raise ValueError(
            f"{name} {describe(pairs)} is for {pairs.shape[-1]} keys, but with the cache there are "
            f"{length}"
        )


def _for_any_key(pairs: Tensor) -> bool:
    """True if a tensor broadcasts over keys."""
    return pairs.ndim == 0 or pairs.shape[-1] == 1


def _less(values: object, first: int) -> int | Tensor:
    return values - first if isinstance(values, int) else torch.as_tensor(values) - first
