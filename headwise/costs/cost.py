"""The cost of a module, a model or one of its parts, and the time that its kernels take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headwise.core.place import Place
from headwise.costs.explaining import Language, explanation
from headwise.costs.formula import Line
from headwise.costs.kernel import AttentionShape, Kernel
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.speeds import Speeds
from headwise.costs.machines.this_machine import find_device
from headwise.costs.visible import count_pairs
from headwise.costs.workload import Workload
from headwise.engines.decoding import is_decoding
from headwise.messages import Sentence

FEW = 4
"""With at most so many queries attention reads keys and values rather than computing; on a GPU also
with those that headwise's kernels for decoding take."""

PRODUCTS = ("matmul", "convolution")


def seconds(kernels: Sequence[Kernel], device: Device) -> float:
    """The time of kernels that run one after another.

    Each kernel takes as long as its work, or as its traffic to and from memory if that is longer,
    and a launch. Work is counted as executed: whole tiles of pairs, and exponentials beside matrix
    products.
    """
    return sum(kernel.count * kernel_seconds(kernel, device) for kernel in kernels)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """The time of one run of a kernel."""
    shape = kernel.shape
    if isinstance(shape, AttentionShape) and not shape.additive:
        speeds = device.speeds(kernel.dtype)
        return speeds.launch + _attention(kernel, shape, speeds, device.units or 1)
    if kernel.kind in PRODUCTS:
        speeds = device.speeds(kernel.dtype)
        work, traffic = kernel.flops_executed * speeds.flop, kernel.bytes_moved * speeds.flop_byte
    else:
        speeds = _any(device, kernel.dtype)
        work, traffic = kernel.special * speeds.special, kernel.bytes_moved * speeds.byte
    return speeds.launch + (max(work, traffic) if speeds.overlap else work + traffic)


def _attention(kernel: Kernel, shape: AttentionShape, speeds: Speeds, units: int) -> float:
    speed = speeds.of_width((shape.head_dim + shape.value_dim) / 2)
    if kernel.backward:
        return _busy(shape, speeds, units) * _executed(shape, speeds) * speed.backward_pair
    if _few(shape, speeds):
        return shape.pairs * speed.decode_pair + kernel.bytes_read * speed.decode_byte
    rows = shape.batch * shape.heads * shape.queries
    work = _executed(shape, speeds) * speed.pair + rows * speed.row
    return max(work * _busy(shape, speeds, units), kernel.bytes_moved * speeds.byte)


def _few(shape: AttentionShape, speeds: Speeds) -> bool:
    """True if reading keys and values takes the time; a GPU has kernels for that."""
    if speeds.overlap and is_decoding(
        torch.Size((shape.batch, shape.heads, shape.queries, shape.head_dim)),
        torch.Size((shape.batch, shape.kv_heads, shape.keys, shape.head_dim)),
    ):
        return True
    return shape.queries <= FEW


def _executed(shape: AttentionShape, speeds: Speeds) -> int:
    """Pairs in the tiles that this device's kernels visit."""
    if shape.mask is None:
        return shape.executed_pairs
    queries, keys = shape.queries, shape.keys
    place = Place(shape.batch, shape.heads, queries, keys, offset=keys - queries)
    found = count_pairs(shape.mask, place, speeds.tile)
    # A rank of context parallelism has queries from elsewhere: its tiles were counted with it.
    return found.executed if found.visible == shape.pairs else shape.executed_pairs


