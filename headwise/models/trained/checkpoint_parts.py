"""Checkpoints that many processes wrote together: safetensors files and an index in JSON.

Each is a folder of its own, `last/<step>`. Every rank wrote its parts of the tensors, with their
offsets in the whole, into a file of its own, and the first rank the index when all parts were
there; a folder without one is not complete. Tensors have the names of parameters, so any number of
ranks can read them, sharded or not. No file can hold code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headwise.files import json_object
from headwise.models.trained import checkpoints

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


def weights(checkpoint: Path) -> dict[str, Tensor]:
    """The weights in a checkpoint, whole, by name."""
    about(checkpoint)  # refuses another format
    with stored(checkpoint) as tensors:
        return {
            name.removeprefix("model/"): tensor.whole()
            for name, tensor in tensors.items()
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
def stored(checkpoint: Path) -> Iterator[dict[str, Stored]]:
    """The tensors of a checkpoint, by name; ValueError if a part is missing or damaged."""
    count = about(checkpoint).get("ranks")
    if not isinstance(count, int) or count < 1:
        raise checkpoints.damaged(checkpoint / INDEX, f"ranks is {count!r}")
    found: dict[str, Stored] = {}
    with ExitStack() as stack:
        for rank in range(count):
            path = checkpoint / part_file(rank)
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


def part_file(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank}.safetensors"
