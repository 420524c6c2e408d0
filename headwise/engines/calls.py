"""The cache of prepared calls, by their description, and what keeps a call out of it.

Checking and planning a call takes the CPU longer than a short kernel takes the GPU. The result is
the same for all calls of one description: the options, and the shapes, strides, dtypes, devices and
alignment of the tensors. So an engine prepares a call once, and later calls of that description run
immediately. Compilers, modes, transforms and gradients must see a call as an operator, and calling
an operator takes longer than a short kernel, so all other calls go without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.engines.contract import Prepared
from headwise.score import Dot

KEPT = 4096  # prepared calls at most
Key = tuple[object, ...]
_PREPARED: dict[Key, Prepared] = {}


def describe(
    tensors: tuple[Tensor, ...], options: Options, *more: object
) -> tuple[Key | None, tuple[Tensor, ...]]:
    """Return a call's description and its tensors; None if the call depends on more than that.

    `tensors` are q, k, v, or what a cache stores in their place; `more` is hashable: the
    statistics, whatever else the results depend on.
    """
    score, _, bias, softcap, sinks, dropout, engine = options
    mask: object = options.mask  # it is not checked yet
    if torch.compiler.is_compiling() or bias is not None:
        return None, ()
    if type(dropout) is not float or dropout != 0.0:
        return None, ()
    scale = masked = None
    if score is not None:
        if type(score) is not Dot:
            return None, ()
        scale = score.scale
    if not (_is_plain(scale) and _is_plain(softcap)):
        return None, ()
    if sinks is not None:
        tensors += (sinks,)
    if mask is not None:
        if not isinstance(mask, Mask):
            return None, ()
        masked = mask.description()
        if masked is None:
            return None, ()
        tensors += mask.tensors()
    if is_transformed(tensors):
        return None, ()
    parts: list[object] = [engine, more, masked, scale, softcap, sinks is None, learns(tensors)]
    if tensors[0].dtype is torch.float32:
        parts.append(torch.backends.cuda.matmul.fp32_precision)  # its older name may raise
    for x in tensors:
        parts += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
    return tuple(parts), tensors


def learns(given: Iterable[object]) -> bool:
    """Return whether gradients follow a call with these arguments."""
    if not torch.is_grad_enabled():
        return False
    return any([isinstance(x, Tensor) and x.requires_grad for x in given])


def known(key: Key) -> Prepared | None:
    """Return the prepared call of a description, or None if there is none yet."""
    return _PREPARED.get(key)


def keep(key: Key, prepared: Prepared | None) -> None:
    """Store a prepared call, if there is one, for later calls of its description."""
    if prepared is None:
        return
    if len(_PREPARED) >= KEPT:
        _PREPARED.clear()
    _PREPARED[key] = prepared


def drop(key: Key) -> None:
    """Forget one prepared call, because it failed."""
    _PREPARED.pop(key, None)


def forget() -> None:
    """Forget every prepared call, because something they depend on has changed."""
    _PREPARED.clear()


def is_transformed(tensors: tuple[object, ...]) -> bool:
    """Return whether something other than gradients comes between a call and its numbers."""
    for x in tensors:
        if type(x) is not Tensor and type(x) is not Parameter:
            return True
        if x.is_meta or x.is_neg() or x.layout is not torch.strided:
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or (torch._C._is_any_autocast_enabled() and _autocasts(tensors))
    )


def _autocasts(tensors: tuple[object, ...]) -> bool:
    """Return whether autocast changes a dtype; where it finds its own it has nothing to do."""
    first = tensors[0]
    assert isinstance(first, Tensor)
    kind = first.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else first.dtype
    return any(
        isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != dtype
        for x in tensors[:3]
    )


def _is_plain(x: object) -> bool:
    """Return whether an option is None or a plain number, which has no gradient."""
    return x is None or type(x) is float or type(x) is int


def direct(run: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, or the operator if something must see it."""

    def call(q: Tensor, *given: Any) -> Any:
        return (operator if needs_operator(q, *given) else run)(q, *given)

    return call


def needs_operator(*given: object) -> bool:
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
