"""Attention of DTensors that are sharded over batch entries, heads or positions.

Each rank computes its own part with the options cut to it; only a sharded sequence needs messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise import api
from headwise.bias import ALiBi, RelativeBuckets
from headwise.core.observation import Observation, check_statistics, sample_rows
from headwise.core.options import Options
from headwise.core.place import Place, as_four_axes
from headwise.core.problem import pose, restate
from headwise.core.spans import SPAN_PREFIX, Spans, check_spans
from headwise.distributed import rank_attention
from headwise.distributed.head_options import learned_tensors, options_of_part
from headwise.distributed.header import Header, agree
from headwise.distributed.ranges import take_ranges
from headwise.distributed.shards import check_layout
from headwise.distributed.transport import RankGroup
from headwise.dropout import Dropout
from headwise.score import Additive, Cosine, General

BATCH, HEADS, POSITIONS = 0, 1, 2  # axes of q, k and v


class DTensorCalls:
    """Calls of `attention` and `observe` whose q, k and v are DTensors."""

    def attention(self, q: Any, k: Any, v: Any, options: Options, **asked: Any) -> Any:
        """The output as a DTensor (B, Hq, N, Dv), placed like q."""
        call = ShardedCall.of(_called("attention", asked), q, k, v)
        part, given, asked = call.local_or_tell((q, k, v), options, asked)
        if not part[0].shape[1]:
            return call.whole(_nothing(part, given, part[2].shape[-1]))
        attend: Callable[..., Any] = api.attention
        if call.sequence is not None:
            attend = rank_attention.attention
        return call.whole(attend(*part, **given.keywords(), **asked))

    def observe(
        self, q: Any, k: Any, v: Any, options: Options, **asked: Any
    ) -> tuple[Any, Observation]:
        """The output and the statistics as DTensors, placed like q."""
        call = ShardedCall.of(_called("observe", asked), q, k, v)
        if call.sequence is not None and asked.get("rows") is not None:
            raise call.error(
                "rows= samples the rows of one rank, and the sequence of these DTensors is "
                "sharded; give hw.distributed.observe this rank's part, q.to_local()"
            )
        part, given, asked = call.local_or_tell((q, k, v), options, asked)
        if not part[0].shape[1]:
            out = _nothing(part, given, part[2].shape[-1])
            return call.whole(out), call.unseen(out, asked)
        look: Callable[..., Any] = api.observe
        if call.sequence is not None:
            look = rank_attention.observe
        out, seen = look(*part, **given.keywords(), **asked)
        values = {name: call.whole(x) for name, x in seen.values.items()}
        return call.whole(out), Observation(values, call.whole(seen.highest), seen.rows)


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """The part of a call that this rank computes."""

    kind: str  # the function's name in `hw`
    tensors: tuple[Any, Any, Any]
    mesh: DeviceMesh
    placements: tuple[Any, ...]  # of q and of the results
    key_placements: tuple[Any, ...]
    batch: range
    heads: range
    rows: range
    sequence: int | None  # the dimension of the mesh over which positions are sharded

    @classmethod
    def of(cls, kind: str, q: Any, k: Any, v: Any) -> ShardedCall:
        """The part of this rank; ValueError if these can't be one call."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def refuse(reason: str) -> ValueError:
            return ValueError(f"{reason}\n  in {restate(kind, q, k, v)}")

        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, DTensor):
                raise refuse(
                    f"{name} is a plain tensor beside DTensors; use DTensor.from_local or "
                    "distribute_tensor"
                )
            if x.device_mesh != q.device_mesh or x.ndim != 4:
                raise refuse(
                    "DTensors of one call have the axes (batch, heads, length, width) and one mesh"
                )
        mesh: DeviceMesh = q.device_mesh
        placed = tuple(
            p if type(p) is Shard and p.dim <= POSITIONS else Replicate() for p in q.placements
        )
        split = {
            axis: [d for d, p in enumerate(placed) if p.is_shard(axis)]
            for axis in (BATCH, HEADS, POSITIONS)
        }
        if len(split[POSITIONS]) > 1:
            raise refuse(f"the sequence is sharded over {len(split[POSITIONS])} mesh dimensions")
        if q.shape[1] % max(1, k.shape[1]):
            raise refuse(f"{q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
        ranks = 1
        for dimension in split[HEADS]:
            ranks *= mesh.size(dimension)
        whole_groups = k.shape[1] % ranks == 0
        keys = tuple(Replicate() if p.is_shard(HEADS) and not whole_groups else p for p in placed)
        batch, heads, rows = (held_range(q.shape[axis], mesh, split[axis]) for axis in split)
        sequence = split[POSITIONS][0] if split[POSITIONS] else None
        return cls(kind, (q, k, v), mesh, placed, keys, batch, heads, rows, sequence)

    def unseen(self, out: Tensor, asked: dict[str, Any]) -> Observation:
        """The statistics of a rank without heads."""
        wide = torch.promote_types(out.dtype, torch.float32)
        sampled = sample_rows(asked.get("rows"), out.shape[2], out.device)
        none = out.sum(-1, dtype=wide)
        none = none if sampled is None else none.index_select(2, sampled)
        names = check_statistics(asked.get("stats"))
        names = (*names, *(SPAN_PREFIX + name for name in asked.get("spans") or ()))
        whole = self.whole(none)
        return Observation(dict.fromkeys(names, whole), whole, sampled)

    def error(self, reason: str) -> ValueError:
        """A ValueError that restates the call."""
        return ValueError(f"{reason}\n  in {restate(self.kind, *self.tensors)}")

    def local_or_tell(
        self, tensors: tuple[Any, Any, Any], options: Options, asked: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Options, dict[str, Any]]:
        """`local`; if it fails, the ranks that wait for this one's positions hear of it first."""
        try:
            return self.local(tensors, options, asked)
        except Exception as error:
            if self.sequence is not None:
                kind = self.kind.removeprefix("distributed.")
                agree(RankGroup(self.mesh.get_group(self.sequence)), Header(kind), error)
            raise

    def local(
        self, tensors: tuple[Any, Any, Any], options: Options, asked: Mapping[str, Any]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Options, dict[str, Any]]:
        """This rank's q, k and v, and the options and other arguments that belong to them."""
        q, k, v = tensors
        batch, heads, queries, _ = q.shape
        place = Place(batch, heads, queries, k.shape[2], offset=k.shape[2] - queries)
        given, more = self._replicated(options), dict(asked)
        self._check(given, more.get("spans"))
        rate = given.dropout
        if rate and (not isinstance(rate, Dropout) or rate.seed is None):
            given = given._replace(dropout=self._seeded(rate))
        given = options_of_part(place, self.batch, self.heads, given)
        if more.get("spans"):
            more["spans"] = _spans_of(more["spans"], self.batch)
        given, more = self._over_positions(given, more)
        q = q.redistribute(placements=self.placements).to_local()
        k, v = (self._keys(x, heads) for x in (k, v))
        return (q, k, v), given, more

    def _check(self, given: Options, spans: Spans | None) -> None:
        """Raise ValueError for options that do not fit the whole call, before they are cut."""
        like = [
            torch.empty((), dtype=x.dtype, device=x.to_local().device).expand(x.shape)
            for x in self.tensors
        ]
        q, k, v = like
        pose(self.kind, q, k, v, given._replace(score=None, dropout=0.0))
        q, k, v = (x[:, :, :1] for x in like)
        pose(self.kind, q, k, v, Options(score=given.score))  # it may widen q
        if spans:
            check_spans(spans, len(like[0]))

    def _keys(self, x: Any, heads: int) -> Tensor:
        """This rank's keys or values: those of its query heads."""
        from torch.distributed.tensor import Partial

        kv_heads: int = x.shape[1]
        apart = self.key_placements != self.placements
        grads = [
            Partial() if apart and p.is_shard(HEADS) else own
            for p, own in zip(self.placements, self.key_placements, strict=True)
        ]
        local: Tensor = x.redistribute(placements=self.key_placements).to_local(
            grad_placements=grads
        )
        if not apart or len(self.heads) == heads:
            return local
        group = heads // kv_heads
        first, last = self.heads.start // group, -(-self.heads.stop // group)
        used = [head // group - first for head in self.heads]
        part = local[:, first:last]
        if len(used) % max(1, last - first) == 0:
            each = len(used) // max(1, last - first)
            if used == [n // each for n in range(len(used))]:
                return part
        return part.index_select(1, torch.tensor(used, device=part.device))  # one per query head

    def _over_positions(
        self, given: Options, more: dict[str, Any]
    ) -> tuple[Options, dict[str, Any]]:
        """The arguments of a sharded sequence; without one, mesh, layout and move are refused."""
        if self.sequence is None:
            if more.keys() & {"mesh", "layout", "move"}:
                raise self.error(
                    "hw.distributed takes DTensors whose positions (axis 2) are sharded over "
                    f"mesh=, and q is placed {self.placements}; "
                    f"use {self.kind.replace('distributed', 'hw')}"
                )
            return given, more
        group = self.mesh.get_group(self.sequence)
        mesh = more.get("mesh")
        if mesh is None:
            mesh = DeviceMesh.from_group(group, self.mesh.device_type)
        elif mesh.ndim != 1 or mesh.get_group().group_name != group.group_name:
            raise self.error("mesh= must be the dimension over which the positions are sharded")
        bias = given.bias
        if isinstance(bias, Tensor) and as_four_axes(bias).shape[2] > 1:
            length, count = self.tensors[0].shape[2], self.mesh.size(self.sequence)
            chunk = -(-length // count)  # as DTensor cuts it
            lengths = [max(0, min(chunk, length - chunk * rank)) for rank in range(count)]
            held = check_layout(more.get("layout")).of_lengths(lengths)
            bias = take_ranges(as_four_axes(bias), 2, held[self.mesh.get_local_rank(self.sequence)])
        return given._replace(bias=bias), more | {"mesh": mesh}

    def _seeded(self, dropout: float | Dropout) -> Dropout:
        """The dropout with a seed that all ranks of the mesh have: the first rank's."""
        found = dropout if isinstance(dropout, Dropout) else Dropout(dropout)
        seed = found.seed_on(torch.device("cpu")).flatten()[:1]
        for dimension in range(self.mesh.ndim):
            group = self.mesh.get_group(dimension)
            device = (
                "cpu" if "gloo" in str(dist.get_backend_config(group)) else self.mesh.device_type
            )
            moved = seed.to(device)
            dist.broadcast(moved, dist.get_global_rank(group, 0), group=group)
            seed = moved.cpu()
        return replace(found, seed=int(seed))

    def _replicated(self, options: Options) -> Options:
        """The options, with all values of those that hold DTensors on every rank."""
        score, bias = options.score, options.bias
        if isinstance(score, Additive | General):
            score = type(score)(self._all_of(score.weight))
        elif isinstance(score, Cosine):
            score = Cosine(self._all_of(score.temperature))
        if isinstance(bias, ALiBi):
            bias = ALiBi(self._all_of(bias.slopes))
        elif isinstance(bias, RelativeBuckets):
            bias = replace(bias, table=self._all_of(bias.table))
        else:
            bias = self._all_of(bias)
        return options._replace(score=score, bias=bias, sinks=self._all_of(options.sinks))

    def _all_of(self, x: Any) -> Any:
        """All values of a DTensor; its gradient is the sum over the parts that ranks compute."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        if not isinstance(x, DTensor):
            return x
        names = [self.mesh.get_group(d).group_name for d in range(self.mesh.ndim)]
        split = {name for name, p in zip(names, self.placements, strict=True) if p.is_shard()}
        mine = x.device_mesh
        groups = [mine.get_group(d).group_name for d in range(mine.ndim)]
        grads = [Partial() if name in split else Replicate() for name in groups]
        return x.redistribute(placements=[Replicate()] * mine.ndim).to_local(grad_placements=grads)

    def whole(self, x: Tensor) -> Any:
        """A result of this rank's rows and heads as part of the whole (B, Hq, N, ...)."""
        from torch.distributed.tensor import DTensor

        q = self.tensors[0]
        rows = q.shape[2] if x.shape[2] == len(self.rows) else x.shape[2]
        shape = torch.Size((*q.shape[:2], rows, *x.shape[3:]))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, self.placements, run_check=False, shape=shape, stride=strides
        )


def local_part(
    q: Tensor, k: Tensor, v: Tensor, options: Options
) -> tuple[tuple[Tensor, Tensor, Tensor], Options, tuple[int, int]]:
    """This rank's part of a call on DTensors: q, k, v, the options, its first head and all heads.

    ValueError if the positions are sharded: then a part is not a call of its own.
    """
    call = ShardedCall.of("observe", q, k, v)
    if call.sequence is not None:
        raise call.error("the positions of these DTensors are sharded")
    part, given, _ = call.local((q, k, v), options, {})
    return part, given, (call.heads.start, q.shape[1])


def held_range(length: int, mesh: DeviceMesh, dimensions: list[int]) -> range:
    """The part of an axis that this rank holds, by the way in which DTensors are sharded."""
    first = 0
    for dimension in dimensions:
        chunk = -(-length // mesh.size(dimension))
        start = min(length, chunk * mesh.get_local_rank(dimension))
        first, length = first + start, min(chunk, length - start)
    return range(first, first + length)


def _called(function: str, asked: Mapping[str, Any]) -> str:
    """The function that the user called: those of hw.distributed take a mesh."""
    return f"distributed.{function}" if "mesh" in asked else function


def _spans_of(spans: Spans, batch: range) -> dict[str, Any]:
    """Spans of these batch entries."""

    def part(end: Any) -> Any:
        many = isinstance(end, Tensor) and end.ndim == 1 and len(end) > 1
        return end[batch.start : batch.stop] if many else end

    return {name: (part(first), part(last)) for name, (first, last) in spans.items()}


def _nothing(part: tuple[Tensor, Tensor, Tensor], given: Options, width: int) -> Tensor:
    """The output of a rank without heads; its backward must be called like the others'."""
    q, k, v = part
    used = (k, v, *learned_tensors(given).values())
    empty = q.sum(-1, keepdim=True) + sum(x.flatten()[:0].sum() for x in used)
    return empty.expand(*empty.shape[:3], width)
