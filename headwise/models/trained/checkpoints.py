"""Checkpoints: a run's whole state in one safetensors file, replaced atomically."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from headwise.core.arguments import is_integer
from headwise.files import json_object, write_whole
from headwise.messages import say
from headwise.version import __version__

FORMAT = 1
"""The format of the files; a reader refuses any other number."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by name; a tensor with two names is listed once.

    >>> list(weights(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    unique: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        unique.setdefault(id(tensor), (name, tensor.detach()))
    return dict(unique.values())


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """Copy tensors into a model of the same shape; ValueError, and no change, if they differ."""
    check_weights(model, tensors, origin)
    with torch.no_grad():
        for name, tensor in weights(model).items():
            tensor.copy_(tensors[name])


def check_weights(model: nn.Module, tensors: Mapping[str, Tensor], origin: Path) -> None:
    """ValueError unless tensors have the names and shapes of a model's."""
    into = weights(model)
    differences = [f"{name} is missing" for name in into.keys() - tensors.keys()]
    differences += [f"{name} is not in the model" for name in tensors.keys() - into.keys()]
    differences += [
        f"{name} is {tuple(tensors[name].shape)} and should be {tuple(into[name].shape)}"
        for name in into.keys() & tensors.keys()
        if tensors[name].shape != into[name].shape
    ]
    differences += [
        f"{name} is of {tensors[name].dtype} and should be of {into[name].dtype}"
        for name in into.keys() & tensors.keys()
        if tensors[name].is_floating_point() != into[name].is_floating_point()
    ]
    if differences:
        some = "; ".join(sorted(differences)[:3])
        raise ValueError(
            f"{origin} holds another model: {some} ({len(differences)} differences in all)"
        )


def save(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and a description; the old file stays until the new one is complete."""
    safetensors = _safetensors()
    about = {"format": FORMAT, "version": __version__, **about}
    cleaned = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    content = safetensors.torch.save(cleaned, metadata={"headwise": json.dumps(about)})
    try:
        write_whole(path, content)
    except OSError as error:
        reason = "the disk is full" if error.errno == errno.ENOSPC else str(error)
        kept = "the last checkpoint is untouched" if path.exists() else "there is no checkpoint yet"
        raise OSError(f"could not write {path}: {reason}; {kept}") from error


def remove_leftovers(path: Path) -> None:
    """Delete the unfinished files that a killed run left beside its checkpoint."""
    for leftover in path.parent.glob(f".{path.name}-*"):
        leftover.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a file, on the CPU, and its description."""
    with opened(path) as (file, about):
        try:
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118
        except _safetensors().SafetensorError as error:
            raise damaged(path, error) from error


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A file, whose tensors are not read yet, and its description."""
    safetensors = _safetensors()
    if not path.is_file():
        raise ValueError(say("there is no checkpoint {path}", path=path))
    try:
        file = safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise damaged(path, error) from error
    with file:
        about = (file.metadata() or {}).get("headwise")
        if about is None:
            raise ValueError(f"{path} was not written by headwise: it has no description")
        yield file, described(json_object(about, path), path)


def described(about: dict[str, Any], path: Path) -> dict[str, Any]:
    """The description that a checkpoint has; ValueError if it is of another format or damaged."""
    if about.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {about.get('format')!r} (headwise {about.get('version')}), and "
            f"this headwise, {__version__}, reads format {FORMAT}"
        )
    about = {"step": 0, "asked": {}, **about}
    if not is_integer(about["step"]) or about["step"] < 0 or not isinstance(about["asked"], dict):
        raise damaged(path, "its step or its settings are not what headwise writes")
    return about


def damaged(path: Path, reason: object) -> ValueError:
    """The error for a file that can't be read."""
    return ValueError(
        f"{path} is damaged or not a safetensors file: {reason}; copy it again, or train again"
    )


def capture(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Everything the next step depends on: weights, optimiser state and random state."""
    tensors = {f"model/{name}": tensor for name, tensor in weights(model).items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer/{number}/{name}": value for name, value in state.items()}
    tensors["random/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["random/cuda"] = torch.cuda.get_rng_state()
    return tensors


def restore(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], origin: Path
) -> None:
    """Put back what `capture` took."""
    put_weights(model, below("model/", tensors), origin)
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in below("optimizer/", tensors).items():
        number, _, key = name.partition("/")
        states.setdefault(int(number), {})[key] = tensor
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    torch.set_rng_state(tensors["random/cpu"])
    if torch.cuda.is_available() and "random/cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random/cuda"])


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names start with a prefix, by the rest of their names."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def _safetensors() -> ModuleType:
    """The optional package, which `import headwise` must do without."""
    try:
        import safetensors.torch
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "checkpoints need the package safetensors: pip install 'headwise[train]'",
            name=missing.name,
        ) from missing
    return safetensors
