"""Which loops a map runs on: fused ones on a GPU, PyTorch's elsewhere and for what those can't."""

from __future__ import annotations

from types import ModuleType

import torch

from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.limits import WIDEST, fits_grid
from headwise.maps import tiles
from headwise.maps.region import Region


def loops_for(region: Region) -> ModuleType:
    """A module with `log_sums`, `fill`, `pool`, `received` and `top` for this region."""
    q, terms = region.q, region.terms
    fits = q.dtype != torch.float64 and 0 < q.shape[-1] <= WIDEST and terms.additive is None
    if not fits or not fits_grid(q.shape) or TRITON.absent(q.device) is not None:
        return tiles
    from headwise.maps import fused  # it imports Triton, which is optional

    return fused
