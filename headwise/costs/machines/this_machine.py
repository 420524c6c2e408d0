"""The measurements of this machine, kept in the user's cache folder, and devices by name."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from headwise.costs.machines import hardware
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.speeds import speeds_from
from headwise.devices import cpu_name
from headwise.files import cache_folder, write_whole
from headwise.messages import say

FORMAT = 1
"""The version of the files; another one is measured anew."""

THIS = {"this": None, "this:cpu": "cpu", "this:cuda": "cuda"}
"""Names of this machine's devices: the GPU if there is one, or one of the two."""


def find_device(name: str | Device) -> Device:
    """The device of this name: `this` machine, if it was measured, or one of the table.

    >>> find_device("h200").bandwidth
    4800000000000.0
    """
    if isinstance(name, Device):
        return name
    wanted = name.strip().lower()
    if wanted not in THIS:
        return hardware.device(name)
    found = load(present_device(THIS[wanted]))
    if found is None:
        raise ValueError(say("this machine was not measured; run headwise cost --measure"))
    return found


def present_device(kind: str | None = None) -> torch.device:
    """The device of this machine: the GPU if there is one, unless `kind` names another."""
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(say("this machine has no CUDA device; use this:cpu"))
    return torch.device(kind)


def peak(where: torch.device, dtype: str) -> tuple[float, str] | None:
    """The matrix FLOPs per second of a device of this machine, and its name; None if unknown.

    A GPU of the table has the rate of its data sheet, any other device the one that was measured.
    """
    known = hardware.named(hardware_name(where)) if where.type == "cuda" else None
    if known is None:
        known = load(where)
    if known is None or dtype not in known.matrix:
        return None
    return known.matrix[dtype], known.name


def hardware_name(where: torch.device) -> str:
    """The name that the driver or the operating system gives a device."""
    if where.type == "cuda":
        return torch.cuda.get_device_name(where)
    if where.type != "cpu":
        return where.type
    return f"{cpu_name()}, {torch.get_num_threads()} threads"


def memory_of(where: torch.device) -> float:
    """The bytes of a device's memory; 0 if the system does not say."""
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return 0.0


def file_of(where: torch.device) -> Path:
    """The file with the measurements of a device; each hardware has its own."""
    slug = re.sub(r"[^a-z0-9]+", "-", hardware_name(where).lower()).strip("-")
    return cache_folder() / "machines" / f"{slug}.json"


def save_device(found: Device, where: torch.device, about: Mapping[str, Any]) -> Path:
    """Keep measurements, with the versions that they were made with, for the name `this`."""
    path = file_of(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **about, "device": asdict(found)}
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return path


def load(where: torch.device) -> Device | None:
    """The measurements of a device; None if there are none that this version can read."""
    try:
        content = json.loads(file_of(where).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return None
        found = content["device"]
        measured = {dtype: speeds_from(each) for dtype, each in found["measured"].items()}
        return Device(**{**found, "measured": measured})
    except (OSError, ValueError, KeyError, TypeError):
        return None
