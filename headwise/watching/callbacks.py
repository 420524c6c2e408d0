"""Callbacks for transformers' Trainer and for Lightning.

Neither package is imported before its callback is made. Both callbacks watch the model only in the
steps that are looked at: evaluation leaves no trace in the figures, the batches of one accumulated
step make one entry, and the steps between cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from headwise.watching.rules import Rule
from headwise.watching.runs.run_writer import RunWriter
from headwise.watching.table import scalars
from headwise.watching.watched_model import Watch, watch

if TYPE_CHECKING:
    from lightning.pytorch import Callback as LightningCallback
    from transformers import TrainerCallback


class LoopFollower:
    """A watch that follows somebody else's loop, which tells it when steps begin and end."""

    def __init__(
        self,
        every: int = 100,
        run: Path | str | None = None,
        *,
        rows: int | None = 64,
        alarms: bool | Rule | Iterable[Rule] = True,
        figures: Iterable[str] | None = None,
        heads: bool = False,
        recorded: dict[str, Any] | None = None,
        **looking: Any,
    ) -> None:
        self.every, self.run = every, run
        self.looking = {**looking, "every": every, "rows": rows, "alarms": alarms}
        self.figures, self.heads = None if figures is None else list(figures), heads
        self.recorded = recorded or {}
        self.watch: Watch | None = None
        self.writer: RunWriter | None = None
        self._told = -1  # the last step whose figures were returned

    def begin(self, model: nn.Module, step: int) -> None:
        """Training begins, after this many steps.

        If an earlier training was interrupted, its folder is continued.
        """
        again = self.writer is not None
        self.end()
        self.watch = watch(model, **self.looking)
        self.watch.steps, self._told = step, step - 1
        if self.run is not None:
            options = {"resume": again or step > 0, **self.recorded}
            self.writer = self.watch.record(self.run, **options)

    def before_step(self) -> None:
        """A step begins; it may be called again for further batches of the same step."""
        due = self.watch is not None and self.watch.steps % self.every == 0
        if due and self.watch is not None and not self.watch.attached:
            self.watch.attach()

    def after_step(self) -> dict[str, float]:
        """A step ended: the figures that have arrived since, as scalars; nothing waits for them.

        On a GPU they may be those of the step before: attn/step says which step they are of.
        """
        if self.watch is None:
            return {}
        self.watch.detach()
        self.watch.step()
        entry = self.watch.latest
        if entry is None or entry.step <= self._told:
            return {}
        self._told = entry.step
        found = scalars(entry.table, self.figures, heads=self.heads)
        found |= self.watch.counted()
        if entry.mfu is not None:
            found["attn/mfu"] = entry.mfu
        return {"attn/step": float(entry.step), **found} if found else {}

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the numbers of a step among what somebody's loop logs; other things are left out."""
        numbers = {
            name: value
            for name, value in values.items()
            if not name.startswith("attn/") and (isinstance(value, int | float) or _single(value))
        }
        if self.watch is not None and numbers:
            self.watch.log(step, **numbers)

    def end(self) -> None:
        """Training ends, with or without an error."""
        if self.watch is not None:
            self.watch.detach()
        if self.writer is not None and not self.writer.closed:
            self.writer.close()


def _single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def trainer(every: int = 100, run: Path | str | None = None, **options: Any) -> TrainerCallback:
    """A callback for transformers' Trainer: `Trainer(..., callbacks=[trainer(every=100)])`.

    It looks at every `every`-th step, writes a run folder if `run` names one, and adds its figures
    to the next logs: attn/layer_03/entropy_mean, ... The Trainer calls its reporters (TensorBoard,
    Weights & Biases) before the callbacks it was given; `callback.first(trainer)` moves this one to
    the front, so that they get the figures too. `rows`, `stats`, `layers` and `alarms` are those of
    `hw.watch`, `figures` chooses the scalars, `heads=True` adds those of each head, and
    `recorded` holds options of `RunWriter`. Numbers that the Trainer logs, such as its loss, join
    the run.
    """
    from transformers import TrainerCallback

    class HeadwiseCallback(TrainerCallback):
        """Watches the model that a Trainer trains."""

        def __init__(self) -> None:
            self.follower = LoopFollower(every, run, **options)
            self.seen: dict[str, float] = {}

        @property
        def watch(self) -> Watch | None:
            """The watch, once training has begun."""
            return self.follower.watch

        def first(self, trainer: Any) -> Any:
            """Move to the front of a Trainer's callbacks; the Trainer is returned."""
            others = trainer.callback_handler.callbacks
            trainer.callback_handler.callbacks = [self, *(x for x in others if x is not self)]
            return trainer

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.follower.begin(given["model"], state.global_step)

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.follower.before_step()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen = self.follower.after_step() or self.seen

        def on_log(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            logs = given.get("logs")
            self.follower.log(max(0, state.global_step - 1), logs or {})
            if self.seen and logs is not None and "loss" in logs:
                logs.update(self.seen)
                state.log_history[-1].update(self.seen)
                self.seen = {}

        def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.follower.end()

    return HeadwiseCallback()


def _losses(outputs: Any) -> dict[str, Any]:
    """The loss in what a training step of Lightning returned."""
    found = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return {} if found is None else {"loss": found}


def lightning(every: int = 100, run: Path | str | None = None, **options: Any) -> LightningCallback:
    """A callback for Lightning: `Trainer(..., callbacks=[lightning(every=100)])`.

    Its scalars go to the module's `log_dict`, and so to every logger. It takes the options of
    `trainer`.
    """
    from lightning.pytorch import Callback

    class HeadwiseCallback(Callback):
        """Watches the module that a Lightning Trainer fits."""

        def __init__(self) -> None:
            self.follower = LoopFollower(every, run, **options)
            self.steps = 0  # that the optimiser has taken

        @property
        def watch(self) -> Watch | None:
            """The watch, once fitting has begun."""
            return self.follower.watch

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            self.steps = trainer.global_step
            self.follower.begin(pl_module, self.steps)

        def on_train_batch_start(
            self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            self.follower.before_step()

        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if trainer.global_step == self.steps:
                return  # gradients are being accumulated
            self.follower.log(self.steps, _losses(outputs))
            self.steps = trainer.global_step
            if seen := self.follower.after_step():
                pl_module.log_dict(seen)

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.follower.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            self.follower.end()

    return HeadwiseCallback()
