"""The heads of a run, watched while it trains: `headwise train --watch`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.files import write_whole
from headwise.models.trained import Run
from headwise.watching import RunWriter, Watch, watch

ROWS = 64
"""Rows sampled from each pass: enough for a mean, at almost no cost."""


STATE = "state.json"
"""The file in the watched run's folder that a resumed run goes on from."""


@dataclass(frozen=True)
class HeadWatch:
    """The watch of a run and the writer of its folder; both None if the run is not watched.

    Of many ranks, the first has a writer.
    """

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
        """Write the watched steps, so that a checkpoint never knows more than the folder.

        The alarms so far are written beside them, so that a resumed run raises none of them again.
        """
        if self.writer is not None and self.watch is not None:
            self.writer.flush()
            state = {**self.watch.state_dict(), "series": []}  # the folder holds the series
            write_whole(self.writer.folder / STATE, json.dumps(state, ensure_ascii=False))


@contextmanager
def watched(
    model: nn.Module, run: Run, every: int | None, start: int, ranks: TrainingRanks = ALONE
) -> Iterator[HeadWatch]:
    """Watch every `every`-th step from step `start` on, into the run's folder; none if None.

    The figures are those of all ranks.
    """
    if every is None:
        yield HeadWatch()
        return
    watching = watch(model, rows=ROWS, every=every, alarms=True, mesh=ranks.mesh)
    folder = run.folder / "watch"
    if (state := _state(folder / STATE, start)) is not None:
        watching.load_state_dict(state)
    watching.steps = start
    if not ranks.first:
        yield HeadWatch(every, watching)
        return
    with watching.record(folder, resume=True) as writer:
        yield HeadWatch(every, watching, writer)


def _state(path: Path, start: int) -> dict[str, Any] | None:
    """The state of the watch at the step from which a run goes on; None if there is none."""
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return state if state.get("steps") == start else None
