"""Decoding: few queries against many keys, which kernels for whole sequences serve badly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FEW_QUERIES = 16
MANY_KEYS = 1024
MOST_ROWS = 64  # query rows per key head: beyond them a forward kernel can fill the GPU


def is_decoding(q: torch.Size, k: torch.Size, many: int = MANY_KEYS) -> bool:
    """Return whether few queries (B, Hq, N, D) meet at least `many` keys (B, Hkv, M, D)."""
    rows: int = q[2] * (q[1] // k[1])
    return rows <= MOST_ROWS and q[2] <= FEW_QUERIES and k[2] >= many


class Stored(NamedTuple):
    """The contents of a cache, as a decoding kernel reads them."""

    keys: Tensor  # (B, Hkv, M or more, D), or (pages, Hkv, page, D)
    values: Tensor
    length: int  # M, keys of each batch entry
    key_scales: Tensor | None = None  # (B, Hkv, M or more, 1)
    value_scales: Tensor | None = None
    pages: Tensor | None = None  # (B, any) int32
