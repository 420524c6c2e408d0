"""Checkpoints that many processes write together, by `torch.distributed.checkpoint`.

Each is a folder of its own, `last/<step>`, complete once torch has written its `.metadata`. Tensors
are stored by the names of parameters, so another number of ranks can read them, sharded or not.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headwise import __version__
from headwise.apps.train import checkpoints
from headwise.apps.train.ranks import TrainingRanks
from headwise.files import write_whole

# torch.distributed.checkpoint takes half a second to import, so only those who use it do.

ABOUT = "about.json"


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step; None if there is none."""
    found = [path for path in folder.glob("*") if (path / ".metadata").is_file()]
    return max(found, key=lambda path: int(path.name), default=None)


def is_older(checkpoint: Path, state: Path) -> bool:
    """True if there is a checkpoint of one process, `state`, and it is of a later step."""
    return state.exists() and int(checkpoints.load(state)[1]["step"]) > int(checkpoint.name)


def about(checkpoint: Path) -> dict[str, Any]:
    """The description of a checkpoint: its step and the settings of its run."""
    found: dict[str, Any] = json.loads((checkpoint / ABOUT).read_text(encoding="utf-8"))
    if found.get("format") != checkpoints.FORMAT:
        raise ValueError(
            f"{checkpoint} has format {found.get('format')!r} (headwise {found.get('version')}), "
            f"and this headwise, {__version__}, reads format {checkpoints.FORMAT}"
        )
    return found


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    described: Mapping[str, Any],
    ranks: TrainingRanks,
) -> None:
    """Write the checkpoint of a step, then delete those before it; every rank must call this."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as write

    assert ranks.mesh is not None
    new = folder / str(described["step"])
    if ranks.first:
        remove(new)  # a killed run may have left a part of it
        new.mkdir(parents=True)
        whole = {"format": checkpoints.FORMAT, "version": __version__, **described}
        write_whole(new / ABOUT, json.dumps(whole))
    ranks.largest(0)  # nobody writes before the folder is there
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    try:
        write(state, checkpoint_id=new, process_group=ranks.mesh.get_group())
    except CheckpointException as error:  # every rank hears of the failures of all
        rank, (why, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank} could not write {new}: {why}") from error
    ranks.largest(0)  # all parts are written
    if ranks.first:
        for old in folder.glob("*"):
            if old != new:
                remove(old)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or the folder of all."""
    shutil.rmtree(folder, ignore_errors=True)


def restore(
    checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ranks: TrainingRanks
) -> None:
    """Load a checkpoint into a model and its optimiser, by any number of ranks."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, states = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": states}
    _load(checkpoint, state, None if ranks.mesh is None else ranks.mesh.get_group())
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def restore_weights(checkpoint: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint into a model in one process."""
    _load(checkpoint, {"model": model.state_dict()})


def _load(checkpoint: Path, state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """Read into the tensors of a state; ValueError if the checkpoint holds another model."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as intended
        try:
            load(state, checkpoint_id=checkpoint, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, (why, _) = next(iter(error.failures.items()))
            raise ValueError(f"rank {rank} could not read {checkpoint}: {why}") from error


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of a model that is spread over ranks, whole, on the first rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    found = get_model_state_dict(model, options=options)
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def spread(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    remake: Callable[[nn.Module], torch.optim.Optimizer],
    ranks: TrainingRanks,
) -> torch.optim.Optimizer:
    """Spread a whole model over ranks, in place; the optimiser of its new parameters.

    `remake` makes an optimiser, into which the state of the one before is moved.
    """
    if not ranks.sharded:
        ranks.prepare(model)
        return optimizer  # the parameters are the same objects
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    states = (
        get_optimizer_state_dict(model, optimizer, options=options) if optimizer.state else None
    )
    ranks.prepare(model)
    made = remake(model)
    if states is not None:
        set_optimizer_state_dict(model, made, states, options=options)
    return made
