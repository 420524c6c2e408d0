"""Functions of the package flash_attn that a model calls itself: observed from outside the call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headwise import mask as masks
from headwise.bias import ALiBi
from headwise.core.intervals import Mask
from headwise.core.options import Options
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters import traced
from headwise.watching.adapters.packed_sequences import packed
from headwise.watching.adapters.patching import Replacement, Undo, places, unheard
from headwise.watching.adapters.scaled_dot_product import lengths_differ
from headwise.watching.adapters.torch_calls import Listener
from headwise.watching.recorder.held_call import DROPPED, Output
from headwise.watching.recorder.seen_call import Kind

_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_TENSORS: dict[str, tuple[str, ...]] = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_varlen_func": ("q", "k", "v", *_PACKED),
}
"""The functions that are read, and the names of their first arguments."""

_OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
_UNREAD = (
    "flash_attn_with_kvcache",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Show the flash_attn calls of a model's own code to the recorder; returns the undoing."""
    package = sys.modules.get("flash_attn")
    if package is None:
        return []
    known = {getattr(package, name, None): name for name in (*_TENSORS, *_UNREAD)}
    known |= {getattr(x, "__watched_flash__", x): name for x, name in known.items()}
    known.pop(None, None)

    def wanted(value: object) -> bool:
        return callable(value) and getattr(value, "__watched_flash__", value) in known

    found = set(places(model, wanted, package))
    aside = listener.recorder.aside
    return [_replacement(owner, name).add(listener, aside) for owner, name in found]


@functools.cache
def _replacement(owner: Any, name: str) -> Replacement[Listener]:
    return Replacement(owner, name, _make)


def _make(original: Any, users: list[Listener]) -> Callable[..., Any]:
    @functools.wraps(original)
    def attend(*given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(original, given, options)
        for listener in users:
            if listener.listens:
                return _observed(listener, original, given, options)
        return original(*given, **options)

    attend.__watched_flash__ = original  # type: ignore[attr-defined]
    return attend


def _observed(
    listener: Listener, function: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    """The function's own result; its call is shown to the recorder."""
    name, recorder = listener.frames[-1].name, listener.recorder
    recorder.interventions.refuse(name, "it calls flash_attn")
    listener.note_attention()
    with listener.off(), unheard():
        result = function(*given, **options)
        out = result[0] if isinstance(result, tuple) else result
        whole = out if out.ndim == 4 else out[None]  # (B, N, H, D)
        if recorder.wants(name):
            with recorder.unread.reading(name, f"{function.__name__}: "):
                call, dropped = read_flash_call(function.__name__, given, options)
                proof = None if dropped else listener.prove(name, call, whole.detach())
                across = call.mask is None and lengths_differ(call.q, call.k)
                kind: Kind = "cross" if across else listener.kind_of_call(name, call)
                shown = None if dropped else whole.transpose(1, 2)
                turned = partial(_heads_first, whole.shape)
                output = DROPPED if dropped else Output(out, turned)
                recorder.beside(name, call, kind, out=shown, proof=proof, output=output)
        silenced = recorder.interventions.silence(name, whole, axis=-2)
    silenced = silenced if out.ndim == 4 else silenced[0]
    return (silenced, *result[1:]) if isinstance(result, tuple) else silenced


def _heads_first(shape: torch.Size, grad: Tensor) -> Tensor:
    """The gradient of an output (B, N, H, D), or without a batch, as (B, H, N, D)."""
    return grad.reshape(shape).transpose(1, 2)


def _traced(function: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The function's own result in compiled code, with its figures."""
    module = traced.traced_module()
    with traced.uncounted():
        result = function(*given, **options)
    out = result[0] if isinstance(result, tuple) else result
    found = traced.read_or_count(
        module, lambda: read_flash_call(function.__name__, given, options), out
    )
    if found is not None:
        call, dropped = found
        across = call.mask is None and lengths_differ(call.q, call.k)
        across = across or traced.looks_elsewhere(module, call.k.shape[2], call.mask is not None)
        shown = None if dropped else (out if out.ndim == 4 else out[None]).transpose(1, 2)
        traced.beside(module, call, across, out=shown)
    return result


def read_flash_call(
    function: str, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Call, bool]:
    """Read a call of this function; True if it drops weights. ValueError if it can't be read."""
    if function not in _TENSORS:
        raise ValueError("it is not known where its keys stand")
    named = dict(zip((*_TENSORS[function], *_OPTIONS), given, strict=False)) | options
    if "qkv" in named:
        q, k, v = named["qkv"].unbind(-3)
    else:
        q, (k, v) = (
            named["q"],
            named["kv"].unbind(-3) if "kv" in named else (named["k"], named["v"]),
        )
    q, k, v = ((x if x.ndim == 4 else x[None]).detach().transpose(1, 2) for x in (q, k, v))
    causal, slopes = bool(named.get("causal")), named.get("alibi_slopes")
    if slopes is not None and (slopes.ndim != 1 or not causal):
        raise ValueError("its alibi_slopes are read for causal attention, one per head")
    call = Call(
        q,
        k,
        v,
        Options(
            Dot(named.get("softmax_scale")),
            _mask(named, causal, k.shape[2]),
            None if slopes is None else ALiBi(slopes.detach()),
            named.get("softcap") or None,
        ),
    )
    return call, bool(named.get("dropout_p"))


def _mask(named: dict[str, Any], causal: bool, keys: int) -> Mask | None:
    """causal=, window_size= and cu_seqlens= as a mask; queries and keys are aligned at the end."""
    found = [masks.causal()] if causal else []
    left, right = named.get("window_size", (-1, -1))
    if left >= 0 or (right >= 0 and not causal):
        left, right = (keys if x < 0 else int(x) for x in (left, right))
        found.append(masks.window(left, 0 if causal else right))
    ends = named.get("cu_seqlens_q")
    if isinstance(ends, Tensor):
        if torch.compiler.is_compiling():
            raise ValueError("its cu_seqlens are a tensor, which compiled code can't look into")
        found.append(packed(ends, named["cu_seqlens_k"], 1, keys))
    return functools.reduce(lambda a, b: a & b, found) if found else None
