"""Ulysses' attention: positions are exchanged for heads, computed by any engine, and come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from headwise import api, handover
from headwise.core.observation import check_sink_keys
from headwise.core.options import Options
from headwise.core.place import Place, as_four_axes
from headwise.core.problem import without_autocast
from headwise.distributed.descriptions import Values
from headwise.distributed.geometry import Geometry
from headwise.distributed.head_options import learned_tensors, options_of_part
from headwise.distributed.header import Header, agree, failing_together
from headwise.distributed.layouts import HeadShare, head_shares
from headwise.distributed.ranges import Range, Ranges, positions, size, take_ranges
from headwise.distributed.transport import RankGroup, packed, unpacked


class Axes(NamedTuple):
    """The heads that each rank computes of a tensor, and the positions that each rank holds."""

    heads: tuple[Range, ...]
    held: tuple[Ranges, ...]

    @property
    def shared(self) -> bool:
        """True if several ranks compute with the same heads, so that their gradients are added."""
        ends = [0, *(last for _, last in self.heads)]
        return any(i < end and i < j for (i, j), end in zip(self.heads, ends, strict=False))


def to_heads(ranks: RankGroup, axes: Sequence[Axes], tensors: Sequence[Tensor]) -> list[Tensor]:
    """All positions of this rank's heads (B, h, N, ·), from its positions of all (B, H, n, ·).

    Shared heads come in float32 or wider, so that no part of their gradient is rounded.
    """
    return list(_ToHeads.apply(ranks, axes, *tensors))  # type: ignore[no-untyped-call]


def to_rows(ranks: RankGroup, axes: Sequence[Axes], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The opposite: this rank's positions of all heads (B, H, n, ·)."""
    return list(_ToRows.apply(ranks, axes, *tensors))  # type: ignore[no-untyped-call]


def computed_together(
    ranks: RankGroup,
    compute: Callable[[], list[Tensor]],
    inputs: Sequence[Tensor],
    values: Mapping[str, Values],
) -> list[Tensor]:
    """The results of a function of these inputs; if it fails on one rank, or its backward does, or
    the `values` differ, every rank raises an error.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        call = ranks, compute, values
        return list(_Together.apply(call, *inputs))  # type: ignore[no-untyped-call]
    with failing_together(ranks, same=values):
        results = compute()
    return results


class _Together(torch.autograd.Function):
    """Runs the backward of a part of the graph inside its own, where an error can be caught."""

    @staticmethod
    def forward(ctx: Any, call: tuple[Any, ...], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ranks, compute, values = call
        with failing_together(ranks, same=values), torch.enable_grad():
            results = compute()
        ctx.part = ranks, results, inputs
        found = tuple(x.detach() for x in results)
        constant = [x for x, y in zip(found, results, strict=True) if not y.requires_grad]
        ctx.mark_non_differentiable(*constant)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.part is None:
            raise RuntimeError(
                "a second backward through this graph needs retain_graph=True before"
            )
        ranks, results, inputs = ctx.part
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        wanted = [x for x, need in zip(inputs, ctx.needs_input_grad[1:], strict=True) if need]
        with failing_together(ranks):
            pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None]
            outputs, given = zip(*pairs, strict=True) if pairs else ((), ())
            found = torch.autograd.grad(
                outputs, wanted, given, retain_graph=keep, allow_unused=True
            )
        ctx.part = ctx.part if keep else None
        each = iter(found)
        return None, *(next(each) if need else None for need in ctx.needs_input_grad[1:])


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: RankGroup, axes: Sequence[Axes], *tensors: Tensor) -> Any:
        ctx.call, ctx.dtypes = (ranks, axes), [x.dtype for x in tensors]
        found = _spread(ranks, axes, tensors)
        return tuple(_wide(x) if a.shared else x for x, a in zip(found, axes, strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ranks, axes = ctx.call
        found = _collected(ranks, axes, grads)
        return None, None, *(x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True))


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: RankGroup, axes: Sequence[Axes], *tensors: Tensor) -> Any:
        ctx.call = ranks, axes
        ctx.like = [(x.shape, x.dtype, x.device) for x in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_collected(ranks, axes, tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ranks, axes = ctx.call
        # A loss may use some results on one rank and others on the next.
        every = agree(ranks, Header("backward", own=[int(x is not None) for x in grads]))
        used = [any(flags) for flags in zip(*every, strict=True)]
        there, sent = [], []
        for grad, axis, (shape, dtype, device), use in zip(
            grads, axes, ctx.like, used, strict=True
        ):
            if use:
                heads = sum(last - first for first, last in axis.heads)
                rows = size(axis.held[ranks.own])
                empty = torch.zeros(shape[0], heads, rows, *shape[3:], dtype=dtype, device=device)
                there.append(axis)
                sent.append(empty if grad is None else grad)
        found = iter(_spread(ranks, there, sent))
        return None, None, *(next(found) if use else None for use in used)


def _spread(ranks: RankGroup, axes: Sequence[Axes], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Send each rank its heads of these positions, and join all positions of this rank's."""
    own, moved = ranks.own, list(zip(tensors, axes, strict=True))
    parts = {peer: [x[:, slice(*a.heads[peer])] for x, a in moved] for peer in range(ranks.count)}
    arrived = _exchanged(
        ranks,
        parts,
        lambda rank: [_like(x, _count(a.heads[own]), size(a.held[rank])) for x, a in moved],
    )
    found = []
    for number, a in enumerate(axes):
        order = torch.cat([positions(ranges) for ranges in a.held])
        together = torch.cat([part[number] for part in arrived], 2)
        found.append(together.index_select(2, order.argsort().to(together.device)))
    return found


def _collected(ranks: RankGroup, axes: Sequence[Axes], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Send each rank its positions of these heads, and add up all heads of this rank's."""
    own, moved = ranks.own, list(zip(tensors, axes, strict=True))
    parts = {
        peer: [take_ranges(x, 2, a.held[peer]) for x, a in moved] for peer in range(ranks.count)
    }
    arrived = _exchanged(
        ranks,
        parts,
        lambda rank: [_like(x, _count(a.heads[rank]), size(a.held[own])) for x, a in moved],
    )
    found = []
    for number, (x, a) in enumerate(moved):
        heads = max(last for _, last in a.heads)
        total = x.new_zeros(x.shape[0], heads, size(a.held[own]), x.shape[3])
        for (first, last), part in zip(a.heads, arrived, strict=True):
            total[:, first:last] += part[number]
        found.append(total)
    return found


def _exchanged(
    ranks: RankGroup,
    parts: dict[int, list[Tensor]],
    sent_by: Callable[[int], list[tuple[tuple[int, ...], torch.dtype]]],
) -> list[list[Tensor]]:
    """Send each rank its tensors, and return what each rank has sent here, in these shapes."""
    shapes = [sent_by(rank) for rank in range(ranks.count)]
    sends = {peer: packed(*parts[peer]) for peer in ranks.others}
    sizes = {peer: sum(_bytes(*each) for each in shapes[peer]) for peer in ranks.others}
    device = parts[ranks.own][0].device
    arrived = ranks.exchange(sends, sizes, device).take()
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    return [
        parts[rank] if rank == ranks.own else unpacked(arrived.get(rank, nothing), *shapes[rank])
        for rank in range(ranks.count)
    ]


def _like(x: Tensor, heads: int, rows: int) -> tuple[tuple[int, ...], torch.dtype]:
    return (x.shape[0], heads, rows, x.shape[3]), x.dtype


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _count(part: Range) -> int:
    return part[1] - part[0]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
        bias = as_four_axes(bias).to(q.device)
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
