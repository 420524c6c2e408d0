"""Runs of training: started or resumed, scored on the test data, exported in half precision."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise import devices
from headwise.apps.train import setups
from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.apps.train.setups import LanguageSetup, Setup
from headwise.apps.train.tasks.language import Language
from headwise.apps.train.tasks.vision import Vision
from headwise.apps.train.trainer import Trainer, steps_within, undisturbed
from headwise.files import write_whole
from headwise.models.trained import ASSETS, Run, built_in, checkpoints, load


def train(
    setup: Setup | None,
    out: Path | str,
    *,
    device: str | None = None,
    minutes: float | None = None,
    report: Callable[[dict[str, Any]], None] = lambda measured: None,
    should_stop: Callable[[], bool] = lambda: False,
    watch_every: int | None = None,
    ranks: TrainingRanks = ALONE,
) -> nn.Module | None:
    """Train by a setup in a folder, or resume the folder's run if the setup is None.

    `minutes` replaces the setup's number of steps by as many as fit into this time. Returns the
    trained model, or None if `should_stop` ended the run early; both leave a checkpoint.
    `watch_every` watches the heads at every so many steps, for `headwise watch`.

    With several `ranks`, every process calls this with the same arguments and a folder that all of
    them share; the first writes and reports. Those of torchrun come from `torchrun.joined`.
    """
    run, where = Run(Path(out), ranks.first), devices.chosen(device)
    if minutes is not None and not 0 < minutes < math.inf:
        raise ValueError(f"minutes={minutes:g} must be positive and finite; try minutes=10")
    beginning = setup is not None
    setup = setups.setup_of_run(run) if setup is None else setup
    check_ranks(setup, ranks)
    with run.locked():
        if beginning and run.config.exists():
            run.begin({})  # raises: the folder already holds a run
        task = prepared(setup, run, ranks)
        trainer: Trainer[Any] = Trainer(
            task,
            setup.recipe,
            run,
            {},
            where,
            report if ranks.first else lambda measured: None,
            should_stop,
            watch_every,
            ranks,
        )
        first = task.batch(0, where)  # useless data is refused before anything is written
        if ranks.mesh is not None:
            check_share(len(first[0]), ranks)
        if beginning:
            if minutes is not None:
                steps = steps_within(trainer, minutes)
                setup = replace(setup, recipe=replace(setup.recipe, steps=steps))
            run.begin(settings(setup, task) | data_figures(task))
        return replace(trainer, recipe=setup.recipe, settings=settings(setup, task)).train()


def check_ranks(setup: Setup, ranks: TrainingRanks) -> None:
    """Raise ValueError if many ranks were started for a task that one process trains."""
    if ranks.mesh is not None and not isinstance(setup, LanguageSetup):
        raise ValueError(
            f"{setup.task} is trained by one process, and {ranks.count} were started; leave out "
            "torchrun"
        )


def prepared(setup: Setup, run: Run, ranks: TrainingRanks) -> Any:
    """The task of a setup; the first rank reads its data and learns its subwords before others."""
    task: Any = setup.prepare(run) if ranks.first else None
    ranks.largest(0)
    if task is None:
        task = setup.prepare(run)
    if isinstance(task, Language):
        task.ranks = ranks
    return task


def check_share(texts: int, ranks: TrainingRanks) -> None:
    """Raise ValueError unless every rank gets one of so many texts, or a part of one."""
    if texts < ranks.rows:
        raise ValueError(
            f"a batch of {texts} texts can't be dealt to {ranks.count} processes, of which "
            f"{ranks.together} share each text; let at least {-(-ranks.count // texts)} share it "
            "(--context-ranks)"
        )


def settings(setup: Setup, task: Any) -> dict[str, Any]:
    """The settings in config.json: all it takes to load the model and to train it again."""
    return {"task": setup.task, "model": task.config.to_dict(), "setup": setups.to_dict(setup)}


def data_figures(task: Any) -> dict[str, Any]:
    """Figures of the data that the model needs later; they are not part of the settings."""
    return {"pixels": task.pixels} if isinstance(task, Vision) else {}


def judge(what: str | Path, device: str | None = None) -> dict[str, Any]:
    """Score a model on the test part of its corpus, which is downloaded first if necessary."""
    where = devices.chosen(device)
    run = Run(ASSETS / what if what in built_in() else Path(what))
    setup = setups.setup_of_run(run)
    model = load(what, where).model
    task: Any = setup.prepare(run)
    figures: dict[str, Any] = undisturbed(lambda: task.judge(model, where), model, where)
    return figures


def export(folder: Path, out: Path) -> int:
    """Copy a finished run's model in half precision; the bytes that were written."""
    run, copy = Run(folder), Run(out)
    settings = run.settings()
    tensors, about = checkpoints.load(run.model)
    copy.folder.mkdir(parents=True, exist_ok=True)
    if copy.model.exists():
        raise ValueError(f"{out} already holds a model; choose another folder")
    half = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if run.tokeniser.exists():
        shutil.copyfile(run.tokeniser, copy.tokeniser)
    write_whole(copy.config, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    checkpoints.save(copy.model, half, {"step": about["step"]})
    return sum(path.stat().st_size for path in out.iterdir())
