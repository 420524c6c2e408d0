"""Which rows are padding: tokens that no row may look at, not even they themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.patterns import Causal, Window
from headwise.core.place import Place


def padding_rows(mask: Mask | None, q: Tensor, k: Tensor) -> Tensor | None:
    """(B, N) bool for q (B, Hq, N, D) among its own keys (B, Hkv, M, D); None: there is none.

    The queries are the last N of the M tokens, where the mask does not say otherwise.

    >>> import headwise as hw
    >>> x = torch.zeros(2, 1, 4, 8)
    >>> padding_rows(hw.mask.lengths([4, 3]), x, x).int()
    tensor([[0, 0, 0, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    if mask is None or isinstance(mask, Causal | Window):
        return None  # they hide no token from itself
    place = Place.of(q, k)
    shown = _shown(mask, place)  # (B|1, M): somebody may look at the key
    if shown is None:
        return None
    stands = mask.alignment(place)
    first = stands if isinstance(stands, int) else place.offset
    return ~shown[:, first : first + place.queries].expand(q.shape[0], -1)


def _shown(mask: Mask, place: Place) -> Tensor | None:
    if mask.pieces == 0:
        dense = mask.to_dense(place)
        if dense.shape[-2:] != (place.queries, place.keys):
            dense = dense.expand(*dense.shape[:2], place.queries, place.keys)
        return dense.any(2).any(1)
    edges = torch.zeros(1, place.keys + 1, dtype=torch.int32, device=place.device)
    for first, last in mask.intervals(place):
        first, last = (x.clamp(0, place.keys) for x in torch.broadcast_tensors(first, last))
        first, last = (x.reshape(-1, *x.shape[-2:]).flatten(1) for x in (first, last))
        full = last > first
        # +1 where an interval opens, -1 where it closes: a running sum counts those that are open
        marks = torch.zeros(first.shape[0], place.keys + 1, dtype=torch.int32, device=place.device)
        marks.scatter_add_(1, first.long(), full.int())
        marks.scatter_add_(1, last.long(), -full.int())
        edges = edges + marks
    return edges.cumsum(1)[:, :-1] > 0
