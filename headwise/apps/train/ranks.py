"""The processes of one training: each has a part of every batch, and joins what it found."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from headwise.distributed import RankGroup, context_parallel, head_tail, shard


@dataclass(frozen=True, eq=False)
class TrainingRanks:
    """The processes that train one model together; `ALONE` is a training in one process.

    A batch is the same on every rank, and a rank computes the loss of its part: some of the
    sequences, and of each sequence some of the positions if `sequence` has several ranks. So the
    number of ranks changes no result but by rounding. With `sharded`, parameters, gradients and the
    optimiser's state are spread over all ranks (FSDP2); otherwise every rank has all of them (DDP).
    """

    mesh: DeviceMesh | None = None  # all ranks, in one dimension
    sequence: DeviceMesh | None = None  # the ranks that share each sequence with this one
    sharded: bool = False

    @classmethod
    def over(cls, mesh: DeviceMesh, *, context: int = 1, sharded: bool = False) -> TrainingRanks:
        """The ranks of a one-dimensional mesh; each sequence is split between `context` of them."""
        count = mesh.size()
        if context < 1 or count % context:
            raise ValueError(
                f"{count} processes can't share sequences by groups of {context}; use a number of "
                "processes that is a multiple of it"
            )
        if context in (1, count):
            return cls(mesh, mesh if context > 1 else None, sharded)
        both = DeviceMesh(
            mesh.device_type, mesh.mesh.view(-1, context), mesh_dim_names=("data", "sequence")
        )
        return cls(mesh, both["sequence"], sharded)

    @property
    def count(self) -> int:
        """The number of processes."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def own(self) -> int:
        """The number of this process, from 0."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    @property
    def first(self) -> bool:
        """True for the process that writes the files and reports."""
        return self.own == 0

    @property
    def together(self) -> int:
        """The number of processes that share each sequence."""
        return 1 if self.sequence is None else self.sequence.size()

    @property
    def rows(self) -> int:
        """The number of parts that the sequences of a batch are dealt into."""
        return self.count // self.together

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of (B, N, ...) that every rank has whole."""
        if self.mesh is None:
            return x
        x = x.tensor_split(self.rows)[self.own // self.together]
        return x if self.sequence is None else shard(x, self.sequence, dim=1, layout=head_tail())

    def prepare(self, model: nn.Module) -> None:
        """Change a model in place: shard its parameters, and hand its attention to the ranks."""
        if self.sharded:
            from torch.distributed.fsdp import fully_shard  # which takes long to import

            assert self.mesh is not None
            for layers in model.modules():
                if isinstance(layers, nn.ModuleList):
                    for layer in layers:
                        fully_shard(layer, mesh=self.mesh)
            fully_shard(model, mesh=self.mesh)
        if self.sequence is not None:
            context_parallel(model, self.sequence, layout=head_tail())

    def trainable(self, model: nn.Module) -> nn.Module:
        """The module to call in a step: gradients become the mean over ranks."""
        if self.mesh is None or self.sharded:
            return model
        return DistributedDataParallel(model, process_group=self.mesh.get_group())

    def whole(self, x: Tensor) -> Tensor:
        """A scalar that FSDP2 has spread over ranks, whole."""
        return x.full_tensor() if self.sharded else x  # type: ignore[attr-defined]

    def mean(self, x: Tensor) -> Tensor:
        """The mean over ranks of a scalar."""
        return x if self.mesh is None else self._reduced(x, dist.ReduceOp.SUM) / self.count

    def total(self, x: float) -> float:
        """The sum over ranks of a number."""
        if self.mesh is None:
            return x
        return float(self._reduced(torch.tensor(x, dtype=torch.float64), dist.ReduceOp.SUM))

    def largest(self, number: int) -> int:
        """The largest number that a rank gives; every rank waits for the others here."""
        if self.mesh is None:
            return number
        return int(self._reduced(torch.tensor(number), dist.ReduceOp.MAX))

    def _reduced(self, x: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        assert self.mesh is not None
        ranks = RankGroup(self.mesh)
        carrier = ranks.quickest if x.device.type == "cpu" else ranks.carrier(x.device)
        moved = x.detach().to(carrier, copy=True)
        with ranks.rank_errors(None):
            dist.all_reduce(moved, op=how, group=ranks.group)
        return moved


ALONE = TrainingRanks()
"""One process, without torch.distributed."""
