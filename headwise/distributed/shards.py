"""Tensors cut into the parts of a layout, and put together again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from headwise.core.arguments import is_integer
from headwise.distributed.descriptions import described, described_part
from headwise.distributed.header import Header, agree
from headwise.distributed.layouts import Contiguous, Layout
from headwise.distributed.ranges import Ranges, positions, take_ranges
from headwise.distributed.transport import RankGroup, packed, unpacked


def shard(x: Tensor, mesh: DeviceMesh, *, dim: int, layout: Layout | None = None) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole: inputs, positions, labels.

    `dim` is the axis of the sequence. The length need not be a multiple of the number of ranks. The
    positions that a rank holds are `shard(torch.arange(length), mesh, dim=0, layout=layout)`.
    """
    ranks = RankGroup.of(mesh)
    dim = _axis(x, dim)
    return take_ranges(x, dim, check_layout(layout).pieces(x.shape[dim], ranks.count)[ranks.own])


def unshard(x: Tensor, mesh: DeviceMesh, *, dim: int, layout: Layout | None = None) -> Tensor:
    """Return the whole tensor on every rank, from the parts of all; the opposite of `shard`.

    The gradient of a part is the sum over ranks of what they return for it.
    """
    ranks = RankGroup.of(mesh)
    header, failure = Header("unshard"), None
    try:
        dim, layout = _axis(x, dim), check_layout(layout)
        same = {"the tensor": described_part(x, dim), "layout": described(layout)}
        header = Header("unshard", same, (x.shape[dim],))
    except Exception as error:  # the others wait: they hear of it first
        failure = error
    every = agree(ranks, header, failure)
    assert layout is not None
    pieces = layout.of_lengths([own[0] for own in every])
    whole: Tensor = _Unshard.apply(x, ranks, dim, pieces)  # type: ignore[no-untyped-call]
    return whole


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranks: RankGroup, dim: int, pieces: tuple[Ranges, ...]
    ) -> Tensor:
        ctx.call = ranks, dim, pieces
        lengths = [len(positions(each)) for each in pieces]
        each = math.prod(x.shape[:dim] + x.shape[dim + 1 :]) * x.itemsize
        own = packed(x)
        arrived = ranks.exchange(
            dict.fromkeys(ranks.others, own),
            {peer: lengths[peer] * each for peer in ranks.others}, x.device,
        ).take()  # fmt: skip
        parts = []
        for rank in range(ranks.count):
            shape = (*x.shape[:dim], lengths[rank], *x.shape[dim + 1 :])
            message = own if rank == ranks.own else arrived.get(rank, own[:0])
            parts += unpacked(message, (shape, x.dtype))
        order = torch.cat([positions(ranges, x.device) for ranges in pieces])
        return torch.cat(parts, dim).index_select(dim, order.argsort())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ranks, dim, pieces = ctx.call
        own = take_ranges(grad, dim, pieces[ranks.own])
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = own.to(wide)
        arrived = ranks.exchange(
            {peer: packed(take_ranges(grad, dim, pieces[peer])) for peer in ranks.others},
            dict.fromkeys(ranks.others, own.numel() * own.itemsize), grad.device,
        ).take()  # fmt: skip
        for message in arrived.values():
            total = total + unpacked(message, (tuple(own.shape), own.dtype))[0]
        return total.to(grad.dtype), None, None, None


def _axis(x: object, dim: object) -> int:
    if not isinstance(x, Tensor) or not is_integer(dim) or not -x.ndim <= dim < x.ndim:
        shape = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"dim={dim!r} must be an axis of the tensor, and that is {shape}")
    return dim % x.ndim


def check_layout(layout: object) -> Layout:
    """The layout, contiguous if None; ValueError for anything else."""
    if layout is None:
        return Contiguous()
    if not isinstance(layout, Layout):
        raise ValueError(
            f"layout={layout!r} is not a layout; use hw.distributed.contiguous(), head_tail() or "
            "balanced(mask)"
        )
    return layout
