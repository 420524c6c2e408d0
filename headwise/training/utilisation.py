"""Model FLOPs utilisation: the share of a device's peak that a training uses for its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.costs.calculate import cost, read
from headwise.costs.layers import Architecture
from headwise.costs.machines import this_machine

Sizes = tuple[tuple[str, int], ...]


@dataclass
class Utilisation:
    """The model FLOPs of some steps, of which a device could do `peak` per second.

    Only what the model needs is counted: forward and backward, each pair that the mask shows, and
    nothing that is computed again. Padding counts, as it is computed.
    """

    architecture: Architecture
    peak: float
    dtype: str
    device: str
    batches: Counter[Sizes] = field(default_factory=Counter)
    _known: dict[Sizes, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, where: torch.device, count: int = 1) -> Utilisation | None:
        """For a model on so many devices; None if their peak or the model's cost is not known.

        A GPU's peak is that of its data sheet; another device is known once it was measured, by
        `headwise cost --measure`.
        """
        half = where.type == "cuda" and torch.cuda.is_bf16_supported()
        dtype = "bf16" if half else "fp32"
        peak = this_machine.peak(where, dtype)
        if peak is None:
            return None
        try:
            return cls(read(model), count * peak[0], dtype, peak[1])
        except ValueError:  # an architecture that hw.cost does not know
            return None

    def add(self, sizes: Mapping[str, int]) -> None:
        """Add a batch by its sizes: batch, queries and context, as `hw.cost` takes them."""
        self.batches[tuple(sizes.items())] += 1

    def read(self, seconds: float) -> float:
        """The share of the peak that was used since the last reading; the next starts here."""
        flops = sum(count * self._flops(sizes) for sizes, count in self.batches.items())
        self.batches.clear()
        return flops / max(seconds, 1e-9) / self.peak

    def _flops(self, sizes: Sizes) -> int:
        if sizes not in self._known:
            given: dict[str, Any] = dict(sizes)
            found = cost(self.architecture, dtype=self.dtype, **given)
            self._known[sizes] = found.training_flops
        return self._known[sizes]
