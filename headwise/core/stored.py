"""Keys and values as a cache stores them: in one piece, as int8 with scales, or in pages."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Stored(NamedTuple):
    """The contents of a cache, as a decoding kernel reads them."""

    keys: Tensor  # (B, Hkv, M or more, D), or (pages, Hkv, page, D)
    values: Tensor
    length: int  # M, keys of each batch entry
    key_scales: Tensor | None = None  # (B, Hkv, M or more, 1)
    value_scales: Tensor | None = None
    pages: Tensor | None = None  # (B, any) int32
