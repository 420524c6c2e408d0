"""Random numbers that stay where they are while a slider moves."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=32)
def normals(seed: int, stream: int, rows: int, columns: int) -> Tensor:
    """Independent N(0, 1), float64 (rows, columns); each `stream` of a seed is a draw of its own.

    An experiment draws the largest table once and cuts its sizes from it: a slider then adds or
    takes away numbers instead of changing them all, and what is seen to move is its effect alone.

    >>> torch.equal(normals(0, 1, 4, 8), normals(0, 1, 4, 8))
    True
    """
    generator = torch.Generator().manual_seed(1000 * stream + seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
