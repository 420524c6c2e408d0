"""Attention functions that a model's own code calls: replaced where it finds them, and watched.

In eager code these are the functions of the package flash_attn, and flex_attention, compiled or
not, which runs inside the compiler, where no mode of ours may be active. In code that the compiler
traces they are those of flash_attn, F.scaled_dot_product_attention and hw.attention, which then get
operators that record figures. A function is replaced in the files and in the classes of a model's
modules, by whichever name, and in its own package.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from headwise import mask as masks
from headwise.api import attention
from headwise.bias import ALiBi
from headwise.core.intervals import Mask
from headwise.core.mask_rules import by_rows
from headwise.core.options import Options
from headwise.core.place import Place
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters import traced
from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.packed_sequences import packed
from headwise.watching.adapters.patching import Replacement, Undo, places, unheard
from headwise.watching.adapters.scaled_dot_product import (
    SCALED_DOT_PRODUCT,
    MaskMemo,
    lengths_differ,
    scaled_dot_product,
)
from headwise.watching.adapters.torch_calls import Listener, may_attend
from headwise.watching.adapters.traced_modules import TracedModel
from headwise.watching.adapters.written.logits_call import from_logits, head_count
from headwise.watching.recorder.held_call import DROPPED, Output
from headwise.watching.recorder.layer import LARGEST
from headwise.watching.recorder.seen_call import Kind

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Make = Callable[[Any, list[Listener]], Callable[..., Any]]

_REPLACED = "__watched_function__"  # an attribute of a replacement: the function that it replaces
_FLEX = flex.flex_attention
_memo = MaskMemo()


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Show a model's own calls of flash_attn and flex_attention; returns the undoing."""
    undo = _replace(model, listener, _is_flex, _make_flex, flex)
    package = sys.modules.get("flash_attn")
    if package is not None:
        known = [getattr(package, name, None) for name in (*_FLASH_TENSORS, *_FLASH_UNREAD)]
        undo += _replace(model, listener, known.__contains__, _make_flash, package)
    return undo


def attach_traced(model: nn.Module, listener: Listener) -> list[Undo]:
    """Let the compiler trace the attention of a model with its figures; returns the undoing."""
    names = {module: name for name, module in named_modules(model) if may_attend(module)}
    undo: list[Undo] = [TracedModel(names, listener.recorder).detach, _allow_checkpoints()]
    ours = sys.modules["headwise"]
    return undo + _replace(model, listener, _is_attention, _make_attention, F, ours)


def _allow_checkpoints() -> Undo:
    """Let the compiler trace checkpointed modules, whose notes of what runs are side effects.

    It then leaves side effects out of the recomputation, and figures are recorded once.
    """
    config: Any = getattr(sys.modules.get("torch._dynamo"), "config", None)
    name = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    before = getattr(config, name, None)
    if before is not None:
        setattr(config, name, True)
    return lambda: None if before is None else setattr(config, name, before)


def _replace(
    model: nn.Module, listener: Listener, is_it: Callable[[Any], bool], make: Make, *owners: Any
) -> list[Undo]:
    """Replace a function wherever the model's code or these owners have it."""

    def wanted(value: object) -> bool:
        known = isinstance(value, FunctionType | BuiltinFunctionType)
        return known and is_it(getattr(value, _REPLACED, value))

    found = set(places(model, wanted, *owners))
    aside = listener.recorder.aside
    return [_replacement(owner, name, make).add(listener, aside) for owner, name in found]


@functools.cache  # watches share a replacement
def _replacement(owner: Any, name: str, make: Make) -> Replacement[Listener]:
    return Replacement(owner, name, make)


