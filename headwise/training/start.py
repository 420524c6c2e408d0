"""Start a run, or go on with one: what `headwise train` does."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise import devices
from headwise.training import setups
from headwise.training.loop import Loop, steps_within
from headwise.training.run_folder import Run
from headwise.training.setups import Setup
from headwise.training.tasks.vision import Vision


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
    """Train in a folder by a setup; without one, go on with the folder's run.

    `minutes` replaces the setup's number of steps by as many as fit. The result is the trained
    model, or None where `should_stop` ended the run early; both leave a checkpoint. `watch_every`
    looks at the heads each so many steps, for `headwise watch`.
    """
    run, where = Run(Path(out)), devices.chosen(device)
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes={minutes:g} is no time to train in; 10 would be")
    with run.locked():
        beginning = setup is not None
        if setup is None:
            setup = setups.from_dict(run.asked()["setup"])
        elif run.config.exists():
            run.begin({})  # says why not
        task: Any = setup.prepare(run)
        loop: Loop[Any] = Loop(task, setup.recipe, run, {}, where, report, should_stop, watch_every)
        task.batch(0, where)  # data of no use is refused before anything is written
        if beginning:
            if minutes is not None:
                steps = steps_within(loop, minutes)
                setup = replace(setup, recipe=replace(setup.recipe, steps=steps))
            loop.recipe = setup.recipe
            run.begin(asked(setup, task) | measured(task))
        loop.asked = asked(setup, task)
        return loop.train()


def asked(setup: Setup, task: Any) -> dict[str, Any]:
    """What is written into config.json: all it takes to load the model, and to train it again."""
    return {"task": setup.task, "model": task.config.to_dict(), "setup": setups.to_dict(setup)}


def measured(task: Any) -> dict[str, Any]:
    """What the data say, and the model can't be used without; no part of what was asked."""
    return {"pixels": task.pixels} if isinstance(task, Vision) else {}
