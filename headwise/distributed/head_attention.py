"""Ulysses' attention: positions are exchanged for heads, computed by any engine, and come back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headwise import api, handover
from headwise.core.observation import check_sink_keys
from headwise.core.options import Options
from headwise.core.place import Place, four
from headwise.core.problem import without_autocast
from headwise.distributed.descriptions import Values
from headwise.distributed.geometry import Geometry
from headwise.distributed.head_exchange import Axes, computed_together, to_heads, to_rows
from headwise.distributed.head_options import learned_tensors, options_of_part
from headwise.distributed.layouts import HeadShare, head_shares
from headwise.distributed.transport import RankGroup


def attend_by_heads(
    ranks: RankGroup,
    geometry: Geometry,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: Options,
    names: tuple[str, ...],
    sink_keys: int,
    values: Mapping[str, Values],
) -> tuple[Tensor, dict[str, Tensor]]:
    """Out and the named statistics of this rank's rows; the rows of a rank's heads are computed
    there, in the engines that serve any call.

    q, k, v and a bias tensor are this rank's part of the sequence; `values` those of the learned
    options, which all ranks should have.
    """
    q, k, v = tensors
    shares = head_shares(q.shape[1], k.shape[1], ranks.count)
    of_queries = Axes(tuple(share.queries for share in shares), geometry.rows)
    of_keys = Axes(tuple(share.keys for share in shares), geometry.keys)
    moved, axes, bias = [q, k, v], [of_queries, of_keys, of_keys], options.bias
    if isinstance(bias, Tensor):
        bias = four(bias).to(q.device)
        moved.append(bias.expand(-1, -1, q.shape[2], -1))
        one = Axes(((0, 1),) * ranks.count, geometry.rows)
        axes.append(of_queries if bias.shape[1] > 1 else one)
    moved = to_heads(ranks, axes, moved)

    def compute() -> list[Tensor]:
        q, k, v, *rest = moved
        given = options._replace(bias=rest[0] if rest else bias)
        return _computed(geometry.whole, shares[ranks.own], (q, k, v), given, names, sink_keys)

    results = computed_together(
        ranks, compute, [*moved, *learned_tensors(options).values()], values
    )
    own = Axes(of_queries.heads, geometry.rows)
    out, *found = to_rows(ranks, [own] * len(results), results)
    return out, dict(zip(names, found[0].unbind(-1), strict=True)) if names else {}


def _computed(
    whole: Place, share: HeadShare, tensors: tuple[Tensor, Tensor, Tensor],
    options: Options, names: tuple[str, ...], sink_keys: int,
) -> list[Tensor]:  # fmt: skip
    """Out (B, h, N, Dv) and, if any are named, the statistics (B, h, N, names)."""
    q, k, v = tensors
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    if q.shape[1] == 0:  # more ranks than heads; its backward must still be called
        empty = q.sum(-1, keepdim=True) + sum(
            x.flatten()[:0].sum() for x in learned_tensors(options).values()
        )
        out = empty.expand(*empty.shape[:3], v.shape[-1])
        return [out, empty.to(wide).expand(*empty.shape[:3], len(names))][: 1 + bool(names)]
    part = options_of_part(whole, range(whole.batch), range(*share.queries), options)
    if isinstance(options.bias, Tensor):  # the exchange has cut it
        part = part._replace(bias=options.bias)
    q = q.to(k.dtype)  # shared keys are wider
    alone, unwatched = handover.splitting(None), torch._C.DisableTorchFunction()
    with alone, unwatched, without_autocast(q.device):
        if not names:
            return [api.attention(q, k, v, **part.keywords()).to(dtype)]
        sink_keys = check_sink_keys(sink_keys, k.shape[2])
        out, seen = api.observe(q, k, v, **part.keywords(), stats=names, sink_keys=sink_keys)
    return [out.to(dtype), torch.stack([seen.values[name].to(wide) for name in names], -1)]
