"""Decoding: few queries against many keys, which kernels for whole sequences serve badly."""

from __future__ import annotations

import torch

FEW_QUERIES = 16
MANY_KEYS = 1024
MOST_ROWS = 64  # query rows per key head: beyond them a forward kernel can fill the GPU


def is_decoding(q: torch.Size, k: torch.Size, many: int = MANY_KEYS) -> bool:
    """Return whether few queries (B, Hq, N, D) meet at least `many` keys (B, Hkv, M, D)."""
    rows: int = q[2] * (q[1] // k[1])
    return rows <= MOST_ROWS and q[2] <= FEW_QUERIES and k[2] >= many
