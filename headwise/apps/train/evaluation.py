"""A finished run: scored on the test data of its task, or exported in half precision."""

import json
import shutil
from pathlib import Path
from typing import Any

from headwise import devices
from headwise.apps.train import setups
from headwise.apps.train.trainer import undisturbed
from headwise.files import write_whole
from headwise.models.trained import ASSETS, Run, built_in, checkpoints, load


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