def _watched(
    original: Any,
    users: list[Listener],
    observe: Callable[..., Any],
    trace: Callable[..., Any] | None,
) -> Callable[..., Any]:
    """A function that lets `observe` or, in compiled code, `trace` run the original."""

    def attend(*given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            if trace is None:
                return original(*given, **options)
            return trace(original, given, options)
        for listener in users:
            if listener.listens:
                return observe(listener, original, given, options)
        return original(*given, **options)

    return _marked(attend, original)


def _marked(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    if isinstance(original, FunctionType):
        functools.update_wrapper(replacement, original, updated=())
    setattr(replacement, _REPLACED, original)
    return replacement


def _observed(
    listener: Listener,
    function: Any,
    arguments: Arguments,
    package: str,
    read: Callable[[str], tuple[Call, Kind, bool]],
    heads_axis: int,
    how: str = "",
) -> Any:
    """The function's own result; its call is shown to the recorder.

    `read` gives the call of a module's name, its kind, and True if it drops weights. The heads are
    axis 1 or 2 of the output, (B, H, N, D) or (B, N, H, D), perhaps without a batch. `how` begins
    the reason why a call could not be read.
    """
    name, recorder = listener.frames[-1].name, listener.recorder
    recorder.interventions.refuse(name, f"it calls {package}")
    listener.note_attention()

    def heads_first(x: Tensor) -> Tensor:
        x = x if x.ndim == 4 else x[None]
        return x if heads_axis == 1 else x.transpose(1, 2)

    with listener.off(), unheard():
        given, options = arguments
        result = function(*given, **options)
        out = result[0] if isinstance(result, tuple) else result
        if recorder.wants(name):
            with recorder.unread.reading(name, how):
                call, kind, dropped = read(name)
                shown, output = None, DROPPED if dropped else Output(out, heads_first)
                proof = None
                if not dropped:
                    shown = heads_first(out)
                    proof = listener.prove(name, call, shown.detach().transpose(1, 2))
                recorder.beside(name, call, kind, out=shown, proof=proof, output=output)
        whole = out if out.ndim == 4 else out[None]
        silenced = recorder.interventions.silence(name, whole, axis=heads_axis - 4)
    silenced = silenced if out.ndim == 4 else silenced[0]
    return (silenced, *result[1:]) if isinstance(result, tuple) else silenced


def _traced(
    function: Any,
    arguments: Arguments,
    read: Callable[[nn.Module, Tensor], tuple[Call, bool, Tensor | None]],
) -> Any:
    """The function's own result in compiled code, with its figures.

    `read` takes a module and the output, and gives the call, True if that is known to look at
    another sequence, and the output (B, H, N, D), or None if it is not that of the call's weights.
    """
    given, options = arguments
    module = traced.traced_module()
    if module is None:  # a part of a call that is read, or of one that PyTorch traces as a whole
        return function(*given, **options)
    with traced.uncounted():
        result = function(*given, **options)
    out = result[0] if isinstance(result, tuple) else result
    found = traced.read_or_count(module, lambda: read(module, out), out)
    if found is not None:
        call, across, shown = found
        across = across or _looks_elsewhere(module, call)
        traced.beside(module, call, across, out=shown)
    return result


def _looks_elsewhere(module: nn.Module, call: Call) -> bool:
    """True if a module's call is of another sequence, by its lengths or the module's arguments."""
    masked = call.given.mask is not None
    across = not masked and lengths_differ(call.q, call.k)
    return across or traced.looks_elsewhere(module, call.k.shape[2], masked)


# F.scaled_dot_product_attention and hw.attention, where the compiler traces them.


def _is_attention(value: object) -> bool:
    return value is SCALED_DOT_PRODUCT or value is attention


def _make_attention(original: Any, users: list[Listener]) -> Callable[..., Any]:
    if original is not attention:
        return _watched(original, users, Listener.scaled_dot_product, _trace_scaled_dot_product)

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            for listener in users:
                if listener.listens:
                    listener.note_attention()
                    with listener.off():
                        return listener.own(listener.frames[-1].name, q, k, v, **options)
            return attention(q, k, v, **options)
        module = traced.traced_module()
        if module is None or q.ndim != 4:
            return attention(q, k, v, **options)
        call = Call(q, k, v, Options(**options))
        return traced.inside(module, call, _looks_elsewhere(module, call))

    return _marked(attend, original)


def _trace_scaled_dot_product(
    original: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    def read(module: nn.Module, out: Tensor) -> tuple[Call, bool, Tensor | None]:
        def heads(x: Tensor) -> int:
            return head_count([module], x.shape, ())

        call, kind = scaled_dot_product(_memo, heads, *given, **options)
        return call, kind == "cross", out if out.ndim == 4 else None

    return _traced(original, (given, options), read)


# The functions of the package flash_attn.

_PACKED = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_FLASH_TENSORS: dict[str, tuple[str, ...]] = {
    "flash_attn_func": ("q", "k", "v"),
    "flash_attn_qkvpacked_func": ("qkv",),
    "flash_attn_kvpacked_func": ("q", "kv"),
    "flash_attn_varlen_func": ("q", "k", "v", *_PACKED),
}
"""The functions that are read, and the names of their first arguments."""

_FLASH_OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes")
_FLASH_UNREAD = (
    "flash_attn_with_kvcache",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
)


def _make_flash(original: Any, users: list[Listener]) -> Callable[..., Any]:
    return _watched(original, users, _observe_flash, _trace_flash)


def _observe_flash(
    listener: Listener, function: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    def read(name: str) -> tuple[Call, Kind, bool]:
        call, dropped = read_flash_call(function.__name__, given, options)
        across = call.mask is None and lengths_differ(call.q, call.k)
        return call, "cross" if across else listener.kind_of_call(name, call), dropped

    how = f"{function.__name__}: "
    return _observed(listener, function, (given, options), "flash_attn", read, 2, how)


def _trace_flash(function: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    def read(_: nn.Module, out: Tensor) -> tuple[Call, bool, Tensor | None]:
        call, drops = read_flash_call(function.__name__, given, options)
        whole = out if out.ndim == 4 else out[None]
        return call, False, None if drops else whole.transpose(1, 2)

    return _traced(function, (given, options), read)


def read_flash_call(
    function: str, given: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Call, bool]:
    """Read a call of this function; True if it drops weights. ValueError if it can't be read."""
    if function not in _FLASH_TENSORS:
        raise ValueError("it is not known where its keys stand")
    names = (*_FLASH_TENSORS[function], *_FLASH_OPTIONS)
    named = dict(zip(names, given, strict=False)) | options
    if "qkv" in named:
        q, k, v = named["qkv"].unbind(-3)
    else:
        q = named["q"]
        k, v = named["kv"].unbind(-3) if "kv" in named else (named["k"], named["v"])
    q, k, v = ((x if x.ndim == 4 else x[None]).detach().transpose(1, 2) for x in (q, k, v))
    causal, slopes = bool(named.get("causal")), named.get("alibi_slopes")
    if slopes is not None and (slopes.ndim != 1 or not causal):
        raise ValueError("its alibi_slopes are read for causal attention, one per head")
    mask = _flash_mask(named, causal, k.shape[2])
    bias = None if slopes is None else ALiBi(slopes.detach())
    score, softcap = Dot(named.get("softmax_scale")), named.get("softcap") or None
    return Call(q, k, v, Options(score, mask, bias, softcap)), bool(named.get("dropout_p"))


def _flash_mask(named: dict[str, Any], causal: bool, keys: int) -> Mask | None:
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


# flex_attention.


def _is_flex(value: object) -> bool:
    """True if this is the function, compiled or not."""
    return value is _FLEX or getattr(value, "_torchdynamo_orig_callable", None) is _FLEX


def _make_flex(original: Any, users: list[Listener]) -> Callable[..., Any]:
    return _watched(original, users, _observe_flex, None)


def _observe_flex(
    listener: Listener, function: Any, given: tuple[Any, ...], options: dict[str, Any]
) -> Any:
    def read(name: str) -> tuple[Call, Kind, bool]:
        return *read_flex_call(name, listener.kind, *given, **options), False

    return _observed(listener, function, (given, options), "flex_attention", read, 1)


def read_flex_call(
    name: str,
    kind_by_arguments: Callable[[str, int, bool], Kind],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: flex.BlockMask | None = None,
    scale: float | None = None,
    *_: Any,
    **__: Any,
) -> tuple[Call, Kind]:
    """Read a call of flex_attention, and its kind.

    A block mask is asked about a few rows at a time, and kept as intervals if it is that. The
    logits that a score_mod makes are known pair by pair only, so a call has them written out.
    """
    q, k, v = (x.detach().expand(len(query), -1, -1, -1) for x in (query, key, value))
    across = block_mask is None and lengths_differ(q, k)
    kind: Kind = "cross"
    if not across:
        kind = kind_by_arguments(name, k.shape[2], block_mask is not None)
    mask = None if block_mask is None else _flex_mask(name, block_mask, q, k, kind)
    call = Call(q, k, v, Options(Dot(scale), mask))
    return (call if score_mod is None else _with_written_logits(name, call, score_mod)), kind


def _flex_mask(name: str, blocks: flex.BlockMask, q: Tensor, k: Tensor, kind: Kind) -> Mask:
    batch, heads = blocks.shape[:2]
    sizes = (batch, heads, q.shape[2], k.shape[2])
    try:
        return by_rows(blocks.mask_mod, sizes, q.device, kind == "self", None)
    except Exception as error:  # it is somebody else's function
        raise ValueError(
            f"the mask_mod of its flex_attention does not take whole rows: {error}"
        ) from error


def _with_written_logits(name: str, call: Call, score_mod: Callable[..., Tensor]) -> Call:
    """The same call with the logits that a score_mod makes, written out."""
    (batch, heads, queries, width), keys = call.q.shape, call.k.shape[2]
    if batch * heads * queries * keys > LARGEST:
        raise ValueError(
            f"its flex_attention has a score_mod, which "
            f"must be asked about each pair, and {batch} × {heads} × {queries} × {keys} pairs are "
            f"more than the {LARGEST:,} that headwise writes out; use a shorter input, or leave "
            "the layer out with layers="
        )
    exact = torch.promote_types(call.q.dtype, torch.float32)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (call.k, call.v))
    scale = call.score.scale if isinstance(call.score, Dot) else None
    scores = call.q.to(exact) @ k.to(exact).mT * (width**-0.5 if scale is None else scale)
    numbers = [torch.arange(size, device=k.device) for size in scores.shape]
    asked = score_mod
    for axis in (4, 3, 2, 1):  # the key first: the innermost
        within = [0, *(0 if number == axis else None for number in range(1, 5))]
        asked = torch.vmap(asked, in_dims=tuple(within))
    logits = asked(scores, *numbers).to(exact)
    if call.mask is not None:
        logits = logits.masked_fill(~call.mask.to_dense(Place.of(call.q, k)), -torch.inf)
    return from_logits(logits, v)
