"""Masks of the whole sequence, rewritten for the keys that a cache returns."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.intervals import Both, Either, Mask
from headwise.core.patterns import Between, Causal, Dense, Documents, Lengths, Window


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
        return Documents(mask.ids[..., first : first + keys])
    if isinstance(mask, Dense):
        seen = mask.seen if mask.seen.shape[-1] == 1 else mask.seen[..., first : first + keys]
        return Dense(seen)
    if isinstance(mask, Both | Either):
        return type(mask)(shifted(mask.a, first, keys), shifted(mask.b, first, keys))
    raise ValueError(f"a SlidingCache does not support {mask!r}; use a GrowingCache")


def aligned(mask: Mask, offset: Tensor, keys: int) -> Mask:
    """The mask with query 0 at position `offset`, for storage of `keys` keys.

    >>> from headwise import mask
    >>> aligned(mask.causal(), torch.tensor(3), 8).offset
    tensor(3)
    """
    if isinstance(mask, Causal | Window):
        return replace(mask, offset=offset) if mask.offset is None else mask
    if isinstance(mask, Lengths | Between):
        return mask
    if isinstance(mask, Dense):
        return Dense(padded(mask.seen, keys))
    if isinstance(mask, Both | Either):
        return type(mask)(aligned(mask.a, offset, keys), aligned(mask.b, offset, keys))
    raise ValueError(f"a FixedCache does not support {mask!r}; use a GrowingCache")


def padded(pairs: Tensor, keys: int) -> Tensor:
    """A tensor (..., N, M) over pairs, padded to `keys` keys with zeros or False."""
    missing = keys - pairs.shape[-1]
    return pairs if pairs.shape[-1] == 1 or missing == 0 else F.pad(pairs, (0, missing))


def _less(values: object, first: int) -> int | Tensor:
    return values - first if isinstance(values, int) else torch.as_tensor(values) - first
