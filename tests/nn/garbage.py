"""Arguments that make no sense, given one at a time to calls that are otherwise right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise as hw

GARBAGE: dict[str, object] = {
    "None": None,
    "True": True,
    "0": 0,
    "-1": -1,
    "7": 7,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1j": 1j,
    "text": "text",
    "bytes": b"bytes",
    "an empty list": [],
    "a list": [101, 102, 103],
    "a ragged list": [[101], [102, 103]],
    "a tuple": (101, "two"),
    "a dictionary": {"nonsense": 1},
    "a class": dict,
    "a function": len,
    "an object": object(),
    "an array": np.zeros((2, 3)),
    "a module": torch.nn.Identity(),
    "a mask": hw.mask.causal(),
    "a description": hw.nn.Shared(),
    "a number as a tensor": torch.tensor(2.5),
    "a boolean as a tensor": torch.tensor(True),
    "an empty tensor": torch.zeros(0),
    "a vector": torch.zeros(3),
    "a matrix of other sizes": torch.zeros(11, 13),
    "three axes of other sizes": torch.zeros(3, 11, 13),
    "four axes of other sizes": torch.zeros(3, 5, 11, 13),
    "six axes": torch.zeros(1, 1, 1, 1, 1, 1),
    "integers": torch.full((2, 9), 999),
    "negative integers": torch.full((2, 9), -3),
    "float64": torch.zeros(2, 9, 32, dtype=torch.float64),
    "complex": torch.zeros(2, 9, 32, dtype=torch.complex64),
    "booleans": torch.zeros(2, 9, dtype=torch.bool),
}


def words(garbage: object) -> list[str]:
    """Ways to restate an argument."""
    if isinstance(garbage, Tensor | np.ndarray):
        shown = ["array", str(tuple(garbage.shape)), str(garbage.dtype).removeprefix("torch.")]
        return [*shown, *(str(x) for x in garbage.reshape(-1)[:1].tolist() if x)]
    parts = [str(part) for part in garbage] if isinstance(garbage, tuple | list | dict) else []
    return [repr(garbage), type(garbage).__name__, *parts]


def complaints(
    call: Callable[..., object], make: Callable[[], dict[str, Any]]
) -> Iterator[tuple[str, str, str]]:
    """(argument, garbage, what went wrong) for each call that fails in any other way than in words.

    A call may accept what looks like garbage, such as None for an option.
    """
    call(**make())  # the arguments are right before one of them is replaced
    for name in make():
        for kind, garbage in GARBAGE.items():
            try:
                call(**(make() | {name: garbage}))
            except (ValueError, TypeError) as error:
                if not any(word in str(error) for word in (name, *words(garbage))):
                    yield name, kind, f"does not name it: {type(error).__name__}: {error}"
            except Exception as error:
                yield name, kind, f"{type(error).__name__}: {error}"
