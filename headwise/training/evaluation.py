"""A trained model, judged on what it was trained for, or made small enough to give away."""

import json
import shutil
from pathlib import Path
from typing import Any

from headwise import devices
from headwise.files import write_whole
from headwise.training import checkpoints, setups
from headwise.training.loading import ASSETS, built_in
from headwise.training.loop import undisturbed
from headwise.training.run_folder import Run


def judge(what: str | Path, device: str | None = None) -> dict[str, Any]:
    """The figures of a model on the test part of its corpus, which is fetched if need be."""
    from headwise.training.loading import load

    where = devices.chosen(device)
    run = Run(ASSETS / what if what in built_in() else Path(what))
    setup = setups.from_dict(run.asked()["setup"])
    model = load(what, where).model
    task: Any = setup.prepare(run)
    figures: dict[str, Any] = undisturbed(lambda: task.judge(model, where), model, where)
    return figures


def export(folder: Path, out: Path) -> int:
    """Copy a finished run's model in half precision; the size in bytes of what was written."""
    run, copy = Run(folder), Run(out)
    asked = run.asked()
    tensors, about = checkpoints.load(run.model)
    copy.folder.mkdir(parents=True, exist_ok=True)
    if copy.model.exists():
        raise ValueError(f"{out} holds a model already")
    half = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    if run.tokeniser.exists():
        shutil.copyfile(run.tokeniser, copy.tokeniser)
    write_whole(copy.config, json.dumps(asked, indent=2, ensure_ascii=False) + "\n")
    checkpoints.save(copy.model, half, {"step": about["step"]})
    return sum(path.stat().st_size for path in out.iterdir())
