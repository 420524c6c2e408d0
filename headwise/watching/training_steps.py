"""The steps of a training that is watched: their figures, alarms and files."""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from headwise.core.host_copy import HostCopy
from headwise.costs.uses.step_meter import MeteredStep, StepMeter, StepUtilisation
from headwise.watching.adapters.module_forwards import find_module
from headwise.watching.alarms import Alarm, Alarms, alarm_scalars
from headwise.watching.head_weights import head_place
from headwise.watching.logged import Course, LoggedNumbers
from headwise.watching.ranks.joined_steps import JoinedSteps
from headwise.watching.recorded_pass import KeptStep
from headwise.watching.recorder.board import Board
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.held_call import HeldCall
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.recording import Entry, HeadRows, Recording, overflow
from headwise.watching.rules import Rule
from headwise.watching.runs.run_writer import RunWriter
from headwise.watching.table import Table, Value

FORMAT = 1
"""Of a state; a reader refuses those it does not know."""

IN_MEMORY, ROWS_IN_MEMORY = 1000, 200_000
"""Steps of a series that stay in memory at most, and rows of all their tables together."""


@dataclass(frozen=True)
class EndedStep:
    """A step that has ended: its layers, and copies of their figures, perhaps still on the way."""

    number: int
    layers: tuple[WatchedLayer, ...]
    copies: Mapping[Board, HostCopy]
    compared: set[str]  # modules whose output was compared with what was read
    metered: MeteredStep | None = None  # if the model learned in it
    held: Mapping[str, HeldCall] = field(default_factory=dict)  # by layer, if effects are watched

    @property
    def arrived(self) -> bool:
        """True if reading it waits for nothing."""
        metered = self.metered is None or self.metered.ended.passed
        return metered and all(copy.arrived for copy in self.copies.values())


