"""Scores that say which keys of a cache may go: the mean weight that each of them receives."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.intervals import rows_per_key
from headwise.maps.region import Region


def mean_received(received: Tensor, region: Region) -> Tensor:
    """Column sums (B, Hq, M) as means over the rows that see each key; 0 if none does."""
    return received / rows_that_see(region).clamp_min(1)


def rows_that_see(region: Region) -> Tensor:
    """The number of a region's rows that see each key, (B|1, Hq|1, M)."""
    _, _, rows, keys = region.box.shape
    terms = region.terms
    if terms.dense is not None:
        seen = terms.dense.expand(*terms.dense.shape[:2], rows, keys)
        return seen.sum(-2)
    if terms.intervals is None:
        return torch.full((1, 1, keys), rows, device=region.q.device)
    return rows_per_key(terms.intervals, keys)


def smoothed(scores: Tensor, width: int) -> Tensor:
    """The mean of each score (B, H, M) and its neighbours, `width` of them; 0 beyond the ends."""
    if width == 1 or scores.numel() == 0:
        return scores
    return F.avg_pool1d(scores, width, stride=1, padding=width // 2)


def per_key_head(scores: Tensor, group: int) -> Tensor:
    """The mean over the query heads that share a key head, (B, Hkv, M)."""
    shared: Tensor = scores.unflatten(1, (-1, group)).mean(2)
    return shared
