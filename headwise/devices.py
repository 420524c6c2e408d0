"""The device a model runs on."""

from __future__ import annotations

import torch


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
