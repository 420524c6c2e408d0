"""Maps of sequences that are split between ranks: each rank computes the weights of its own keys.

Queries move to the keys, of the heads that are asked for, and then only results: no rank holds the
keys of another, and none holds the matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.bias import Bias
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.core.place import as_four_axes
from headwise.core.problem import pose
from headwise.distributed.call_header import checked_part, described_options
from headwise.distributed.descriptions import Values, described, described_part
from headwise.distributed.head_options import learned_tensors
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Layout
from headwise.distributed.rank_attention import observe
from headwise.distributed.shards import check_layout, unshard
from headwise.distributed.transport import RankGroup
from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap
from headwise.maps.pooling import Cells, Reduction
from headwise.maps.region import Box
from headwise.score import Score


def attention_map(
    q: Tensor,
    k: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lse: Tensor | None = None,
) -> AttentionMap:
    """`hw.attention_map` of a sequence that is split between the ranks of a mesh.

    q (B, Hq, N, D), k (B, Hkv, M, D) and lse (B, Hq, N), if known, are this rank's part, as for
    `attention`. The map is of the whole sequence. Every rank must make it, and ask it the same: a
    rank computes the weights of its own keys, and all get the result. Each receives the queries of
    all ranks, so give it the heads that are looked at.
    """
    options = Options(score, mask, bias, softcap, sinks)
    ranks = RankGroup.of(mesh)
    layout, lengths = _agreed(ranks, q, k, layout, options, lse)
    if lse is None:
        with torch.no_grad():
            given: dict[str, Any] = {"mesh": mesh, "layout": layout, "stats": ("lse",)}
            lse = observe(q, k, k[..., :0], **given, **options.of_weights())[1].lse
    with torch.no_grad():
        whole = unshard(q.detach(), mesh, dim=2, layout=layout)
        totals = unshard(lse.detach(), mesh, dim=2, layout=layout)
        if isinstance(bias, Tensor):  # this rank's rows over all keys
            every_row = as_four_axes(bias).expand(-1, -1, q.shape[2], -1)
            options = options._replace(bias=unshard(every_row, mesh, dim=2, layout=layout))
    queries, keys, parts, at = whole.shape[2], sum(lengths), [], 0
    for first, last in layout.of_lengths(lengths)[ranks.own]:
        here = k[:, :, at : at + last - first].detach()
        at += last - first
        if last > first:
            problem = pose(
                "attention_map", whole, here, here[..., :0], options._replace(sinks=None),
                first_key=first, offset=keys - queries,
            )  # fmt: skip
            parts.append(KeyColumns(first, last, AttentionMap(problem, totals)))
    box = Box(*(range(n) for n in (*whole.shape[:3], keys)))
    return SplitMap(ranks, parts, SplitRegion(whole, box, whole[..., :0]), totals)


def effect_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    mesh: DeviceMesh,
    layout: Layout | None = None,
    score: Score | None = None,
    mask: Mask | None = None,
    bias: Bias | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> EffectMap:
    """`hw.effect_map` of a sequence that is split between the ranks of a mesh.

    q, k, v and grad are this rank's part, as for `attention`. Every rank must make the map, and
    gets all of the sequence's queries, keys, values and gradients, so give it the heads that are
    looked at. The map is of the whole sequence, and can then be asked by one rank alone.
    """
    layout = check_layout(layout)
    if isinstance(bias, Tensor):  # this rank's rows over all keys
        bias = as_four_axes(bias).expand(-1, -1, q.shape[2], -1)
        bias = unshard(bias.detach(), mesh, dim=2, layout=layout)
    with torch.no_grad():
        whole = [unshard(x.detach(), mesh, dim=2, layout=layout) for x in (q, k, v, grad)]
    options = Options(score, mask, bias, softcap, sinks)
    return EffectMap(pose("effect_map", whole[0], whole[1], whole[2], options), whole[3])


def _agreed(
    ranks: RankGroup, q: Tensor, k: Tensor, layout: Layout | None, options: Options,
    lse: Tensor | None,
) -> tuple[Layout, list[int]]:  # fmt: skip
    """The layout, and the keys of each rank; an error on every rank unless they ask for one map."""
    header, failure = Header("map"), None
    try:
        layout = check_layout(layout)
        problem = checked_part("attention_map", (q, k, k[..., :0]), options)
        parts = zip("qk", (q, k), strict=True)
        same: dict[str, str | Values] = {n: described_part(x.detach(), 2) for n, x in parts}
        same |= {"layout": described(layout), "lse": "None" if lse is None else "given"}
        same |= described_options(problem, options)
        same |= {f"the values of {name}": Values(x) for name, x in learned_tensors(options).items()}
        header = Header("map", same, (k.shape[2],))
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    lengths = [own[0] for own in agree(ranks, header, failure)]
    assert layout is not None
    return layout, lengths


@dataclass(frozen=True, eq=False)
class KeyColumns:
    """The columns [first, last) of a map, over all of its rows."""

    first: int
    last: int
    weights: AttentionMap


@dataclass(frozen=True, eq=False)
class SplitRegion:
    """The size of a split map, and its queries; `v` is empty, as values are not known."""

    q: Tensor
    box: Box
    v: Tensor
    norms: None = None

    @property
    def wide(self) -> torch.dtype:
        """The dtype that weights are computed in."""
        return torch.promote_types(self.q.dtype, torch.float32)


class SplitMap(AttentionMap):
    """The map of a split sequence: what is asked of it is asked on every rank."""

    _region: SplitRegion  # type: ignore[assignment]

    def __init__(
        self, ranks: RankGroup, parts: Sequence[KeyColumns], region: SplitRegion, lse: Tensor,
        of: str = "",
    ) -> None:  # fmt: skip
        self._ranks, self._parts, self._region, self._lse = ranks, parts, region, lse
        self._of = of  # the head, if it is the map of one

    @property
    def region(self) -> Any:
        """The size of the map; ValueError if what it depends on has been written to."""
        for part in self._parts:
            assert part.weights.region is not None
        return self._region

    @property
    def lse(self) -> Tensor:
        return self._lse

    def head(self, batch: int, head: int) -> SplitMap:
        b, h, *_ = self._parse((batch, head), f".head({batch!r}, {head!r})")
        assert isinstance(b, int)
        assert isinstance(h, int)
        q, box, v = self._region.q[b : b + 1, h : h + 1], self._region.box, self._region.v
        region = SplitRegion(
            q, box._replace(batch=range(1), heads=range(1)), v[b : b + 1, h : h + 1]
        )
        parts = [replace(part, weights=part.weights.head(b, h)) for part in self._parts]
        lse = self._lse[b : b + 1, h : h + 1]
        return SplitMap(self._ranks, parts, region, lse, f" of head {(b, h)}")

    def eviction_scores(self, recent: int | None = None, smooth: int = 1) -> Tensor:
        raise self._error(
            "eviction scores are of a cache, which is not split between ranks; use .received()", ""
        )

    def _fill(self, box: Box) -> Tensor:
        self._asks(f"the weights in {box}")
        found = self._zeros(*box.shape)
        for part, keys, own in self._inside(box):
            found[..., keys] = part._fill(own)
        return self._together(found, dist.ReduceOp.SUM)

    def _received(self, box: Box) -> Tensor:
        self._asks(f"the weights that keys receive in {box}")
        found = self._zeros(*box.shape[:2], len(box.keys))
        for part, keys, own in self._inside(box):
            found[..., keys] = part._received(own)
        return self._together(found, dist.ReduceOp.SUM)

    def _pool(self, box: Box, rows: Cells, keys: Cells, how: Reduction) -> Tensor:
        self._asks(f"the {how} of {len(rows)} by {len(keys)} cells of {box}")
        found = self._zeros(*box.shape[:2], len(rows), len(keys))
        widths = torch.tensor(keys.widths, dtype=self.dtype, device=found.device)
        for part, here, own in self._inside(box):
            cells = keys.touched(here)
            inner = keys.edges[cells.start + 1 : cells.stop]
            cut = Cells([edge - here.start for edge in (here.start, *inner, here.stop)])
            pooled, place = part._pool(own, rows, cut, how), found[..., cells]
            if how == "mean":  # of the keys that are here; a cell may have others elsewhere
                mine = torch.tensor(cut.widths, dtype=self.dtype, device=found.device)
                place += pooled * mine / widths[cells]
            else:
                torch.maximum(place, pooled, out=place)
        how_joined = dist.ReduceOp.SUM if how == "mean" else dist.ReduceOp.MAX
        return self._together(found, how_joined)

    def _top(self, k: int) -> tuple[Tensor, Tensor]:
        self._asks(f"the {k} largest weights")
        shape = (*self.shape[:3], k)
        device = self._region.q.device
        weights = [torch.zeros(shape, dtype=self.dtype, device=device)]
        keys = [torch.full(shape, -1, dtype=torch.int64, device=device)]
        for part in self._parts:
            found, at = part.weights.top(min(k, part.last - part.first))
            weights.append(found)
            keys.append(torch.where(at < 0, at, at + part.first))
        mine = _largest(torch.cat(weights, -1), torch.cat(keys, -1), k)
        carrier = self._ranks.carrier(device)
        every: list[list[Tensor]] = []
        for x in mine:
            parts = [torch.empty_like(x, device=carrier) for _ in range(self._ranks.count)]
            with self._ranks.rank_errors(None):
                dist.all_gather(parts, x.to(carrier).contiguous(), group=self._ranks.group)
            every.append([part.to(device) for part in parts])
        return _largest(torch.cat(every[0], -1), torch.cat(every[1], -1), k)

    def _asks(self, what: str) -> None:
        """Raise ValueError on every rank unless all ask the same."""
        agree(self._ranks, Header("map", {"the question": what + self._of}))

    def _inside(self, box: Box) -> Iterator[tuple[AttentionMap, slice, Box]]:
        """The parts of a rectangle that are here: its columns, and the part's own."""
        for part in self._parts:
            first = max(part.first, box.keys.start)
            last = min(part.last, box.keys.stop)
            if first < last:
                start = box.keys.start
                own = box._replace(keys=range(first - part.first, last - part.first))
                yield part.weights, slice(first - start, last - start), own

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self._region.q.device)

    def _together(self, found: Tensor, how: Any) -> Tensor:
        """The findings of all ranks, joined."""
        moved = found.to(self._ranks.carrier(found.device)).contiguous()
        with self._ranks.rank_errors(None):
            dist.all_reduce(moved, op=how, group=self._ranks.group)
        return moved.to(found.device)


def _largest(weights: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest weights (..., k) and their keys; those without a key (-1) come last."""
    order = weights.masked_fill(keys < 0, -1).argsort(dim=-1, descending=True, stable=True)[..., :k]
    return weights.gather(-1, order), keys.gather(-1, order)
