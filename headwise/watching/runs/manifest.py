"""The manifest of a run's folder: its format, the model, the options of the watch, the versions.

manifest.json                     the manifest
series-rank0-000001.parquet ...   the figures: step, rank, layer, name, kind, head, ...
alarms-rank0.jsonl                one alarm per line
maps/step-...-head-...safetensors q, k and lse of the heads that were kept
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.core.spans import plain
from headwise.files import read_json
from headwise.maps.sparse_losses import NONE
from headwise.messages import from_json, say, with_chinese
from headwise.watching.recorder.watch_options import WatchOptions
from headwise.watching.rules import Rule

FORMAT = 1
"""The version of the folders' layout; a reader refuses a newer one."""

NAME = "manifest.json"

NEEDED: dict[str, dict[str, tuple[type, ...]]] = {
    "model": {"class": (str,), "parameters": (int,)},
    "looking": {"rows": (int, type(None)), "every": (int,)},
}
"""The entries that a reader relies on, and their types."""

LISTS: dict[str, type] = {"unread": str, "rules": dict}
"""Lists that may be there, and the types of what they hold."""


def describe(model: nn.Module, options: WatchOptions, rules: Sequence[Rule]) -> dict[str, Any]:
    """The manifest of a run that begins now."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "begun": now(),
        "model": {
            "class": type(model).__name__,
            "parameters": sum(each.numel() for each in model.parameters()),
        },
        "looking": asdict(replace(options, spans={}, sparse=NONE))
        | {"spans": plain(options.spans)}
        | {"sparse": {name: repr(policy) for name, policy in options.sparse.named.items()}},
        "rules": [
            {"rule": x.name, "says": x.says, "source": x.source, "limits": _limits(x)}
            for x in rules
        ],
        "processes": _processes()[1],
        "versions": {
            "headwise": version("headwise"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{x: version(x) for x in ("transformers", "lightning") if x in sys.modules},
        },
    }
    return with_chinese(about)


def _limits(rule: Rule) -> dict[str, float]:
    """The numbers that a rule was made with, such as its threshold, by their names."""
    given = vars(rule) if hasattr(rule, "__dict__") else {}
    return {name: x for name, x in given.items() if isinstance(x, int | float)}


def now() -> str:
    """The time in the form that the manifest uses."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_manifest(folder: Path) -> dict[str, Any]:
    """A folder's manifest; ValueError if there is no run, a damaged one, or a newer headwise's."""
    path = folder / NAME
    try:
        found = read_json(path)
    except FileNotFoundError as error:
        raise ValueError(
            say("{folder} holds no watched run: it has no {name}", folder=folder, name=NAME)
        ) from error
    except OSError as error:
        reason = error.strerror
        raise ValueError(
            say("{folder} can't be read as a watched run: {reason}", folder=folder, reason=reason)
        ) from error
    except ValueError as error:
        raise _damaged(path, error) from error
    version = found.get("format") if isinstance(found, dict) else None
    if type(version) is not int:
        raise ValueError(say("{path} was not written by headwise: it names no format", path=path))
    if version > FORMAT:
        raise ValueError(
            say(
                "{folder} was written by a newer headwise: its format is {found}, and this one "
                "reads up to {known}; pip install --upgrade headwise",
                folder=folder,
                found=version,
                known=FORMAT,
            )
        )
    for part, names in NEEDED.items():
        inside = found.get(part)
        missing = [x for x in names if not isinstance(inside, dict) or x not in inside]
        if missing:
            lacks = say("{part} has no {names}", part=part, names=" and no ".join(missing))
            raise _damaged(path, lacks)
        for name, kinds in names.items():
            if type(inside[name]) not in kinds:
                wrong = f"{part}.{name}"
                raise _damaged(path, say("{entry} is not what it should be", entry=wrong))
    for name, kind in LISTS.items():
        values = found.get(name, [])
        if not isinstance(values, list) or not all(isinstance(x, kind) for x in values):
            raise _damaged(path, say("{entry} is not what it should be", entry=name))
    return from_json(found)


def _damaged(path: Path, reason: object) -> ValueError:
    return ValueError(
        say(
            "{path} is damaged: {reason}; restore it from a copy, or choose another folder",
            path=path,
            reason=reason,
        )
    )


def rank() -> int:
    """The number of this process in a distributed run; 0 if there is only one."""
    return _processes()[0]


def _processes() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
