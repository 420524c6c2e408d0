"""Figures of heads, joined over the ranks of a mesh: sums are added, maxima compared."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from headwise.distributed.header import Header, agree
from headwise.distributed.transport import RankGroup, check_mesh


class JoinedFigures:
    """Joins tables of figures, (slots, columns, heads), the first columns of which are sums.

    Ranks must have tables of one shape. They compare shapes when one is new; after that, a join is
    one sum and one maximum over the mesh, and nothing is read back.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.ranks = RankGroup(check_mesh(mesh))
        self._agreed: tuple[int, ...] | None = None

    @property
    def first(self) -> bool:
        """True on the rank that reports for all."""
        return self.ranks.own == 0

    def join(self, table: Tensor, sums: int) -> None:
        """Replace this rank's figures by those of all ranks together."""
        if self._agreed != tuple(table.shape):
            names = ("watched layers", "figures per head", "heads")
            agree(self.ranks, Header("figures", dict(zip(names, table.shape, strict=True))))
            self._agreed = tuple(table.shape)
        device = self.ranks.carrier(table.device)
        for part, how in (
            (table[:, :sums], dist.ReduceOp.SUM),
            (table[:, sums:], dist.ReduceOp.MAX),
        ):
            together = part.to(device).contiguous()
            with self.ranks.telling(None):
                dist.all_reduce(together, op=how, group=self.ranks.group)
            part.copy_(together)
