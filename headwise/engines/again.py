"""Calls that were made before, played from a tape of their launches.

A short call takes a GPU tens of microseconds; checking and planning it takes a processor longer,
and comes to the same for every call of the same description: shapes, strides, dtypes, aligned
addresses and options. So what a call of a description launched is kept for the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.core.intervals import Mask
from headwise.engines.recording import record
from headwise.engines.tape import Tape
from headwise.score import Dot, Score

LAUNCHED = ("triton", "hopper")  # engines that do nothing but launch kernels of their own
KEPT = 4096  # descriptions of calls at most
_TAPES: dict[tuple[object, ...], Tape | bool] = {}  # True: seen once; False: it has no tape


def again(
    run: Callable[[], tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | None,
    mask: object,  # whatever was given
    softcap: float | None,
    sinks: Tensor | None,
    engine: str,
    *more: object,
) -> tuple[Tensor, ...]:
    """What `run` returns; a call seen before, as far as tensors' values do not matter, is played.

    `more` is hashable and tells what else `run` depends on.
    """
    if engine not in LAUNCHED and not (engine == "auto" and getattr(q, "is_cuda", False)):
        return run()
    if torch.compiler.is_compiling() or not (score is None or type(score) is Dot):
        return run()
    scale = None if score is None else score.scale
    told: tuple[object, ...] | None = ()
    given: tuple[Tensor, ...] = (q, k, v) if sinks is None else (q, k, v, sinks)
    if mask is not None:
        if not isinstance(mask, Mask):
            return run()  # which says what would work
        told = mask.description()
        given += mask.tensors()
    if told is None or not (is_told(scale) and is_told(softcap)) or watched(*given):
        return run()
    tf32 = torch.backends.cuda.matmul.fp32_precision  # the older name for it may raise
    key: list[object] = [engine, told, scale, softcap, sinks is None, tf32, more]
    for x in given:
        key += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)
    named = tuple(key)
    tape = _TAPES.get(named)
    if isinstance(tape, Tape):
        return tape.play(given)
    if tape is False:
        return run()
    if tape is None:  # recording takes longer than running: not for a single call
        results, found = run(), None
    else:
        results, found = record(run, given)
    if len(_TAPES) >= KEPT:
        _TAPES.clear()
    _TAPES[named] = tape is None or found or False
    return results


def forget() -> None:
    """Have every call thought through again: what tapes were recorded under has changed."""
    _TAPES.clear()


def is_told(x: object) -> bool:
    """Whether an option is one that tells all it means, or none."""
    return x is None or type(x) is float or type(x) is int


def watched(*tensors: Tensor) -> bool:
    """Whether gradients, compilers, modes or transforms must see the call as an operator."""
    return transformed(*tensors) or (
        torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    )


def transformed(*tensors: Tensor) -> bool:
    """Whether something other than gradients comes between a call and its numbers."""
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or x.is_meta or x.is_neg():
            return True
        if x.layout is not torch.strided:
            return True
    kind = tensors[0].device.type
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        # where autocast finds its own dtype it has nothing to do
        or (torch.is_autocast_enabled(kind) and tensors[0].dtype != torch.get_autocast_dtype(kind))
    )
