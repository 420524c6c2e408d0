"""Calls with next to nothing before their kernels.

A short call takes a GPU tens of microseconds; checking and planning it would take a processor
longer. Steps against a cache, which have another length each time, go straight to the decoding
kernels from a few attributes; what was called before in the same shape is played `again`, by a
tape of its launches. Everything else takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.engines.tape import Tape, record
from headwise.mask import Mask
from headwise.masks import Causal
from headwise.plan import triton_missing
from headwise.score import Dot, Score

FEW = 16  # queries of a step at most
LEAST = 1024  # keys: with fewer the usual way is as quick
ROWS = 64  # that share a key head at most
HALVES = (torch.bfloat16, torch.float16)


class Stored(NamedTuple):
    """Keys and values as a cache keeps them: in one piece, as int8 with scales, or in pages."""

    keys: Tensor  # (B, Hkv, M, D), or (pages, Hkv, page, D)
    values: Tensor
    length: int  # keys of each batch entry
    key_scales: Tensor | None = None  # (B, Hkv, M)
    value_scales: Tensor | None = None
    pages: Tensor | None = None  # (B, any) int32


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | None,
    mask: Mask | None,
    engine: str = "triton",
) -> Tensor | None:
    """Attention of a few queries to many keys; None: this call takes the usual way."""
    if not (type(q) is type(k) is type(v) is Tensor) or torch.compiler.is_compiling():
        return None
    if q.ndim != 4 or q.shape[2] > FEW:
        return None
    if engine != "triton" and not (engine == "auto" and q.is_cuda):
        return None
    if score is not None and not isinstance(score, Dot):
        return None
    if mask is not None and not (isinstance(mask, Causal) and mask.offset is None):
        return None
    run = _prepared(
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device, None if score is None else score.scale,
        mask is not None,
    )  # fmt: skip
    if run is None or _watched(q, k, v) or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    found: Tensor = run(q, k, v)
    return found


LAUNCHED = ("triton", "hopper")  # engines that do nothing but launch kernels of their own
KEPT = 4096  # descriptions of calls at most
_TAPES: dict[tuple[object, ...], Tape | bool] = {}  # True: seen once; False: it has no tape


def again(
    run: Callable[[], tuple[Tensor, ...]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score: Score | None,
    mask: Mask | None,
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
    if isinstance(mask, Mask):
        told = mask.told()
        given += mask.tensors()
    if told is None or not (_number(scale) and _number(softcap)) or _watched(*given):
        return run()
    tf32 = torch.backends.cuda.matmul.allow_tf32
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


def _number(x: object) -> bool:
    return x is None or type(x) is float or type(x) is int


@lru_cache(maxsize=4096)  # a step for each length, and each is taken by every layer
def _prepared(
    q: torch.Size,
    q_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    k: torch.Size,
    k_strides: tuple[int, ...],
    k_dtype: torch.dtype,
    k_device: torch.device,
    v: torch.Size,
    v_strides: tuple[int, ...],
    v_dtype: torch.dtype,
    v_device: torch.device,
    scale: float | None,
    causal: bool,
) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
    """A step of these shapes, ready to run; None: not one that these kernels take."""
    alike = dtype is k_dtype is v_dtype and device == k_device == v_device
    if not alike or not len(q) == len(k) == len(v) == 4 or q[2] > FEW or k[2] < LEAST:
        return None
    if k != v or q[0] != k[0] or q[3] != k[3] or 0 in (q.numel(), k.numel()) or q[1] % k[1]:
        return None
    scale = float(q[3] ** -0.5 if scale is None else scale)
    if q[1] // k[1] * q[2] > ROWS or not _served(q[3], dtype, device, scale):
        return None
    if not q_strides[3] == k_strides[3] == v_strides[3] == 1:
        return None
    from headwise.engines.triton.steps import Step

    made = Step(q, k, q_strides[:3] + k_strides[:3] + v_strides[:3], dtype, device, scale, causal)
    return made if made.fits else None


def serves_stored(
    q: Tensor, key_heads: int, score: Score | None, mask: Mask | None, options: Mapping[str, Any]
) -> bool:
    """Whether the decoding kernels serve queries q against what a cache stores."""
    if options.get("bias") is not None or options.get("dropout"):
        return False
    if q.ndim != 4 or q.shape[1] % key_heads or q.shape[1] // key_heads * q.shape[2] > ROWS:
        return False
    return options.get("engine", "auto") in ("auto", "triton") and _plain(q, score, mask)


def attend_stored(
    q: Tensor,
    held: Stored,
    score: Score | None,
    mask: Mask | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a few queries q (B, Hq, N, D), the last tokens, to what a cache stores."""
    from headwise.engines.triton.decoding import attend_stored as run

    return run(
        q, *held, scale=_scale(q, score), causal=mask is not None, softcap=softcap, sinks=sinks
    )


def _plain(q: Tensor, score: Score | None, mask: Mask | None) -> bool:
    """Few queries of a dot score on a GPU that see all before them, and nobody else is watching."""
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.shape[-2] > FEW:
        return False
    if score is not None and not isinstance(score, Dot):
        return False
    if mask is not None and not (isinstance(mask, Causal) and mask.offset is None):
        return False
    return _served(q.shape[-1], q.dtype, q.device, _scale(q, score)) and not _watched(q)


def _served(width: int, dtype: torch.dtype, device: torch.device, scale: float) -> bool:
    """Whether the kernels take heads of this width and dtype on this device."""
    if width not in (64, 128, 256) or not 1e-6 < scale < 1e6:
        return False
    if dtype not in HALVES and not (dtype is torch.float32 and device.type == "cpu"):
        return False
    return triton_missing(device.type) is None and _able(device)


def _scale(q: Tensor, score: Score | None) -> float:
    given = score.scale if isinstance(score, Dot) else None
    return float(q.shape[-1] ** -0.5 if given is None else given)


@cache
def _able(device: torch.device) -> bool:
    """Whether the decoding kernels run on this GPU."""
    from headwise.engines import triton

    return triton.refuses_device(device) is None


def _watched(*tensors: Tensor) -> bool:
    """Whether gradients, compilers, modes or transforms must see the call as an operator."""
    learning = torch.is_grad_enabled()
    for x in tensors:
        if (type(x) is not Tensor and type(x) is not Parameter) or (learning and x.requires_grad):
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled(tensors[0].device.type)
    )
