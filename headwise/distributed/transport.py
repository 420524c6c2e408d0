"""Messages between the ranks of a mesh: posted at once, counted, and waited for by name.

Every exchange is one batch of sends and receives, so that no order of ranks can deadlock. A rank
that does not answer ends the call with a `RankError` that names it, at the latest when the process
group's timeout is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class RankError(RuntimeError):
    """A rank ended, or did not answer in time."""


@dataclass
class Traffic:
    """The bytes of keys, values and their gradients that this process sent and received."""

    sent: int = 0
    received: int = 0
    messages: int = 0  # sent


_counters: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what this process sends and receives inside the block.

    >>> with traffic() as moved:
    ...     pass  # hw.distributed.attention(...)
    >>> moved.sent
    0
    """
    counter = Traffic()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters.remove(counter)


class RankGroup:
    """The ranks of a process group, numbered from 0, as this process reaches them."""

    def __init__(self, of: DeviceMesh | dist.ProcessGroup) -> None:
        self.group = of.get_group() if isinstance(of, DeviceMesh) else of
        self.members = dist.get_process_group_ranks(self.group)
        self.count, self.own = len(self.members), dist.get_rank(self.group)
        self.name: str = self.group.group_name
        config = dist.get_backend_config(self.group)  # such as "cpu:gloo,cuda:nccl"
        self.backends = dict(each.split(":") for each in config.split(","))

    @classmethod
    def of(cls, mesh: DeviceMesh) -> RankGroup:
        """The ranks of a one-dimensional mesh; ValueError if it has more dimensions."""
        return cls(check_mesh(mesh))

    @property
    def others(self) -> list[int]:
        """Every rank but this one, the next ones first."""
        return [(self.own + step) % self.count for step in range(1, self.count)]

    def carrier(self, device: torch.device) -> torch.device:
        """The device whose tensors the group can move for this one: gloo takes the CPU's only."""
        through_cpu = self.backends.get(device.type, "gloo") == "gloo"
        return torch.device("cpu") if through_cpu else device

    @property
    def quickest(self) -> torch.device:
        """The device for small messages: the CPU if the group has it, as no GPU has to wait."""
        return torch.device("cpu" if "cpu" in self.backends else next(iter(self.backends)))

    def exchange(
        self, sends: Mapping[int, Tensor], sizes: Mapping[int, int], device: torch.device,
        counted: bool = True,
    ) -> Arrivals:  # fmt: skip
        """Send bytes (uint8) to ranks and expect `sizes` bytes from ranks, without waiting."""
        ops, peers, found, kept = [], [], {}, []
        carrier = self.carrier(device)
        for peer in self.others:
            if sizes.get(peer, 0):
                found[peer] = torch.empty(sizes[peer], dtype=torch.uint8, device=carrier)
                ops.append(dist.P2POp(dist.irecv, found[peer], self.members[peer], self.group))
                peers.append(peer)
            message = sends.get(peer)
            if message is not None and message.numel():
                kept.append(message.to(carrier))
                ops.append(dist.P2POp(dist.isend, kept[-1], self.members[peer], self.group))
                peers.append(peer)
        if counted:
            for counter in _counters:
                counter.sent += sum(x.numel() for x in kept)
                counter.received += sum(x.numel() for x in found.values())
                counter.messages += len(kept)
        with self.rank_errors(None):
            works = dist.batch_isend_irecv(ops) if ops else []
        named = peers if len(works) == len(ops) else [None] * len(works)  # NCCL has one for all
        return Arrivals(self, list(zip(works, named, strict=True)), found, kept, device)

    @contextmanager
    def rank_errors(self, peer: int | None) -> Iterator[None]:
        """Turn a failure of the process group into a RankError that names the rank."""
        try:
            yield
        except RankError:
            raise
        except RuntimeError as error:
            who = "a rank" if peer is None else f"rank {peer}"
            raise RankError(
                f"{who} of {self.count} did not answer rank {self.own}: it has ended, failed or "
                f"stayed away until the process group's timeout. ({error})"
            ) from error


@dataclass(frozen=True, eq=False)
class Arrivals:
    """Messages on their way; `take` waits for them."""

    ranks: RankGroup
    works: list[tuple[dist.Work, int | None]]
    found: dict[int, Tensor]
    kept: list[Tensor]  # what is being sent must stay alive
    device: torch.device

    def take(self) -> dict[int, Tensor]:
        """Wait for all messages and return the bytes from each rank."""
        for work, peer in self.works:
            with self.ranks.rank_errors(peer):
                work.wait()
        return {peer: x.to(self.device) for peer, x in self.found.items()}


def packed(*tensors: Tensor) -> Tensor:
    """The tensors' bytes one after the other, uint8 (n,)."""
    flat = [bytes_of(x) for x in tensors]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def bytes_of(x: Tensor) -> Tensor:
    """A tensor's bytes, uint8 (n,); a view where that is possible.

    >>> bytes_of(torch.ones(3)[::2][:1])  # one number is contiguous, whatever its stride
    tensor([  0,   0, 128,  63], dtype=torch.uint8)
    """
    flat = x.detach().contiguous().flatten()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def unpacked(message: Tensor, *like: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
    """The tensors of these shapes and dtypes from their bytes."""
    found, at = [], 0
    for shape, dtype in like:
        count = dtype.itemsize
        for axis in shape:
            count *= axis
        part = message[at : at + count]
        found.append(part.clone().view(dtype).view(shape))  # a copy is aligned
        at += count
    return found


def check_mesh(mesh: object) -> DeviceMesh:
    """The mesh, or ValueError unless it is a one-dimensional DeviceMesh."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh= takes a DeviceMesh, not {type(mesh).__name__}; "
            "init_device_mesh('cuda', (ranks,)) makes one"
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise ValueError(
            f"mesh= takes one dimension, and this has {mesh.ndim} {tuple(names)}; "
            "take one of them, as in mesh['cp']"
        )
    return mesh