def _busy(shape: AttentionShape, speeds: Speeds, units: int) -> float:
    """How much longer it takes if there are fewer blocks of queries than units to compute them."""
    blocks = shape.batch * shape.heads * -(-shape.queries // speeds.tile[0])
    return max(1.0, units / blocks)


def _any(device: Device, dtype: str) -> Speeds:
    """Speeds of work without matrix products, which takes its bytes in every dtype."""
    known = (dtype, *device.measured, *device.matrix)
    return device.speeds(next(each for each in known if each in device.matrix))


@dataclass(frozen=True)
class Cost:
    """Everything that a part takes, for all of its `count` copies; parts add up to their whole.

    All figures are exact counts: of parameters, FLOPs (two per multiply-add) and bytes. Under a
    mesh they are those of one rank, the busiest one. What FLOPs, bytes moved and times do not
    include, such as the recurrence of a hybrid model, is in `left_out`.
    """

    name: str
    count: int = 1  # copies, such as the layers of one kind
    params: int = 0  # tied weights count where they are first used
    params_active: int = 0  # those that a token uses: of a mixture of experts, fewer
    weights: int = 0  # bytes of the parameters
    activations: int = 0  # bytes saved for the backward
    kv_cache: int = 0  # bytes of cached keys and values
    state: int = 0  # bytes of recurrent state that decoding keeps
    forward: tuple[Kernel, ...] = field(default=(), repr=False)
    backward: tuple[Kernel, ...] = field(default=(), repr=False)
    parts: Mapping[str, Cost] = field(default_factory=dict, repr=False)
    lines: tuple[Line, ...] = field(default=(), repr=False)  # the formulas, for `explain`
    work: Workload = field(default=Workload(), repr=False)
    left_out: tuple[Sentence, ...] = ()  # work that FLOPs, bytes moved and times do not include

    @property
    def flops(self) -> int:
        """FLOPs of the forward, of the pairs that the mask shows."""
        return sum(kernel.flops * kernel.count for kernel in self.forward)

    @property
    def flops_dense(self) -> int:
        """FLOPs of the forward if every pair counts, as most counters have it."""
        return sum(kernel.flops_dense * kernel.count for kernel in self.forward)

    @property
    def flops_executed(self) -> int:
        """FLOPs that kernels compute in the forward: whole tiles of pairs."""
        return sum(kernel.flops_executed * kernel.count for kernel in self.forward)

    @property
    def backward_flops(self) -> int:
        """FLOPs of the backward by the convention of model FLOPs: two for each of the forward's."""
        return sum(kernel.flops * kernel.count for kernel in self.backward)

    @property
    def backward_flops_dense(self) -> int:
        """FLOPs of the backward if every pair counts."""
        return sum(kernel.flops_dense * kernel.count for kernel in self.backward)

    @property
    def backward_flops_executed(self) -> int:
        """FLOPs that kernels compute in the backward: tiles, and whatever is computed again."""
        return sum(kernel.flops_executed * kernel.count for kernel in self.backward)

    @property
    def training_flops(self) -> int:
        """Model FLOPs of one training step, the number that utilisation is measured by."""
        return self.flops + self.backward_flops

    @property
    def special(self) -> int:
        """Exponentials, tanh, erf and sigmoids of the forward."""
        return sum(kernel.special * kernel.count for kernel in self.forward)

    @property
    def bytes_moved(self) -> int:
        """Bytes that the kernels of the forward read and write."""
        return sum(kernel.bytes_moved * kernel.count for kernel in self.forward)

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved in the forward."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    def time(self, device: str | Device, training: bool = False) -> float:
        """Seconds of a forward on a device such as "h100", or of a forward and a backward."""
        kernels = self.forward + self.backward if training else self.forward
        return seconds(kernels, find_device(device))

    def to_dict(self) -> dict[str, Any]:
        """Every figure and every part, ready for JSON."""
        figures = {name: getattr(self, name) for name in FIGURES}
        parts = {name: part.to_dict() for name, part in self.parts.items()}
        left_out = [str(what) for what in self.left_out]
        return {
            "name": self.name, "count": self.count, **figures, "left_out": left_out,
            "parts": parts,
        }  # fmt: skip

    def explain(self, language: Language = "en") -> str:
        """Every formula with its numbers, in English ("en") or 中文 ("zh")."""
        return explanation(self, language)

    def __str__(self) -> str:
        return self.explain()


FIGURES = (
    "params", "params_active", "weights", "flops", "flops_dense", "flops_executed",
    "backward_flops", "backward_flops_dense", "backward_flops_executed", "training_flops",
    "special", "bytes_moved", "intensity", "activations", "kv_cache", "state",
)  # fmt: skip
"""The names of a cost's figures, in the order in which they are shown."""
