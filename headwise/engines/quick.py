"""One step of decoding with next to nothing before its kernels.

A step against a cache takes a GPU tens of microseconds; checking and planning a call would take a
processor longer. Each step has another length, so what is told from a few attributes goes straight
to the decoding kernels here, and everything else takes the usual way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.patterns import Causal
from headwise.engines.again import is_told, watched
from headwise.engines.plan import triton_missing
from headwise.score import Dot, Score

FEW = 16  # queries of a step at most
LEAST = 1024  # keys: with fewer the usual way is as quick
ROWS = 64  # that share a key head at most
HALVES = (torch.bfloat16, torch.float16)
INTERPRETED = (torch.float32, torch.float16)  # NumPy has no bfloat16: the usual way widens it


class Stored(NamedTuple):
    """Keys and values as a cache keeps them: in one piece, as int8 with scales, or in pages."""

    keys: Tensor  # (B, Hkv, M or more, D), or (pages, Hkv, page, D)
    values: Tensor
    length: int  # M, keys of each batch entry
    key_scales: Tensor | None = None  # (B, Hkv, M or more, 1)
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
    if mask is not None and not (type(mask) is Causal and mask.offset is None):
        return None
    if score is not None and not is_told(score.scale):
        return None
    run = _prepared(
        q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device, None if score is None else score.scale,
        mask is not None,
    )  # fmt: skip
    if run is None or watched(q, k, v) or (q.data_ptr() | k.data_ptr() | v.data_ptr()) % 16:
        return None
    found: Tensor = run(q, k, v)
    return found


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
    from headwise.engines.triton.host.steps import Step

    strides = (*q_strides[:3], *k_strides[:3], *v_strides[:3], 0, 0, 0)
    made = Step(q, k, k[2], strides, dtype, dtype.itemsize, device, scale, causal, paged=False)
    return made if made.fits else None


@lru_cache(maxsize=4096)
def _prepared_stored(
    q: torch.Size,
    q_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    k: torch.Size,
    k_strides: tuple[int, ...],
    v: torch.Size,
    v_strides: tuple[int, ...],
    stored: torch.dtype,
    length: int,
    scale_strides: tuple[int, ...],
    page_strides: tuple[int, ...],
    scale: float,
    causal: bool,
) -> Callable[..., Tensor] | None:
    """The same against what a cache stores, of a call that `serves_stored` admits."""
    if k != v or 0 in (q.numel(), length) or not q_strides[3] == k_strides[3] == v_strides[3] == 1:
        return None
    from headwise.engines.triton.host.steps import Step

    more = (*(scale_strides[:2] or (0, 0)), *(page_strides[:1] or (0,)))
    strides = (*q_strides[:3], *k_strides[:3], *v_strides[:3], *more)
    paged = bool(page_strides)
    made = Step(q, k, length, strides, dtype, stored.itemsize, device, scale, causal, paged)
    return made if made.fits else None


def serves_stored(
    q: Tensor,
    held: Stored,
    score: Score | None,
    mask: Mask | None,
    softcap: float | None,
    sinks: Tensor | None,
    options: Mapping[str, Any],
) -> bool:
    """Whether the decoding kernels serve queries q against what a cache stores."""
    if options.keys() - {"bias", "dropout", "engine"}:
        return False
    if options.get("bias") is not None or options.get("dropout"):
        return False
    batch = (held.keys if held.pages is None else held.pages).shape[0]
    if q.ndim != 4 or (q.shape[0], q.shape[3]) != (batch, held.keys.shape[3]):
        return False  # `hw.attention` says what is wrong with it
    if q.shape[1] % held.keys.shape[1] or q.shape[1] // held.keys.shape[1] * q.shape[2] > ROWS:
        return False
    if softcap is not None and not (is_told(softcap) and softcap > 0):
        return False
    if sinks is not None and not _fitting(sinks, q):
        return False
    kept = q.dtype if held.key_scales is None else torch.int8
    if not held.keys.dtype == held.values.dtype == kept or held.keys.device != q.device:
        return False
    if options.get("engine", "auto") not in ("auto", "triton") or not _plain(q, score, mask):
        return False
    from headwise.engines import triton

    return triton.has_room(q.shape)


def _fitting(sinks: object, q: Tensor) -> bool:
    """Whether sinks are what `hw.attention` would take, a number for each head."""
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or watched(sinks):
        return False
    return sinks.shape == q.shape[1:2] and sinks.device == q.device


def attend_stored(
    q: Tensor,
    held: Stored,
    score: Score | None,
    mask: Mask | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of a few queries q (B, Hq, N, D), the last tokens, to what a cache stores."""
    from headwise.engines.triton.host import decoding_call as decoding
    from headwise.engines.triton.kernels import split_keys as split

    scale, causal = _scale(q, score), mask is not None
    keys, values, length, *rest = held
    if softcap is None and sinks is None:
        run = _prepared_stored(
            q.shape, q.stride(), q.dtype, q.device, keys.shape, keys.stride(), values.shape,
            values.stride(), keys.dtype, length, () if rest[0] is None else rest[0].stride(),
            () if rest[2] is None else rest[2].stride(), scale, causal,
        )  # fmt: skip
        if run is not None and not any(
            x is not None and x.data_ptr() % 16 for x in (q, keys, values, *rest)
        ):
            return run(q, keys, values, split.Held(*rest))
    return decoding.attend_stored(
        q, *held, scale=scale, causal=causal, softcap=softcap, sinks=sinks
    )


def _plain(q: Tensor, score: Score | None, mask: Mask | None) -> bool:
    """Few queries of a dot score on a GPU that see all before them, and nobody else is watching."""
    if torch.compiler.is_compiling() or type(q) is not Tensor or q.shape[-2] > FEW:
        return False
    if score is not None and not isinstance(score, Dot):
        return False
    if mask is not None and not (type(mask) is Causal and mask.offset is None):
        return False
    return _served(q.shape[-1], q.dtype, q.device, _scale(q, score)) and not watched(q)


def _served(width: int, dtype: torch.dtype, device: torch.device, scale: float) -> bool:
    """Whether the kernels take heads of this width and dtype on this device."""
    if width not in (64, 128, 256) or not 1e-6 < scale < 1e6:
        return False
    if dtype not in (HALVES if device.type == "cuda" else INTERPRETED):
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
