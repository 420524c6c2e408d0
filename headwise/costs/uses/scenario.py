"""Uses of a model, and what each takes: figures, and the longest context that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from headwise.costs.calculate import cost
from headwise.costs.cost import Cost
from headwise.costs.machines.hardware import Device
from headwise.costs.tracing.traced_model import TracedModel
from headwise.costs.workload import BITS, Recompute
from headwise.messages import say

Phase = Literal["prefill", "decode", "training"]
"""The part of a model's use whose cost is asked for."""

ADAM = 16
"""Bytes per parameter of training with Adam: in half precision 2 for the weight, 2 for its
gradient, 4 for the float32 weight and 8 for two moments; in float32 4, 4 and 8."""

LONGEST = 1 << 23
"""The longest context that is tried."""


@dataclass(frozen=True)
class Scenario:
    """One use of a model, with sequences of `length` tokens; None if it always has its own.

    `prefill` reads them all, `decode` computes one more token after the others are in the cache,
    and `training` runs a forward and a backward. The device's time is predicted if there is one.
    """

    phase: Phase = "prefill"
    length: int | None = 4096
    batch: int = 1
    dtype: str = "bf16"
    cache: str | None = None  # the dtype of the KV cache, the model's if None
    mesh: Mapping[str, int] = field(default_factory=dict)
    recompute: Recompute = None
    device: Device | None = None

    def within(self, architecture: TracedModel) -> Scenario:
        """The same use with no more tokens than a model has positions for, or with its own."""
        if self.length is None or architecture.own_length:
            return replace(self, length=None)
        longest = architecture.longest
        return self if longest is None else replace(self, length=min(self.length, longest))

    def cost(self, what: Any) -> Cost:
        """The cost of this use of a model, as `hw.cost` gives it."""
        return cost(
            what,
            batch=self.batch,
            queries=1 if self.phase == "decode" and self.length else self.length,
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
        kernels = found.forward + (found.backward if training else ())
        flops = found.training_flops if training else found.flops
        moved = sum(kernel.bytes_moved * kernel.count for kernel in kernels)
        seconds = None if self.device is None else found.time(self.device, training)
        tokens = self.batch * (1 if self.phase == "decode" else self.length or 1)
        return {
            "params": found.params,
            "params_active": found.params_active,
            "weights": found.weights,
            "kv_cache": None if training else found.kv_cache,
            "kv_cache_per_token": None if training or not self.length else self.per_token(found),
            "state": None if training else found.state,
            "activations": found.activations if training else None,
            "memory": self.memory(found),
            "flops": flops,
            "flops_dense": found.flops_dense + training * found.backward_flops_dense,
            "flops_executed": found.flops_executed + training * found.backward_flops_executed,
            "special": sum(kernel.special * kernel.count for kernel in kernels),
            "bytes_moved": moved,
            "intensity": flops / max(1, moved),
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "utilisation": None
            if self.device is None or not seconds
            else flops / seconds / self.device.peak(self.dtype),
        }

    def per_token(self, found: Cost) -> float:
        """Bytes of the cache for each token of each sequence, on average; of one rank's tokens."""
        ranks = found.work.ranks
        tokens = self.batch // (ranks.dp * ranks.fsdp) * (self.length or 1) // ranks.cp
        return found.kv_cache / max(1, tokens)

    def memory(self, found: Cost) -> float:
        """Bytes that this use keeps: weights and cache; in training also gradients and Adam."""
        if self.phase != "training":
            return found.weights + found.kv_cache + found.state
        return ADAM * found.weights * 8 // BITS[self.dtype] + found.activations

    def longest(self, what: Any, room: float) -> int:
        """The most tokens per sequence that fit into so many bytes.

        At most `LONGEST`, and no more than a table of positions has rows; ValueError if not even
        one token fits.
        """
        use = self if self.phase == "training" else replace(self, phase="decode")

        def taken(length: int) -> float:
            asked = replace(use, length=length)
            try:
                return asked.memory(asked.cost(what))
            except ValueError:  # the model has no more positions
                return math.inf

        least = use.memory(replace(use, length=1).cost(what))
        if least > room:
            raise ValueError(
                say(
                    "not even one token fits: the model alone takes {least:,.0f} bytes of "
                    "{room:,.0f}; use a smaller dtype, or more devices (mesh)",
                    least=least,
                    room=room,
                )
            )
        low, high = (1, least), (2, taken(2))
        while high[1] <= room:
            if high[0] >= LONGEST:
                return LONGEST
            low, high = high, (2 * high[0], taken(2 * high[0]))
        halve = False
        while high[0] - low[0] > 1:
            # Mostly a line, on which the answer is found at once; every other step is a half.
            share = 0.5 if halve or high[1] == math.inf else (room - low[1]) / (high[1] - low[1])
            middle = low[0] + int(share * (high[0] - low[0]))
            middle = min(high[0] - 1, max(low[0] + 1, middle))
            found = middle, taken(middle)
            low, high = (found, high) if found[1] <= room else (low, found)
            halve = not halve
        return low[0]
