"""The heads of a run, watched while it trains: `headwise train --watch`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from headwise.training.run_folder import Run
from headwise.watching import Watch, watch
from headwise.watching.runs.run_writer import RunWriter

ROWS = 64
"""Rows sampled from each pass: enough for a mean, at almost no cost."""


@dataclass(frozen=True)
class HeadWatch:
    """The watch of a run and the writer of its folder; both None if the run is not watched."""

    every: int = 1
    watch: Watch | None = None
    writer: RunWriter | None = None

    @contextmanager
    def step(self) -> Iterator[bool]:
        """Surround one training step; the value says whether the step is watched.

        The model is watched during these steps only, so evaluation leaves no trace in the figures,
        and the steps between cost what they always did. Compiled code can't be watched: a watched
        step must call the model itself.
        """
        if self.watch is None:
            yield False
            return
        due = self.watch.steps % self.every == 0
        if due:
            self.watch.attach()
        try:
            yield due
        finally:
            self.watch.detach()
        self.watch.step()

    def flush(self) -> None:
        """Write the watched steps, so that a checkpoint never knows more than the folder."""
        if self.writer is not None:
            self.writer.flush()


@contextmanager
def watched(model: nn.Module, run: Run, every: int | None, start: int) -> Iterator[HeadWatch]:
    """Watch every `every`-th step from step `start` on, into the run's folder; none if None."""
    if every is None:
        yield HeadWatch()
        return
    watching = watch(model, rows=ROWS, every=every, alarms=True)
    watching.steps = start
    with watching.record(run.folder / "watch", resume=True) as writer:
        yield HeadWatch(every, watching, writer)
