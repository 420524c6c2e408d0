"""Loss and speed of a run between two readings."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.costs import Utilisation


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


class Meter:
    """Loss and speed since the last reading; the device is waited for only when it is read.

    With a `utilisation`, batches are added to it, and a reading has the share of the peak FLOPs. A
    loss is the mean over `ranks`, all of which must read.
    """

    def __init__(
        self,
        device: torch.device,
        utilisation: Utilisation | None = None,
        ranks: TrainingRanks = ALONE,
    ) -> None:
        self.utilisation, self.ranks = utilisation, ranks
        self.loss = self.norm = torch.zeros((), device=device)
        self.steps = self.count = 0
        self.since = time.perf_counter()

    def add(self, loss: Tensor, norm: Tensor, count: int) -> None:
        """Add a step: its mean loss, its gradient norm and its number of predictions."""
        self.loss, self.norm = self.loss + loss, torch.maximum(self.norm, norm)
        self.steps, self.count = self.steps + 1, self.count + count

    @contextmanager
    def away(self) -> Iterator[None]:
        """Leave out the time of anything other than training."""
        begun = time.perf_counter()
        yield
        self.since += time.perf_counter() - begun

    def read(self, saved: int) -> dict[str, float]:
        """Means since the last reading; the next reading starts here.

        DivergedError if the loss is not finite: such a state must not be saved.
        """
        loss, norm = float(self.ranks.mean(self.loss)) / self.steps, float(self.norm)
        if not math.isfinite(loss):
            raise DivergedError(
                "the loss is no longer finite; try a lower learning rate or a longer warm-up "
                f"(the last checkpoint, of step {saved}, is untouched)"
            )
        now = time.perf_counter()
        seconds = now - self.since
        found = {"loss": loss, "gradient_norm": norm}
        found["per_second"] = round(self.count / max(seconds, 1e-9), 1)
        if self.utilisation is not None:
            found["mfu"] = float(f"{self.utilisation.read(seconds):.4g}")
        self.loss, self.norm = torch.zeros_like(self.loss), torch.zeros_like(self.norm)
        self.steps = self.count = 0
        self.since = time.perf_counter()
        return found
