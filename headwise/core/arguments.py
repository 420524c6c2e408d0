"""Checks that an argument is an integer, a number or a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import NoReturn, SupportsIndex, TypeGuard, TypeVar, cast

import torch
from torch import Tensor

Given = TypeVar("Given")
INTEGERS = (int, torch.SymInt, Integral)
INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat, Real)


def is_integer(x: object) -> TypeGuard[int]:
    """True for one integer: Python's, NumPy's or a compiler's symbol, but not a bool."""
    return isinstance(x, INTEGERS) and not isinstance(x, bool)


def is_number(x: object) -> TypeGuard[float]:
    """True for one real number; a bool or a tensor is not one."""
    return isinstance(x, NUMBERS) and not isinstance(x, bool)


def is_scalar(x: object) -> TypeGuard[float | Tensor]:
    """True for one real number, as it is or in a tensor of one element."""
    if not isinstance(x, Tensor):
        return is_number(x)
    return x.numel() == 1 and x.layout == torch.strided and not x.is_complex() and not x.is_meta


def as_int(x: SupportsIndex) -> int:
    """The integer as a Python int, which does not overflow; a compiler's symbol stays as it is."""
    return cast(int, x) if isinstance(x, int | torch.SymInt) else int(x)


def integers(call: str, given: Given) -> Given:
    """The argument if it is an integer, or a sequence or tensor of integers; else ValueError."""
    if is_integer(given):
        return cast(Given, as_int(given))
    found = as_tensor(call, given)
    if found.numel() == 0 and not isinstance(given, Tensor):  # an empty list has no dtype
        return given
    if found.dtype not in INTEGER_DTYPES:
        kind = f"a {found.dtype} tensor" if isinstance(given, Tensor) else repr(given)
        raise ValueError(f"{call} takes integers, not {kind}")
    return given


def as_tensor(call: str, given: object) -> Tensor:
    """The argument as a tensor, if it is one or a sequence or array of numbers."""
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{call} takes numbers or a tensor, not {given!r}") from None
    if found.layout != torch.strided:
        raise ValueError(f"{call} takes a dense tensor, not a {found.layout} one")
    return found


ELSEWHERE = {
    "is_causal": "mask=hw.mask.causal()",
    "causal": "mask=hw.mask.causal()",
    "attn_mask": "mask=hw.mask.dense(tensor) if it is boolean, bias=tensor if it is added",
    "dropout_p": "dropout=",
    "scale": "score=hw.Dot(scale=…)",
    "softmax_scale": "score=hw.Dot(scale=…)",
    "enable_gqa": "nothing: keys with fewer heads are shared by themselves",
    "window_size": "mask=hw.mask.causal() & hw.mask.window(left)",
    "alibi_slopes": "bias=hw.ALiBi(slopes)",
}
"""The keywords of other attention functions, and what takes their place here."""


def refuse_keywords(function: str, unknown: Iterable[str]) -> NoReturn:
    """Raise TypeError for keywords that a function does not have, with what to use instead.

    >>> refuse_keywords("attention", ["is_causal"])
    Traceback (most recent call last):
    TypeError: attention() got an unexpected keyword argument 'is_causal'; use mask=hw.mask.causal()
    """
    name = next(iter(unknown))
    instead = f"; use {ELSEWHERE[name]}" if name in ELSEWHERE else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{instead}")
