"""Which device a model runs on: the one that is asked for, or the best that is here."""

from __future__ import annotations

import torch


def chosen(name: str | None) -> torch.device:
    """The device of this name, the GPU if there is one by default; ValueError where it is none.

    >>> chosen("cpu")
    device(type='cpu')
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.ones(1, device=name).item()  # some, such as meta, hold no numbers
    except (RuntimeError, AssertionError, ImportError):
        there = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
        said = f"there is no device {name!r} to compute on here; {' or '.join(there)} would work"
        raise ValueError(said) from None
    return torch.device(name)
