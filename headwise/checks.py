"""Checks of arguments: sizes, numbers, options, tensors, and all fields of a description.

Each raises a ValueError that names the argument and shows its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from headwise.core.arguments import is_integer, is_number
from headwise.core.problem import describe

__all__ = [
    "CheckedFields",
    "Count",
    "Positive",
    "Rate",
    "Size",
    "check_count",
    "check_flag",
    "check_integers",
    "check_kind",
    "check_positive",
    "check_rate",
    "check_size",
    "check_sizes",
    "check_tensor",
]

Check = Callable[[str, object], None]


def check_size(name: str, given: object) -> None:
    """Raise ValueError unless `given` is an integer of at least 1."""
    if not is_integer(given) or given < 1:
        raise ValueError(f"{name}={_short(given)} must be a positive integer")


def check_sizes(**given: object) -> None:
    """Raise ValueError unless every argument is an integer of at least 1."""
    for name, size in given.items():
        check_size(name, size)


def check_count(name: str, given: object) -> None:
    """Raise ValueError unless `given` is an integer of at least 0."""
    if not is_integer(given) or given < 0:
        raise ValueError(f"{name}={_short(given)} must be an integer, 0 or more")


def check_positive(name: str, given: object) -> None:
    """Raise ValueError unless `given` is a finite number above 0."""
    if not is_number(given) or not 0 < given < math.inf:
        raise ValueError(f"{name}={_short(given)} must be a positive number")


def check_rate(name: str, given: object) -> None:
    """Raise ValueError unless `given` is a number in [0, 1), as a rate of dropout must be."""
    if not is_number(given) or not 0 <= given < 1:
        raise ValueError(f"{name}={_short(given)} must be in [0, 1)")


def check_flag(name: str, given: object) -> None:
    """Raise ValueError unless `given` is True or False."""
    if not isinstance(given, bool):
        raise ValueError(f"{name}={_short(given)} must be True or False")


def check_kind(name: str, given: object, kind: Any, examples: str) -> None:
    """Raise ValueError if an option is not of its kind, for instance a class and not an object."""
    if not isinstance(given, kind):
        raise ValueError(f"{name}= takes something like {examples}, not {describe(given)}")


def check_tensor(name: str, given: object, *shape: int | str) -> None:
    """Raise ValueError unless `given` is a tensor of this shape, in which words fit any size.

    >>> import torch
    >>> check_tensor("keys", torch.zeros(2, 5), "batch", "length", 8)
    Traceback (most recent call last):
    ValueError: keys must be a tensor (batch, length, 8), not float32 (2, 5)
    """
    if isinstance(given, Tensor) and given.ndim == len(shape):
        for wanted, size in zip(shape, given.shape, strict=True):
            if not isinstance(wanted, str) and wanted != size:
                break
        else:
            return
    sizes = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    raise ValueError(f"{name} must be a tensor {sizes}, not {describe(given)}")


def check_integers(
    name: str, given: object, least: int, most: int, *shape: int | str, wait: bool = False
) -> None:
    """Raise ValueError unless `given` is a tensor of this shape of integers from least to most.

    Numbers on a GPU are read only if `wait`, because reading waits for the GPU.
    """
    check_tensor(name, given, *shape)
    assert isinstance(given, Tensor)
    if given.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, not {describe(given)}")
    if (wait or given.device.type == "cpu") and not torch.compiler.is_compiling():
        wrong = given[(given < least) | (given > most)]
        if wrong.numel():
            raise ValueError(f"{name} must lie between {least} and {most}, not {wrong[0].item()}")


Size = Annotated[int, check_size]
"""An integer of at least 1."""

Count = Annotated[int, check_count]
"""An integer of at least 0."""

Positive = Annotated[float, check_positive]
"""A finite number above 0."""

Rate = Annotated[float, check_rate]
"""A number from 0 to 1, 1 excluded."""


class CheckedFields:
    """A frozen dataclass that describes a part of a model; its fields are checked when it is made.

    >>> from headwise.nn import GELU
    >>> GELU(width=-1)
    Traceback (most recent call last):
    ValueError: GELU: width=-1 must be a positive integer
    """

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for field in fields(self):  # type: ignore[arg-type]
            try:
                _check_hint(field.name, getattr(self, field.name), hints[field.name])
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}: {error}") from None


def _check_hint(name: str, given: object, hint: Any) -> None:
    """Raise ValueError unless a value fits the annotation of its field."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if given is None and NoneType in kinds:
        return
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    checks: list[Check] = [check for kind in kinds for check in getattr(kind, "__metadata__", ())]
    if checks:
        for check in checks:
            check(name, given)
    elif get_origin(hint) is Literal:
        if not isinstance(given, str) or given not in get_args(hint):
            raise ValueError(f"{name}={_short(given)} must be one of {get_args(hint)}")
    elif kinds == (int,):
        if not is_integer(given):
            raise ValueError(f"{name}={_short(given)} must be an integer")
    elif kinds == (float,):
        if not is_number(given):
            raise ValueError(f"{name}={_short(given)} must be a number")
    elif kinds == (bool,):
        check_flag(name, given)
    elif not isinstance(given, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name}= takes {names}, not {describe(given)}")


def _short(given: object) -> str:
    """A number as it is; anything else by its type, and a tensor by its shape."""
    return repr(given) if given is None or isinstance(given, int | float) else describe(given)
