"""Model FLOPs utilisation: the share of a device's peak that a training uses for its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from headwise.costs.calculate import cost, read_architecture
from headwise.costs.machines import this_machine
from headwise.costs.tracing.traced_model import TracedModel

Sizes = tuple[tuple[str, int], ...]


@dataclass
class Utilisation:
    """The model FLOPs of some steps, of which a device could do `peak` per second.

    Only what the model needs is counted: the forward, the backward of what learns, each pair that
    the mask shows, and nothing that is computed again. Padding counts, as it is computed.
    """

    architecture: TracedModel
    peak: float
    dtype: str
    device: str
    batches: Counter[tuple[Sizes, bool]] = field(default_factory=Counter)
    _known: dict[tuple[Sizes, bool], int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, where: torch.device, dtype: str, count: int = 1) -> Utilisation:
        """For a model that learns on so many devices in a dtype; ValueError if it is not known.

        A GPU's peak is that of its data sheet; another device is known once it was measured, by
        `headwise cost --measure`.
        """
        if len({each.device for each in model.parameters()}) > 1:
            raise ValueError("its parameters are on several devices")
        peak = this_machine.peak(where, dtype)
        if peak is None:
            raise ValueError(
                f"the peak of {this_machine.hardware_name(where)} in {dtype} is not known; "
                "headwise cost --measure measures it"
            )
        cost(model)  # ValueError if it is unknown, or not as it was built
        return cls(read_architecture(model), count * peak[0], dtype, peak[1])

    def add(self, sizes: Mapping[str, int], learning: bool = True, count: int = 1) -> None:
        """Add batches by their sizes: batch, queries and context, as `hw.cost` takes them.

        Without `learning` they are forwards only.
        """
        self.batches[tuple(sizes.items()), learning] += count

    def read(self, seconds: float) -> float:
        """The share of the peak that was used since the last reading; the next starts here."""
        batches, self.batches = self.batches, Counter()
        flops = sum(count * self._flops(*batch) for batch, count in batches.items())
        return flops / max(seconds, 1e-9) / self.peak

    def _flops(self, sizes: Sizes, learning: bool) -> int:
        if (sizes, learning) not in self._known:
            given: dict[str, Any] = dict(sizes)
            # FLOPs are the same in every dtype, and some of a device's are not a model's: tf32.
            found = cost(self.architecture, **given)
            self._known[sizes, learning] = found.training_flops if learning else found.flops
        return self._known[sizes, learning]
