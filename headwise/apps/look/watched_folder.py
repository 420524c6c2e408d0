"""The page's "Watch": reads a run's folder while it grows."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from headwise.watching import Story, WatchedRun, open_run

MOST_NUMBERS = 200_000
"""The most in one answer: of a longer run, every second step is given, or every fourth, …"""

PATIENCE = 0.3
"""Seconds before a folder is read again, or ten times as long as reading it took."""


@dataclass
class WatchedFolder:
    """The folder of a run; it is read again when it may have grown."""

    folder: Path
    run: WatchedRun | None = None
    histories: dict[str, Any] = field(default_factory=dict)  # of the run as it was last read
    read_at: float = -math.inf
    took: float = 0.0
    told: tuple[object, dict[str, Any]] | None = None  # the last story, and what it was told of
    lock: Lock = field(default_factory=Lock)

    def refreshed(self) -> WatchedRun:
        """The run, at most a moment old; ValueError if the folder holds none."""
        now = time.monotonic()
        if self.run is not None and now - self.read_at < max(PATIENCE, 10 * self.took):
            return self.run
        if self.run is None:
            self.run = open_run(self.folder)
        elif self.run.refresh():
            self.histories.clear()
        self.read_at = time.monotonic()
        self.took = self.read_at - now
        return self.run

    def state(self) -> dict[str, Any]:
        """The run, its progress and its alarms, as `/api/watch` gives them."""
        with self.lock:
            run = self.refreshed()
            steps = run.steps
            return {
                "run": self.folder.resolve().name,
                "model": run.manifest.get("model", {}).get("class", ""),
                "step": steps[-1] if steps else None,
                "age": max(0.0, time.time() - run.folder.stat().st_mtime),
                "layers": [
                    {
                        "layer": layer.number,
                        "name": layer.name,
                        "kind": layer.kind,
                        "heads": layer.heads,
                    }
                    for layer in run.layers
                ],
                "statistics": run.figures,
                "training": run.training() or None,
                "alarms": [asdict(alarm) for alarm in run.alarms],
                "rules": run.manifest.get("rules", []),
            }

    def story(self) -> dict[str, Any]:
        """The run as a story, as `/api/watch/story` gives it."""
        with self.lock:
            run = self.refreshed()
            seen = len(run.steps), len(run.alarms)
            if self.told is None or self.told[0] != seen:
                self.told = seen, Story.of(run).to_dict()
            return self.told[1]

    def series(
        self, figure: str, after: float = -math.inf, most: int | None = None
    ) -> dict[str, Any]:
        """A figure of every head at the steps after `after`, as `/api/watch/series` gives it.

        Of a long run every second, fourth, … step is given, always the same ones until the run is
        twice as long; `every` says which.
        """
        with self.lock:
            run = self.refreshed()
            if figure not in self.histories:
                self.histories[figure] = run.history(figure)
            steps, lines = self.histories[figure]
            layers = [(layer.number, layer.heads) for layer in run.layers]
        every = stride(len(steps), sum(heads for _, heads in layers), most or MOST_NUMBERS)
        shown = [at for at in range(0, len(steps), every) if steps[at] > after]
        blank = [math.nan] * len(steps)
        return {
            "every": every,
            "steps": [steps[at] for at in shown],
            "values": [
                [
                    [_short(lines.get((layer, head), blank)[at]) for head in range(heads)]
                    for layer, heads in layers
                ]
                for at in shown
            ],
        }


def stride(steps: int, heads: int, most: int = MOST_NUMBERS) -> int:
    """The power of two by which steps are thinned, so that no answer is too large.

    >>> stride(1000, 48), stride(100_000, 48)
    (1, 32)
    """
    every = 1
    while steps * heads > most * every:
        every *= 2
    return every


def _short(value: float) -> float | None:
    """Six digits, more than a picture can show; None if JSON has no way to write it."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
