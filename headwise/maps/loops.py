"""Which loops a map runs on: fused ones on a GPU, PyTorch's elsewhere and for what those can't."""

from __future__ import annotations

from types import ModuleType

import torch

from headwise.engines.plan import triton_missing
from headwise.maps import tiles
from headwise.maps.region import Region

WIDEST = 256  # of a head


def loops_for(region: Region) -> ModuleType:
    """A module with `log_sums`, `fill`, `pool`, `received` and `top` for this region."""
    q, terms = region.q, region.terms
    fits = q.dtype != torch.float64 and 0 < q.shape[-1] <= WIDEST and terms.additive is None
    if not fits or triton_missing(q.device.type) is not None:
        return tiles
    from headwise.engines import triton
    from headwise.maps import fused as maps

    able = triton.refuses_device(q.device) is None and triton.has_room(q.shape)
    return maps if able else tiles
