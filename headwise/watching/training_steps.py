"""The steps of a training that is watched: their figures, alarms and files."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from headwise.watching.alarms import Alarm, Alarms
from headwise.watching.call_recorder import CallRecorder
from headwise.watching.layer import WatchedLayer
from headwise.watching.recording import Entry, Recording
from headwise.watching.rules import Rule
from headwise.watching.runs.run_writer import RunWriter

IN_MEMORY, ROWS_IN_MEMORY = 1000, 200_000
"""Steps of a series that stay in memory at most, and rows of all their tables together."""


class SteppedRecording(Recording):
    """A recording that is made while a model trains: it ends with each step, and begins anew."""

    model: nn.Module

    def __init__(self, recorder: CallRecorder, rules: tuple[Rule, ...] = ()) -> None:
        self._recorder, self._alarms = recorder, Alarms(rules)
        self.series: list[Entry] = []
        self.steps = 0  # training steps that ended
        self._runs: list[RunWriter] = []
        self._by_hand = False  # step() was called, so optimisers don't end steps
        self._ended_by_optimiser = False  # the last step, and nothing has run since
        self._passes = 0  # of the steps that ended
        self._reported: set[str] = set()  # what went wrong, each once

    @property
    def layers(self) -> list[WatchedLayer]:
        return list(self._recorder.layers.values())

    @property
    def tokens(self) -> Tensor | None:
        return self._recorder.tokens

    @property
    def unread(self) -> list[str]:
        return list(self._recorder.unread.reasons)

    @property
    def alarms(self) -> list[Alarm]:  # type: ignore[override]
        """The findings of the rules, each head and rule once."""
        return self._alarms.raised

    def check(self) -> None:
        """Raise ValueError if the model ran, and what was asked for was not seen."""

    def step(self) -> None:
        """End a training step: the figures since the last one join the series.

        Steps of an optimiser that holds the model's parameters end by themselves, until this is
        called once: then every step ends here.
        """
        self._by_hand = True
        if self._ended_by_optimiser and self._passes == self._recorder.passes:
            self._ended_by_optimiser = False
        else:
            self._end_step()

    def optimised(self, optimiser: Optimizer, *_: object) -> None:
        """An optimiser made a step: a training step ends, if the model ran and it is its own."""
        if self._by_hand or self._passes == self._recorder.passes:
            return
        mine = {id(x) for x in self.model.parameters()}
        if any(id(x) in mine for group in optimiser.param_groups for x in group["params"]):
            self._end_step()
            self._ended_by_optimiser = True

    def _end_step(self) -> None:
        if self._recorder.active:
            with self._going_on("ending a step"):
                if not self.unread:  # else it was reported
                    self.check()
                if any(layer.figures() for layer in self.layers):
                    self._close(Entry(self.steps, self.heads()))
        for layer in self.layers:
            layer.close()
        self.steps += 1
        self._passes = self._recorder.passes
        self._recorder.active = self.steps % self._recorder.options.every == 0

    def _close(self, entry: Entry) -> None:
        """Add a step to the series, look for alarms, and write it."""
        self.series.append(entry)
        del self.series[: -max(1, min(IN_MEMORY, ROWS_IN_MEMORY // max(1, len(entry.table))))]
        raised: list[Alarm] = []
        with self._going_on("looking for alarms"):
            raised = self._alarms.look(entry.step, entry.table, self.layers)
        self._runs = [run for run in self._runs if not run.closed]
        for run in self._runs:
            run.add(entry, raised, self)

    @contextmanager
    def _going_on(self, doing: str) -> Iterator[None]:
        """Report once what goes wrong: a recording never ends a training."""
        try:
            yield
        except OSError:
            raise  # a writer with on_error="stop"
        except Exception as error:
            if self._recorder.options.strict:
                raise
            if doing not in self._reported:
                self._reported.add(doing)
                warnings.warn(
                    f"hw.watch: {doing} failed, and the model runs on: {error}", stacklevel=3
                )
