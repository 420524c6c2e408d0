"""The weight that a policy keeps, where the policy is a mask: Σ p = exp(lse under it − lse).

A window is two intervals of keys, and evicted keys are holes in a bias, so the engine that finds
a map's lse finds theirs, without a loop over what each row keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.core.policies import Evicted, Policy, Window
from headwise.core.problem import Terms
from headwise.core.row_sums import RowTotals
from headwise.maps.backends import backend_for
from headwise.maps.region import Region


def kept(region: Region, totals: RowTotals, policy: Policy) -> Tensor | None:
    """The weight that a policy keeps, (B, Hq, N); None if it is not a mask in linear memory."""
    masks = _masks(region, policy)
    if masks is None or region.norms is not None:
        return None
    if not all(region.box.shape):
        return torch.zeros_like(totals.lse)
    held = []
    for terms in masks:
        part = replace(region, terms=terms._replace(sinks=None))
        found = backend_for(part).row_totals(part)
        assert isinstance(found, RowTotals)
        above = found.base - totals.safe_base() + (found.log_total - totals.log_total)
        held.append(above.masked_fill(found.base == -torch.inf, -torch.inf).exp())
    return torch.stack(held).sum(0).clamp_max(1)


def _masks(region: Region, policy: Policy) -> list[Terms] | None:
    """Disjoint masks that together show what the policy keeps of what the region's mask shows."""
    terms = region.terms
    if isinstance(policy, Evicted):
        return [terms._replace(bias=_with_holes(region, policy))]
    if not isinstance(policy, Window) or terms.dense is not None:
        return None
    pieces = [_cut(region, *band) for band in _bands(region, policy)]
    if sum(len(piece) for piece in pieces) <= 2:
        return [terms._replace(intervals=torch.cat(pieces))]
    return [terms._replace(intervals=piece) for piece in pieces]


def _bands(region: Region, policy: Window) -> Iterator[tuple[Tensor, Tensor]]:
    """Disjoint intervals of a window and the first keys, as bounds (B|1, 1, N) among the keys."""
    terms, zero = region.terms, -region.terms.first_key
    own = terms.position[:, None] - terms.first_key
    first, last = own - policy.left, own + 1
    if not policy.sinks:
        yield first, last
        return
    stop = torch.full_like(own, policy.sinks - terms.first_key)
    joined = first <= stop
    yield torch.where(joined, zero, first), torch.where(joined, last.maximum(stop), last)
    yield torch.full_like(own, zero), torch.where(joined, zero, stop)


def _cut(region: Region, first: Tensor, last: Tensor) -> Tensor:
    """The region's intervals, or all keys, within some bounds: (P, 2, B|1, Hq|1, N)."""
    keys, given = region.k.shape[2], region.terms.intervals
    first, last = first.clamp(0, keys), last.clamp(0, keys)
    if given is not None:
        first, last = given[:, 0].maximum(first), given[:, 1].minimum(last)
    else:
        first, last = first[None], last[None]
    return torch.stack((first, last.maximum(first)), 1)


def _with_holes(region: Region, policy: Evicted) -> Tensor:
    """The region's bias with −inf for evicted keys, (B|1, Hq|1, N|1, M)."""
    stays, bias = policy.kept().to(region.q.device), region.terms.bias
    heads, keys = region.q.shape[1], region.k.shape[2]
    if 1 < stays.shape[1] < heads:
        stays = stays.repeat_interleave(heads // stays.shape[1], 1)
    stays = torch.nn.functional.pad(stays, (0, keys - stays.shape[-1]), value=True)
    holes = torch.where(stays, 0.0, -torch.inf).to(region.q.dtype if bias is None else bias.dtype)
    return holes[:, :, None] if bias is None else bias + holes[:, :, None]
