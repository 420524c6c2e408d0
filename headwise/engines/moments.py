"""Mean and variance of logits without visiting pairs: for dot scores they follow from the keys' own."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.partial import Moments
from headwise.schedule import KEYS

def logit_moments(s: Tensor) -> Moments:
    """The moments of each row of a block over its visible logits; s (..., C), -inf where hidden."""
    hidden = s == -torch.inf
    count = s.shape[-1] - hidden.sum(-1).to(s.dtype)
    mean = s.masked_fill(hidden, 0).sum(-1) / count.clamp_min(1)
    return count, mean, (s - mean[..., None]).masked_fill_(hidden, 0).square_().sum(-1)


class KeyMoments:
    """Count, mean and scatter matrix of stretches of keys; k (heads, M, D)."""

    def __init__(self, k: Tensor) -> None:
        self.k = k
        self._known: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}

    def of_rows(self, keys: slice, q: Tensor) -> Moments:
        """The moments of q·k over a stretch that every row sees whole; q (heads, G·R, D)."""
        count, mean, scatter = self._stretch(keys.start, keys.stop)
        mean_logit = torch.bmm(q, mean[..., None])[..., 0]
        return torch.full_like(mean_logit, count), mean_logit, (torch.bmm(q, scatter) * q).sum(-1)

    def _stretch(self, first: int, last: int) -> tuple[int, Tensor, Tensor]:
        """Count, mean (heads, D) and scatter about it (heads, D, D); long stretches from shorter ones."""
        if (first, last) in self._known:
            return self._known[first, last]
        cut = (last - 1) // KEYS * KEYS
        if cut <= first:
            k = self.k[:, first:last]
            mean = k.mean(1)
            centred = k - mean[:, None]
            found = last - first, mean, torch.bmm(centred.transpose(1, 2), centred)
        else:
            found = _join_keys(self._stretch(first, cut), self._stretch(cut, last))
        self._known[first, last] = found
        return found


def _join_keys(
    a: tuple[int, Tensor, Tensor], b: tuple[int, Tensor, Tensor]
) -> tuple[int, Tensor, Tensor]:
    """Chan's formula for vectors."""
    count = a[0] + b[0]
    gap = b[1] - a[1]
    outer = gap[:, :, None] * gap[:, None, :]
    return count, a[1] + gap * (b[0] / count), a[2] + b[2] + outer * (a[0] * b[0] / count)
