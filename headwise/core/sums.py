"""What an engine's one pass returns: the output, and the sums over pairs that statistics need."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ENTROPY, DISTANCE, MOMENTS = 1, 2, 4  # sums over pairs that a call may ask for


class Sums(NamedTuple):
    """out (B, Hq, N, Dv); the rest (B, Hq, N), or empty where it was not asked for."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    distance: Tensor
    logit_mean: Tensor
    logit_var: Tensor
    visible: Tensor  # how many keys the row sees


def room(q: Tensor, v: Tensor, wants: int) -> Sums:
    """Unwritten `Sums` for q (B, Hq, N, D) and v (B, Hkv, M, Dv)."""
    rows = q.shape[:-1]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    nothing = q.new_empty(0, dtype=wide)  # one for all: an allocation takes microseconds

    def statistic(asked: int) -> Tensor:
        return q.new_empty(rows, dtype=wide) if asked else nothing

    return Sums(
        q.new_empty(*rows, v.shape[-1]),
        statistic(1),
        statistic(1),
        # of its own, because it has a gradient
        q.new_empty(rows if wants & ENTROPY else 0, dtype=wide),
        statistic(wants & DISTANCE),
        statistic(wants & MOMENTS),
        statistic(wants & MOMENTS),
        statistic(wants & MOMENTS),
    )
