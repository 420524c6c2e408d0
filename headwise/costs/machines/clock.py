"""The clock of measurements: medians over rounds, in which the runs that are compared alternate."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Clock:
    """Times runs on a device: medians of rounds in which the runs alternate."""

    where: torch.device
    rounds: int
    slice: float
    now: Callable[[], float] = time.perf_counter

    def seconds(self, runs: Sequence[Run]) -> list[float]:
        """Seconds of one call of each run."""
        calls = []
        for run in runs:
            run()  # compiles, allocates
            calls.append(max(1, round(self.slice / max(self._once(run, 1), 1e-7))))
        times: list[list[float]] = [[] for _ in runs]
        for _ in range(self.rounds):
            for found, run, count in zip(times, runs, calls, strict=True):
                found.append(self._once(run, count))
        return [statistics.median(found) for found in times]

    def _once(self, run: Run, calls: int) -> float:
        self._wait()
        begun = self.now()
        for _ in range(calls):
            run()
        self._wait()
        return (self.now() - begun) / calls

    def _wait(self) -> None:
        if self.where.type == "cuda":
            torch.cuda.synchronize(self.where)
