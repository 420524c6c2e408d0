"""Whether what was given is the number that it should be."""

from __future__ import annotations

from numbers import Integral, Real
from typing import SupportsIndex, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

Given = TypeVar("Given")
INTEGERS = (int, torch.SymInt, Integral)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat, Real)


def is_integer(x: object) -> TypeGuard[int]:
    """Whether x is one integer: Python's, NumPy's or a compiler's symbol. True is none."""
    return isinstance(x, INTEGERS) and not isinstance(x, bool)


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is one number, and no tensor."""
    return isinstance(x, NUMBERS) and not isinstance(x, bool)


def as_int(x: SupportsIndex) -> int:
    """An integer as Python's own, which neither overflows nor hides what it is; a symbol stays."""
    return cast(int, x) if isinstance(x, int | torch.SymInt) else int(x)


def integers(call: str, given: Given) -> Given:
    """What was given, where it is an integer, a sequence or a tensor of them; else ValueError."""
    if is_integer(given):
        return cast(Given, as_int(given))
    found = as_tensor(call, given)
    if found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        said = f"a {found.dtype} tensor" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"{call} takes integers, not {said}")
    return given


def as_tensor(call: str, given: object) -> Tensor:
    """A tensor, or a tensor of the numbers in a sequence or an array."""
    try:
        return torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{call} takes numbers or a tensor, not {given!r}") from None
