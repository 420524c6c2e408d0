"""Checkpoints that many processes write together: safetensors files and an index in JSON.

Each is a folder of its own, `last/<step>`. Every rank writes its parts of the tensors, with their
offsets in the whole, into a file of its own. The first rank writes the index when all parts are
there; a folder without one is not complete. Tensors have the names of parameters, so another number
of ranks can read them, sharded or not. No file can hold code.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise import __version__
from headwise.apps.train import checkpoints
from headwise.apps.train.ranks import TrainingRanks
from headwise.distributed import held_range
from headwise.files import json_object, write_whole

# torch.distributed.checkpoint takes half a second to import, so only those who use it do. It names
# the states of an optimiser by parameters; its own files are pickles and are never opened.

INDEX = "index.json"


def newest(folder: Path) -> Path | None:
    """The complete checkpoint of the latest step; None if there is none."""
    steps = [path for path in folder.glob("*") if path.name.isascii() and path.name.isdecimal()]
    found = [path for path in steps if (path / INDEX).is_file()]
    if not found and any((path / ".metadata").exists() for path in (folder, *steps)):
        raise ValueError(
            f"{folder} holds a checkpoint of an older headwise that is a pickle, which can run "
            "code and is not opened; finish the run with the headwise that wrote it, or delete "
            f"{folder} and train again"
        )
    return max(found, key=lambda path: int(path.name), default=None)


def is_older(checkpoint: Path, state: Path) -> bool:
    """True if there is a checkpoint of one process, `state`, and it is of a later step."""
    return state.exists() and checkpoints.load(state)[1]["step"] > int(checkpoint.name)


def about(checkpoint: Path) -> dict[str, Any]:
    """The description of a checkpoint: its step and the settings of its run."""
    path = checkpoint / INDEX
    return checkpoints.described(json_object(path.read_bytes(), path), path)


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
        checkpoints.save(new / _file(ranks.own), tensors, about)
    except OSError as error:
        problem = error
    failed = ranks.largest(0 if problem is None else ranks.own + 1)
    if failed:
        why = "" if problem is None else f": {problem}"
        raise OSError(f"rank {failed - 1} could not write its part of {new}{why}") from problem
    if ranks.first:
        whole = {"format": checkpoints.FORMAT, "version": __version__, **described}
        write_whole(new / INDEX, json.dumps({**whole, "ranks": ranks.count}))
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
    with _stored(checkpoint) as stored, torch.no_grad():
        for name, tensor in _named(weights, states).items():
            if name not in stored or stored[name].shape != tuple(tensor.shape):
                found = stored[name].shape if name in stored else "missing"
                raise ValueError(
                    f"{checkpoint} holds another model: {name} is {found} and should be "
                    f"{tuple(tensor.shape)}"
                )
            stored[name].read(*_local(tensor))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, whole, by name."""
    about(checkpoint)  # refuses another format
    with _stored(checkpoint) as stored:
        return {
            name.removeprefix("model/"): tensor.whole()
            for name, tensor in stored.items()
            if name.startswith("model/")
        }


@dataclass(frozen=True)
class Part:
    """A part of a tensor: how to read it, and where it lies in the whole."""

    open: Callable[[], Any]  # a slice of safetensors, or a tensor
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint, in parts."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def read(self, into: Tensor, offset: list[int]) -> None:
        """Copy the piece that begins at an offset of the whole."""
        for part in self.parts:
            ours, theirs = [], []
            for own, size, first, length in zip(
                offset, into.shape, part.offset, part.shape, strict=True
            ):
                start, stop = max(own, first), min(own + size, first + length)
                ours.append(slice(start - own, max(start, stop) - own))
                theirs.append(slice(start - first, max(start, stop) - first))
            if all(cut.stop > cut.start for cut in ours):
                into[tuple(ours)].copy_(part.open()[tuple(theirs)])

    def whole(self) -> Tensor:
        """All of it."""
        first = self.parts[0].open()
        dtype = first[tuple(slice(0, 1) for _ in self.shape)].dtype
        made = torch.empty(self.shape, dtype=dtype)
        self.read(made, [0] * len(self.shape))
        return made


@contextmanager
def _stored(checkpoint: Path) -> Iterator[dict[str, Stored]]:
    """The tensors of a checkpoint, by name; ValueError if a part is missing or damaged."""
    count = about(checkpoint).get("ranks")
    if not isinstance(count, int) or count < 1:
        raise checkpoints.damaged(checkpoint / INDEX, f"ranks is {count!r}")
    found: dict[str, Stored] = {}
    with ExitStack() as stack:
        for rank in range(count):
            path = checkpoint / _file(rank)
            file, described = stack.enter_context(checkpoints.opened(path))
            try:
                for name, place in described["parts"].items():
                    shape, part = _part(file, name, place)
                    before = found.get(name, Stored(shape, ()))
                    if before.shape != shape:
                        raise ValueError(f"{name} is {shape}, and {before.shape} before")
                    found[name] = Stored(shape, (*before.parts, part))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise checkpoints.damaged(path, error) from error
        for name, tensor in found.items():
            if sum(math.prod(part.shape) for part in tensor.parts) != math.prod(tensor.shape):
                raise checkpoints.damaged(checkpoint, f"parts of {name} are missing")
        yield found


def _part(file: Any, name: str, place: dict[str, list[int]]) -> tuple[tuple[int, ...], Part]:
    """The shape of a tensor, and its part in this file; ValueError if that lies outside."""
    shape, offset = tuple(place["shape"]), tuple(place["offset"])
    if name not in file.keys():  # noqa: SIM118
        raise ValueError(f"{name} is missing")
    held = tuple(file.get_slice(name).get_shape())
    if not len(shape) == len(offset) == len(held):
        raise ValueError(f"{name} has {len(held)} dimensions, not {len(shape)}")
    for first, size, length in zip(offset, held, shape, strict=True):
        if not (type(first) is int and type(length) is int and 0 <= first <= length - size):
            raise ValueError(f"{name}: {size} values from {first!r} on are not within {length!r}")
    # A slice of a single number can't be indexed.
    read = (lambda: file.get_slice(name)) if shape else (lambda: file.get_tensor(name))
    return shape, Part(read, offset, held)


def _file(rank: int) -> str:
    return f"rank-{rank}.safetensors"


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
