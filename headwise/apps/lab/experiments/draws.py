"""The seed of an experiment, and random numbers that stay put while a slider moves."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from headwise.apps.interface.settings import Whole

SEED = Whole(0, 0, 999)
"""Selects the random numbers."""


@lru_cache(maxsize=32)
def normals(seed: int, stream: int, rows: int, columns: int) -> Tensor:
    """Independent N(0, 1), float64 (rows, columns); each `stream` of a seed is a separate draw.

    An experiment draws the largest table once and slices its sizes from it, so that a slider adds
    or removes numbers instead of changing them all, and only its own effect is seen.

    >>> torch.equal(normals(0, 1, 4, 8), normals(0, 1, 4, 8))
    True
    """
    generator = torch.Generator().manual_seed(1000 * stream + seed)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
