"""Checkpoints that many processes write together, and resume from.

`headwise.models.trained.checkpoint_parts` describes their files and reads them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import __version__
from headwise.apps.train.ranks import TrainingRanks
from headwise.distributed import held_range
from headwise.files import write_whole
from headwise.models.trained import checkpoint_parts as parts
from headwise.models.trained import checkpoints

# torch.distributed.checkpoint takes half a second to import, so only those who use it do. It names
# the states of an optimiser by parameters; its own files are pickles and are never opened.


def save(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    described: Mapping[str, Any],
    ranks: TrainingRanks,
) -> None:
    """Write the checkpoint of a step, then delete those before it; every rank must call this."""
    new = folder / str(described["step"])
    if ranks.first:
        remove(new)  # a killed run may have left a part of it
        new.mkdir(parents=True)
    ranks.largest(0)  # nobody writes before the folder is there
    tensors, places = {}, {}
    for name, tensor in _named(*_state(model, optimizer)).items():
        local, offset = _local(tensor)
        cut = any(each.is_shard() for each in getattr(tensor, "placements", ()))
        if local.numel() and (cut or ranks.first):  # of what all have, the first writes it
            tensors[name] = local
            places[name] = {"shape": list(tensor.shape), "offset": offset}
    problem: OSError | None = None
    try:
        about = {"step": described["step"], "parts": places}
        checkpoints.save(new / parts.part_file(ranks.own), tensors, about)
    except OSError as error:
        problem = error
    failed = ranks.largest(0 if problem is None else ranks.own + 1)
    if failed:
        why = "" if problem is None else f": {problem}"
        raise OSError(f"rank {failed - 1} could not write its part of {new}{why}") from problem
    if ranks.first:
        whole = {"format": checkpoints.FORMAT, "version": __version__, **described}
        write_whole(new / parts.INDEX, json.dumps({**whole, "ranks": ranks.count}))
        for old in folder.glob("*"):
            if old != new:
                remove(old)


def remove(folder: Path) -> None:
    """Delete a checkpoint, or the folder of all."""
    shutil.rmtree(folder, ignore_errors=True)


def restore(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint into a model and its optimiser, by any number of ranks."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    weights, states = _state(model, optimizer)
    with parts.stored(checkpoint) as stored, torch.no_grad():
        for name, tensor in _named(weights, states).items():
            if name not in stored or stored[name].shape != tuple(tensor.shape):
                found = stored[name].shape if name in stored else "missing"
                raise ValueError(
                    f"{checkpoint} holds another model: {name} is {found} and should be "
                    f"{tuple(tensor.shape)}"
                )
            stored[name].read(*_local(tensor))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Weights and states of the optimiser by the names of parameters, as torch returns them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return get_state_dict(model, optimizer)


def _named(weights: Mapping[str, Any], states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors by one name each; what is not a tensor comes from the recipe."""
    found = {f"model/{name}": tensor for name, tensor in weights.items()}
    for name, state in states["state"].items():
        found |= {f"optimizer/{name}/{key}": tensor for key, tensor in state.items()}
    return found


def _local(x: Tensor) -> tuple[Tensor, list[int]]:
    """This rank's part of a tensor, and its offset in the whole."""
    placements: Any = getattr(x, "placements", None)
    if placements is None:
        return x, [0] * x.ndim
    mesh = x.device_mesh  # type: ignore[attr-defined]
    cuts = [[m for m, p in enumerate(placements) if p.is_shard(axis)] for axis in range(x.ndim)]
    offset = [held_range(x.shape[axis], mesh, cuts[axis]).start for axis in range(x.ndim)]
    return x.to_local(), offset  # type: ignore[attr-defined]


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
