"""Uses of a model, and what each takes: figures, sweeps, and the longest context that fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headwise.costs.calculate import cost
from headwise.costs.cost import Cost
from headwise.costs.machines.hardware import Device
from headwise.costs.workload import BITS, Recompute
from headwise.messages import say

Phase = Literal["prefill", "decode", "training"]

ADAM = 16
"""Bytes per parameter of training with Adam: in half precision 2 for the weight, 2 for its
gradient, 4 for the float32 weight and 8 for two moments; in float32 4, 4 and 8."""

LONGEST = 1 << 26
"""A context that counts as unlimited."""


@dataclass(frozen=True)
class Scenario:
    """One use of a model, with sequences of `length` tokens.

    `prefill` reads them all, `decode` computes one more token after the others are in the cache,
    and `training` runs a forward and a backward. The device's time is predicted if there is one.
    """

    phase: Phase = "prefill"
    length: int = 4096
    batch: int = 1
    dtype: str = "bf16"
    cache: str | None = None  # the dtype of the KV cache, the model's if None
    mesh: Mapping[str, int] = field(default_factory=dict)
    recompute: Recompute = None
    device: Device | None = None

    def cost(self, what: Any) -> Cost:
        """The cost of this use of a model, as `hw.cost` gives it."""
        return cost(
            what,
            batch=self.batch,
            queries=1 if self.phase == "decode" else self.length,
            keys=self.length,
            dtype=self.dtype,
            cache=self.cache,
            mesh=self.mesh or None,
            recompute=self.recompute,
            device="cpu" if self.device is not None and self.device.cpu else "cuda",
        )

    def figures(self, what: Any) -> dict[str, float | None]:
        """Every figure of this use, by name; None for one that does not apply.

        >>> from headwise.models import GPTConfig
        >>> gpt = GPTConfig(vocabulary=256, d_model=64, layers=2, heads=4)
        >>> Scenario("decode", length=100).figures(gpt)["kv_cache"]  # 2·l·h·t·2 bytes
        51200
        """
        found = self.cost(what)
        training = self.phase == "training"
        flops = found.training_flops if training else found.flops
        seconds = None if self.device is None else found.time(self.device, training)
        tokens = self.batch * (1 if self.phase == "decode" else self.length)
        return {
            "params": found.params,
            "params_active": found.params_active,
            "weights": found.weights,
            "kv_cache": None if training else found.kv_cache,
            "state": None if training else found.state,
            "activations": found.activations if training else None,
            "memory": self.memory(found),
            "flops": flops,
            "flops_dense": found.flops_dense + training * found.backward_flops_dense,
            "flops_executed": found.flops_executed + training * found.backward_flops_executed,
            "special": found.special,
            "bytes_moved": found.bytes_moved,
            "intensity": found.intensity,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "utilisation": None
            if self.device is None or not seconds
            else flops / seconds / self.device.peak(self.dtype),
        }

    def memory(self, found: Cost) -> float:
        """Bytes that this use keeps: weights and cache; in training also gradients and Adam."""
        if self.phase != "training":
            return found.weights + found.kv_cache + found.state
        return ADAM * found.weights * 8 // BITS[self.dtype] + found.activations

    def longest(self, what: Any, room: float) -> int:
        """The most tokens per sequence that fit into so many bytes.

        ValueError if not even one token fits, or if the model has no more positions and the room
        is not used up.
        """
        use = self if self.phase == "training" else replace(self, phase="decode")

        def fits(length: int) -> bool:
            asked = replace(use, length=length)
            return asked.memory(asked.cost(what)) <= room

        if not fits(1):
            least = use.memory(replace(use, length=1).cost(what))
            raise ValueError(
                say(
                    "not even one token fits: the model alone takes {least:,.0f} bytes of "
                    "{room:,.0f}; use a smaller dtype, or more devices (mesh)",
                    least=least,
                    room=room,
                )
            )
        low, high = 1, 2
        while high <= LONGEST and fits(high):
            low, high = high, 2 * high
        if high > LONGEST:
            return LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low


def sweep(
    what: Any, use: Scenario, axis: Literal["length", "batch"], values: Sequence[int]
) -> list[dict[str, float | None]]:
    """The figures of a use with each of these lengths or batch sizes."""
    found = []
    for value in values:
        asked = replace(use, length=value) if axis == "length" else replace(use, batch=value)
        found.append({axis: value, **asked.figures(what)})
    return found