class SteppedRecording(Recording):
    """A recording that is made while a model trains: it ends with each step, and begins anew.

    A step's figures are copied from the device when it ends, and read once they have arrived: when
    the next step ends, or when somebody asks.
    """

    utilisation: StepUtilisation | None = None
    """The model FLOPs utilisation (MFU) of the last training step that was read, or why it is not
    known; None before one."""

    def __init__(
        self,
        model: nn.Module,
        recorder: CallRecorder,
        rules: tuple[Rule, ...] = (),
        ranks: JoinedSteps | None = None,
    ) -> None:
        self.model, self._meter = model, StepMeter(model)
        self.ranks = ranks  # the processes whose figures are joined when a step ends
        recorder.registry.some_layers = ranks is not None and ranks.stages
        recorder.registry.placed = partial(placed_heads, model)
        self._recorder, self._alarms = recorder, Alarms(rules)
        self._series: list[Entry] = []
        self._ended: EndedStep | None = None  # the last step, if it was not read yet
        self.steps = 0  # training steps that ended
        self._kept: dict[int, KeptStep] = {}
        self._runs: list[RunWriter] = []
        self._by_hand = False  # step() was called, so optimisers don't end steps
        self._ended_by_optimiser = False  # the last step, and nothing has run since
        self._optimiser: weakref.ref[Optimizer] | None = None  # that ended it
        self._known: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = (
            weakref.WeakKeyDictionary()  # optimisers: how many groups they have, and are they ours
        )
        self._passes = 0  # of the steps that ended
        self._logged, self._log_comes_late, self._heard = LoggedNumbers(), False, False
        self._reported: set[str] = set()  # what went wrong, each once

    @property
    def layers(self) -> list[WatchedLayer]:
        recorder = self._recorder  # compiled code also prepares layers that may never run
        return [
            layer
            for layer in recorder.registry.layers.values()
            if not layer.compiled
            or (layer.last is not None and recorder.options.ask_for(layer.number, layer.name))
        ]

    @property
    def tokens(self) -> Tensor | None:
        return self._recorder.passes.tokens

    @property
    def kept_steps(self) -> dict[int, KeptStep]:
        return self._kept

    @property
    def unread(self) -> list[str]:
        unread = self._recorder.unread
        if not self.steps:  # else the table of a step has looked, and nobody waits here
            unread.look({slot.board: slot.board.now for slot, _ in unread.compiled.values()})
        return list(unread.reasons)

    @property
    def others(self) -> Table:
        return self._recorder.others.table()

    def implied_map(self, name: str, head: int, batch: int = 0) -> Tensor:
        """The weights (N, N), float64, with which a linear layer's outputs are sums of its values.

        `name` is that of a layer of `seen.others`, in the last pass. They are exact: row i holds
        what o_i has of every value, without a softmax, so they may be negative and sum to anything.
        Known for Mamba-2, the gated delta rule and Kimi delta attention.
        """
        return self._recorder.others.implied_map(name, head, batch)

    @property
    def series(self) -> list[Entry]:  # type: ignore[override]
        """The steps that were looked at, each with its table; waits for the last one to arrive."""
        self._settle()
        return self._series

    @property
    def last_step(self) -> int | None:
        if self._ended is not None:
            return self._ended.number
        return self._series[-1].step if self._series else None

    @property
    def latest(self) -> Entry | None:
        """The last step whose figures have arrived; nothing waits. None if there is none yet."""
        if self._ended is not None and self._ended.arrived:
            self._settle()
        return self._series[-1] if self._series else None

    @property
    def alarms(self) -> list[Alarm]:  # type: ignore[override]
        """The findings of the rules, each head and rule once."""
        self._settle()
        return self._alarms.raised

    @property
    def logged(self) -> dict[str, Course]:
        self._write_logged()
        return self._logged.courses()

    def log(self, step: int | None = None, **values: float | Tensor) -> None:
        """Note numbers of the training beside its heads, such as its loss: `watch.log(loss=loss)`.

        They belong to the step that runs, or to the one that has just ended, unless `step` names
        another. A tensor is read later: a GPU is not waited for.

        >>> import headwise as hw, torch
        >>> model = hw.nn.MultiHeadAttention(64, 8)
        >>> with hw.watch(model) as watch:
        ...     for _ in range(2):
        ...         watch.log(loss=model(torch.randn(1, 10, 64)).square().mean())
        ...         watch.step()
        >>> watch.logged["loss"][0]
        [0, 1]
        """
        self._logged.add(self._running_step() if step is None else step, values)

    def _running_step(self) -> int:
        """The step that a number belongs to: the running one, or one that has just ended.

        In steps that are passed over nobody sees the model run: there numbers come as late as in
        the last step that was looked at.
        """
        if self._recorder.active:
            late = self._passes == self._recorder.passes.count
            self._heard = self._heard or not late
        else:
            late = self._log_comes_late
        return max(0, self.steps - 1) if late else self.steps

    def _write_logged(self) -> None:
        """Give the folders what was logged since the last time."""
        found = self._logged.take()
        if self.ranks is None or self.ranks.first:
            for run in self._runs:
                run.log(found)

    def heads(self) -> Table:
        recorded = [layer for layer in self.layers if layer.recorded]
        if not recorded:
            self._recorder.unread.warn()
            return super().heads()
        copies = {board: board.copy() for board in self._recorder.registry.boards.values()}
        table = self._table(recorded, copies, self._recorder.proofs.take(), _held_calls(recorded))
        return table if len(table) else super().heads()

    def counted(self) -> dict[str, float]:
        """Count the alarms of the steps that have been read; nothing waits."""
        return alarm_scalars(self._alarms.raised, self._rules())

    def _rules(self) -> list[str]:
        return [rule.name for rule in self._alarms.rules]

    def state_dict(self) -> dict[str, Any]:
        """The steps, the series and the alarms so far, for a checkpoint.

        They are plain numbers, strings, lists and dictionaries, so that `torch.save` and JSON take
        them. What was seen in a step that has not ended is left out.
        """
        self._settle()
        return {
            "format": FORMAT,
            "steps": self.steps,
            "series": [entry.to_dict() for entry in self._series],
            "logged": {name: list(course) for name, course in self.logged.items()},
            "alarms": self._alarms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved: with its next step, its series and its alarms.

        A folder of `record(folder, resume=True)` drops the steps that come again.
        """
        known = state.get("format") if hasattr(state, "get") else type(state).__name__
        if known != FORMAT:
            raise ValueError(
                f"this is no state of a watch that this headwise can read: its format is {known}, "
                f"and {FORMAT} is known; give load_state_dict what state_dict() returned"
            )
        series = [Entry.from_dict(entry) for entry in state["series"]]
        self._alarms.load_state_dict(state["alarms"])
        self._logged.restore(state.get("logged", {}))
        self._series, self._ended, self.steps = series, None, int(state["steps"])
        for board in self._recorder.registry.boards.values():
            board.take()
        for layer in self._recorder.registry.layers.values():
            layer.close()
        self._passes = self._recorder.passes.count
        self._look(self.steps % self._recorder.options.every == 0)

    def check(self) -> None:
        """Raise ValueError if the model ran, and what was asked for was not seen."""

    def step(self, keep: bool = False) -> None:
        """End a training step: the figures since the last one join the series.

        Steps of an optimiser that holds the model's parameters end by themselves, until this is
        called once: then every step ends here. With `keep` the last pass of the step stays, its
        queries and keys included, as a recording in `kept_steps`.
        """
        if keep and not self._recorder.options.maps:
            raise ValueError("step(keep=True) keeps maps; use hw.watch(model, maps=True)")
        ended = self._ended_by_optimiser and self._passes == self._recorder.passes.count
        mapped = [x for x in self.layers if x.last is not None and x.last.call is not None]
        ran = [layer for layer in mapped if ended or not layer.ended]
        self._by_hand, looked = True, self._recorder.active
        if ended:
            self._ended_by_optimiser = False
        else:
            self._end_step()
        if keep and looked and ran:
            self._kept[self.steps - 1] = KeptStep(self.steps - 1, ran, self.tokens)

    def optimised(self, optimiser: Optimizer, *_: object) -> None:
        """An optimiser made a step: a training step ends, if the model ran and it is its own.

        Nobody sees the model run in a step that is passed over: the optimiser that ended the last
        step ends those.
        """
        if self._recorder.active and self._is_ours(optimiser):
            self._meter.learn()
        if self._by_hand:
            return
        last = None if self._optimiser is None else self._optimiser()
        ran = self._passes != self._recorder.passes.count or any(
            [layer.has_run() for layer in self._recorder.registry.layers.values()]
        )
        if ran:
            ends = self._is_ours(optimiser)
        else:
            first = last is None and self._is_ours(optimiser)
            ends = not self._recorder.active and (optimiser is last or first)
        if ends:
            self._optimiser = weakref.ref(optimiser)
            self._end_step()
            self._ended_by_optimiser = True

    def _is_ours(self, optimiser: Optimizer) -> bool:
        """True if an optimiser holds parameters of the model."""
        groups, ours = self._known.get(optimiser, (-1, False))
        if groups != len(optimiser.param_groups):
            mine = {id(x) for x in self.model.parameters()}
            given = (x for group in optimiser.param_groups for x in group["params"])
            ours = any(id(x) in mine for x in given)
            self._known[optimiser] = (len(optimiser.param_groups), ours)
        return ours

    def _look(self, looking: bool) -> None:
        """Look at the step that begins, or pass it over."""
        self._recorder.active = looking

    def _end_step(self) -> None:
        registry, self._recorder.others.ended = self._recorder.registry, True
        registry.numbered = registry.numbered or bool(registry.layers)
        if self._recorder.active:
            failure = None
            try:
                self._settle()  # the step before: its figures have arrived by now
                with self._going_on("ending a step"):
                    if not self._recorder.unread.reasons:  # else it was reported
                        self.check()
            except Exception as error:
                if self.ranks is None:
                    raise
                failure = error  # the other ranks wait: they hear of it first
            with self._going_on("ending a step"):
                self._send_figures(failure)
            for layer in self._recorder.registry.layers.values():
                layer.close()
            self._log_comes_late, self._heard = not self._heard, False
        self.steps += 1
        self._passes = self._recorder.passes.count
        looking = self.steps % self._recorder.options.every == 0
        if looking or self._recorder.active:
            with self._going_on("beginning a step"):
                if looking != self._recorder.active:
                    self._look(looking)
                if looking:
                    self._meter.begin()

    def _send_figures(self, failure: Exception | None) -> None:
        """Send the figures of this step on their way; they are read later, if that is possible."""
        recorded = tuple(x for x in self._recorder.registry.layers.values() if x.recorded)
        if self.ranks is not None:
            copies = self.ranks.take(self._recorder, failure)
            recorded = self.ranks.layers  # what this one did not see, others may have
        elif recorded:
            copies = {board: board.take() for board in self._recorder.registry.boards.values()}
        else:
            return
        # With ranks, a pass may be a part of a sequence: its FLOPs are not those of its shape.
        metered = self._meter.end() if self.ranks is None else None
        compared = self._recorder.proofs.take()
        self._ended = EndedStep(
            self.steps, recorded, copies, compared, metered, _held_calls(recorded)
        )
        keeping = any(run.keeps(self.steps) for run in self._runs)
        if self._ended.arrived or self._alarms.need_maps or keeping:
            self._settle()

    def _settle(self) -> None:
        """Read the last step that ended, if it was not read yet."""
        ended, self._ended = self._ended, None
        self._write_logged()
        if ended is not None:
            with self._going_on("ending a step"):
                table = self._table(ended.layers, ended.copies, ended.compared, ended.held)
                if len(table):
                    self._close(Entry(ended.number, table, self._used(ended, table)))

    def _used(self, ended: EndedStep, table: Table) -> float | None:
        """The utilisation of a step, which is noted below its table; None if it is not known."""
        if ended.metered is None:
            return None
        used = self.utilisation = self._meter.read(ended.number, ended.metered)
        if used.mfu is not None:
            table.note = "\n".join(x for x in (table.note, f"({used})") if x)
        return used.mfu

    def _table(
        self,
        layers: Sequence[WatchedLayer],
        copies: Mapping[Board, HostCopy],
        compared: Iterable[str],
        held: Mapping[str, HeldCall],
    ) -> Table:
        """The figures of some layers; those that were misread leave the recording first."""
        boards = {board: copy.read() for board, copy in copies.items()}
        joined = self.ranks is not None and self.ranks.board in boards
        if self.ranks is not None:
            self.ranks.read(boards)
        for module in compared:
            self._judge(module, [x for x in layers if x.module == module], boards)
        self._recorder.unread.look(boards)
        self._recorder.unread.warn()
        here, asked_for = self._recorder.registry.layers, self._recorder.options.ask_for
        misread = [name for name in self._recorder.registry.shown if name not in here]
        left = [layer for layer in layers if layer.name in here or joined]
        left = [
            layer
            for layer in left
            if not (layer.compiled or layer.replayed or joined)
            or (_has_rows(layer, boards) and asked_for(layer.number, layer.name))
        ]
        left = [layer for layer in left if layer.name not in misread]
        rows = HeadRows(left, boards, self._recorder.options.rows is not None)
        options, blind = self._recorder.options, rows.blind()
        finite = rows.finite and not options.effects
        if options.effects:
            _add_effects(rows.made(), left, held)
        shown: Sequence[Mapping[str, Value]] = rows
        if options.heads is not None:
            shown = [row for row in rows if row["head"] in options.heads]
        notes = [self._note(), None if finite else overflow(shown)]
        return Table(shown, note="\n".join(x for x in notes if x is not None) or None, blind=blind)

    def _judge(
        self, module: str, layers: Sequence[WatchedLayer], boards: Mapping[Board, Tensor]
    ) -> None:
        """Leave the layers of a module out if its output shows that it was misread."""
        slots = [layer.slot for layer in layers if layer.slot is not None]
        found = [float(boards[slot.board][slot.number, -1, 0]) for slot in slots]
        try:
            self._recorder.proofs.judge(module, max(found, default=-math.inf))
        except ValueError as error:
            self._recorder.leave_out(layers, error)

    def _close(self, entry: Entry) -> None:
        """Add a step to the series, look for alarms, and write it."""
        self._series.append(entry)
        del self._series[: -max(1, min(IN_MEMORY, ROWS_IN_MEMORY // max(1, len(entry.table))))]
        if self.ranks is not None and not self.ranks.first:
            return  # the first rank reports for all
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


def placed_heads(model: nn.Module, name: str, heads: int, width: int) -> tuple[int, int] | None:
    """The place of a module's heads among those of the whole layer; None if it is not known."""
    try:
        return head_place(find_module(model, name), heads, width)
    except ValueError:  # it is not there under this name
        return None


def _held_calls(layers: Iterable[WatchedLayer]) -> dict[str, HeldCall]:
    return {layer.name: layer.held for layer in layers if layer.held is not None}


def _add_effects(
    rows: Sequence[dict[str, Value]],
    layers: Iterable[WatchedLayer],
    held: Mapping[str, HeldCall],
) -> None:
    """Add the column `effect`: what switching a head off adds, to first order; NaN if unknown."""
    known: dict[tuple[Value, Value], float] = {}
    for layer in layers:
        call = held.get(layer.name)
        found = None if call is None else call.switched_off()
        if found is not None:
            for head, value in enumerate(found.tolist()):
                known[layer.number, layer.first_head + head] = value
    for row in rows:
        row["effect"] = known.get((row["layer"], row["head"]), math.nan)


def _has_rows(layer: WatchedLayer, boards: Mapping[Board, Tensor]) -> bool:
    """True if a layer recorded something."""
    assert layer.slot is not None
    return bool(boards[layer.slot.board][layer.slot.number, 0].any())
