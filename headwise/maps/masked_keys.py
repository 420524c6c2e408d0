"""The weight that a policy keeps, where kernels or masks serve: Σ p = exp(lse under it − lse).

A window is two intervals of keys, and evicted keys are holes in a bias, so the engine that finds
a map's lse finds theirs, without a loop over what each row keeps. Of blocks and indices Triton's
kernels find it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headwise.core.policies import Evicted, Policy, Window
from headwise.core.problem import Terms
from headwise.core.row_sums import RowResults, RowTotals
from headwise.engines.sparse_call import fused_recall, fused_rows
from headwise.maps.backends import backend_for
from headwise.maps.coverage import Recall
from headwise.maps.region import Region


def kept(region: Region, totals: RowTotals, policy: Policy) -> Tensor | None:
    """The weight that a policy keeps, (B, Hq, N); None if blocks of keys must be searched."""
    if region.norms is not None:
        return None
    if not all(region.box.shape):
        return torch.zeros_like(totals.lse)
    masks = _masks(region, policy)
    if masks is None:
        terms = region.terms._replace(sinks=None)
        some = fused_rows(region.q, region.k, region.k[..., :0], terms, policy)
        return None if some is None else _weight(totals, some[0])
    held = []
    for terms in masks:
        part = replace(region, terms=terms._replace(sinks=None))
        found = backend_for(part).row_totals(part)
        assert isinstance(found, RowTotals)
        held.append(_share(totals, found.base, found.log_total))
    return torch.stack(held).sum(0).clamp_max(1)


def recall(region: Region, totals: RowTotals, policy: Policy) -> Recall | None:
    """What a policy found, against the best choice of as many keys; None as above."""
    if region.norms is not None or not all(region.box.shape):
        return None
    found = fused_recall(region.q, region.k, region.terms, policy)
    if found is None:
        return None
    keys, among, some, most = found
    best = _weight(totals, most).masked_fill(keys == 0, 0)
    return Recall(keys, among, _weight(totals, some), best)


def _weight(totals: RowTotals, some: RowResults) -> Tensor:
    """The weight of rows on some of their keys, from the results over those, without sinks."""
    assert some.log_total is not None
    return _share(totals, some.max_logit, some.log_total).clamp_max_(1)


def _share(totals: RowTotals, base: Tensor, log_total: Tensor) -> Tensor:
    """Σ p over keys of which the largest logit is `base` and the lse is above it by `log_total`."""
    above = base - totals.safe_base() + (log_total - totals.log_total)
    return above.masked_fill(base == -torch.inf, -torch.inf).exp()


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
