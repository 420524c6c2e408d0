"""What a run's folder says of itself: its format, the model, what was looked at, the versions.

manifest.json                     this
series-rank0-000001.parquet ...   the figures: step, rank, layer, name, kind, head, ...
alarms-rank0.jsonl                an alarm a line
maps/step-...-head-...safetensors q, k and lse of the heads that were kept
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.messages import from_json, say, with_chinese
from headwise.watching.recorder import Looking
from headwise.watching.rules import Rule

FORMAT = 1
"""What the folders look like; a reader refuses a number it does not know."""

NAME = "manifest.json"

NEEDED = {"model": ("class", "parameters"), "looking": ("rows", "every")}
"""What a reader relies on."""


def describe(model: nn.Module, looking: Looking, rules: Sequence[Rule]) -> dict[str, Any]:
    """The manifest of a run that begins now."""
    about: dict[str, Any] = {
        "format": FORMAT,
        "begun": now(),
        "model": {
            "class": type(model).__name__,
            "parameters": sum(each.numel() for each in model.parameters()),
        },
        "looking": asdict(looking),
        "rules": [{"rule": x.name, "says": x.says, "source": x.source} for x in rules],
        "processes": _processes()[1],
        "versions": {
            "headwise": version("headwise"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            **{x: version(x) for x in ("transformers", "lightning") if x in sys.modules},
        },
    }
    return with_chinese(about)


def now() -> str:
    """The time, as the manifest says it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read(folder: Path) -> dict[str, Any]:
    """A folder's manifest; ValueError for no run, a damaged one, or one of a newer headwise."""
    path = folder / NAME
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        said = say("{folder} holds no watched run: it has no {name}", folder=folder, name=NAME)
        raise ValueError(said) from error
    except OSError as error:
        reason = error.strerror
        raise ValueError(
            say("{folder} can't be read as a watched run: {reason}", folder=folder, reason=reason)
        ) from error
    except ValueError as error:
        raise ValueError(say("{path} is damaged: {reason}", path=path, reason=error)) from error
    found = said.get("format") if isinstance(said, dict) else None
    if not isinstance(found, int):
        raise ValueError(say("{path} was not written by headwise: it names no format", path=path))
    if found > FORMAT:
        raise ValueError(
            say(
                "{folder} was written by a newer headwise: its format is {found}, and this one "
                "reads up to {known}; pip install --upgrade headwise",
                folder=folder,
                found=found,
                known=FORMAT,
            )
        )
    for part, names in NEEDED.items():
        inside = said.get(part)
        missing = [x for x in names if not isinstance(inside, dict) or x not in inside]
        if missing:
            lacks = say("{part} has no {names}", part=part, names=" and no ".join(missing))
            raise ValueError(say("{path} is damaged: {reason}", path=path, reason=lacks))
    return from_json(said)


def rank() -> int:
    """Which process of a distributed run this is; 0 where there is one."""
    return _processes()[0]


def _processes() -> tuple[int, int]:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
