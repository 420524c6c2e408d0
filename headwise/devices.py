"""The device a model runs on, and the machine in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

__all__ = ["chosen", "cpu_info", "cpu_name", "machine", "usable_cores"]


def chosen(name: str | None) -> torch.device:
    """The device of this name; by default a GPU if there is one. ValueError if it can't compute.

    >>> chosen("cpu")
    device(type='cpu')
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.ones(1, device=name).item()  # some devices, such as meta, hold no data
    except (RuntimeError, AssertionError, ImportError):
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        raise ValueError(
            f"there is no device {name!r} to compute on here; use {' or '.join(there)}"
        ) from None
    return torch.device(name)


def usable_cores() -> int:
    """The number of cores this process may use, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_info() -> str:
    """The contents of /proc/cpuinfo, empty if it does not exist."""
    file = Path("/proc/cpuinfo")
    return file.read_text(errors="replace") if file.exists() else ""


def cpu_name() -> str:
    """The model of the CPU."""
    names = [x.partition(":")[2] for x in cpu_info().splitlines() if x.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> str:
    """The machine behind a measurement, in words.

    >>> machine(torch.device("cpu")).endswith(f"torch {torch.__version__}")
    True
    """
    name = f"{usable_cores()} cores of {cpu_name()}"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return f"{name}, torch {torch.__version__}"
