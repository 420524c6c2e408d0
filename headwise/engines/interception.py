"""Calls that something must see as an operator: compilers, modes, transforms, gradients.

Calling an operator takes longer than a short kernel, so all other calls go without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.engines.calls import learns


def direct(run: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, or the operator if something must see it."""

    def call(q: Tensor, *given: Any) -> Any:
        return (operator if noticed(q, *given) else run)(q, *given)

    return call


def noticed(*given: object) -> bool:
    """Return whether gradients, compilers, modes or transforms must see a call as an operator."""
    return intercepted(*given) or learns(given)


def intercepted(*given: object) -> bool:
    """Return whether compilers, modes or transforms must see a call as an operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    for x in given:
        if isinstance(x, Tensor):
            if x.is_meta or x.is_neg():
                return True
            if type(x) is not Tensor and type(x) is not Parameter:
                return True
    return False
