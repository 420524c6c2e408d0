"""Mean and variance of logits; for dot scores from the moments of the keys, not from pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.partial import Moments
from headwise.core.schedule import KEYS


def logit_moments(s: Tensor, seen: Tensor | None, room: Tensor) -> Moments:
    """Return each row's moments of visible logits in a block s (b, h, G, R, C), (b·h, G·R) each.

    `room` is working memory of s's size. Hidden logits may be -inf if `seen` has the shape of s.
    """
    if seen is None:
        count = s.new_full(s.shape[:-1], s.shape[-1])
        mean = s.mean(-1)
        spread = torch.sub(s, mean[..., None], out=room).square_().sum(-1)
    else:
        share = seen.to(s.dtype).expand(*seen.shape[:-1], s.shape[-1])
        count = share.sum(-1).expand(s.shape[:-1])
        s = s.masked_fill(~seen, 0) if seen.shape == s.shape else s
        mean = torch.mul(s, share, out=room).sum(-1) / count.clamp_min(1)
        spread = torch.sub(s, mean[..., None], out=room).mul_(share).square_().sum(-1)
    return Moments(*(x.flatten(2).flatten(0, 1) for x in (count, mean, spread)))


class KeyMoments:
    """Count, mean and scatter matrix of stretches of keys; k (heads, M, D)."""

    def __init__(self, k: Tensor) -> None:
        self.k = k
        self._known: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}

    def of_rows(self, keys: slice, q: Tensor) -> Moments:
        """The moments of q·k over keys that every row sees; q (heads, G·R, D)."""
        count, mean, scatter = self._stretch(keys.start, keys.stop)
        mean_logit = torch.bmm(q, mean[..., None])[..., 0]
        spread = (torch.bmm(q, scatter) * q).sum(-1)
        return Moments(torch.full_like(mean_logit, count), mean_logit, spread)

    def _stretch(self, first: int, last: int) -> tuple[int, Tensor, Tensor]:
        """Count, mean (heads, D), scatter (heads, D, D); long stretches from shorter ones."""
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
    """Join count, mean and scatter by Chan's formula for vectors."""
    count = a[0] + b[0]
    gap = b[1] - a[1]
    outer = gap[:, :, None] * gap[:, None, :]
    return count, a[1] + gap * (b[0] / count), a[2] + b[2] + outer * (a[0] * b[0] / count)
