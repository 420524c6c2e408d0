"""Start a training run, or resume one: `headwise train`."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise import devices
from headwise.training import setups
from headwise.training.run_folder import Run
from headwise.training.setups import Setup
from headwise.training.tasks.vision import Vision
from headwise.training.trainer import Trainer, steps_within


def train(
    setup: Setup | None,
    out: Path | str,
    *,
    device: str | None = None,
    minutes: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda measured: None,
    should_stop: Callable[[], bool] = lambda: False,
    watch_every: int | None = None,
) -> nn.Module | None:
    """Train by a setup in a folder, or resume the folder's run if the setup is None.

    `minutes` replaces the setup's number of steps by as many as fit into this time. Returns the
    trained model, or None if `should_stop` ended the run early; both leave a checkpoint.
    `watch_every` watches the heads at every so many steps, for `headwise watch`.
    """
    run, where = Run(Path(out)), devices.chosen(device)
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes={minutes:g} must be positive and finite; try minutes=10")
    beginning = setup is not None
    setup = setups.of_run(run) if setup is None else setup
    with run.locked():
        if beginning and run.config.exists():
            run.begin({})  # raises: the folder already holds a run
        task: Any = setup.prepare(run)
        trainer: Trainer[Any] = Trainer(
            task, setup.recipe, run, {}, where, report, should_stop, watch_every
        )
        task.batch(0, where)  # useless data is refused before anything is written
        if beginning:
            if minutes is not None:
                steps = steps_within(trainer, minutes)
                setup = replace(setup, recipe=replace(setup.recipe, steps=steps))
            run.begin(settings(setup, task) | measured(task))
        return replace(trainer, recipe=setup.recipe, settings=settings(setup, task)).train()


def settings(setup: Setup, task: Any) -> dict[str, Any]:
    """The settings in config.json: all it takes to load the model and to train it again."""
    return {"task": setup.task, "model": task.config.to_dict(), "setup": setups.to_dict(setup)}


def measured(task: Any) -> dict[str, Any]:
    """Figures of the data that the model needs later; they are not part of the settings."""
    return {"pixels": task.pixels} if isinstance(task, Vision) else {}
