"""Attention functions that compiled code calls: traced with operators that record figures."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.api import attention
from headwise.core.options import Options
from headwise.nn.call import Call
from headwise.watching.adapters import traced
from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.patching import Replacement, Undo, places
from headwise.watching.adapters.scaled_dot_product import (
    SCALED_DOT_PRODUCT,
    MaskMemo,
    lengths_differ,
    scaled_dot_product,
)
from headwise.watching.adapters.torch_calls import Listener, may_attend
from headwise.watching.adapters.traced_modules import TracedModel
from headwise.watching.adapters.written.logits_call import head_count

_memo = MaskMemo()


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Let the compiler trace the attention of a model with its figures; returns the undoing."""
    names = {module: name for name, module in named_modules(model) if may_attend(module)}
    undo: list[Undo] = [TracedModel(names, listener.recorder).detach, _allow_checkpoints()]
    found = set(places(model, _is_attention, F, sys.modules["headwise"]))
    return undo + [_replacement(owner, name).add(listener) for owner, name in found]


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


def _is_attention(value: object) -> bool:
    known = value is SCALED_DOT_PRODUCT or value is attention
    return known or hasattr(value, "__watched_attention__")


@functools.cache
def _replacement(owner: Any, name: str) -> Replacement[Listener]:
    return Replacement(owner, name, _make)


def _make(original: Any, users: list[Listener]) -> Callable[..., Any]:
    if original is attention:
        return _make_own(original)

    def scaled_dot_product_attention(*given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(original, given, options)
        for listener in users:
            if listener.listens:
                return listener.scaled_dot_product(original, given, options)
        return original(*given, **options)

    scaled_dot_product_attention.__watched_attention__ = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _make_own(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """hw.attention in somebody's own module; without the compiler, a listener hears it."""

    @functools.wraps(original)
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        module = traced.traced_module()
        if not torch.compiler.is_compiling() or module is None or q.ndim != 4:
            return original(q, k, v, **options)
        call = Call(q, k, v, Options(**options))
        masked = call.given.mask is not None
        across = not masked and lengths_differ(q, k)
        across = across or traced.looks_elsewhere(module, k.shape[2], masked)
        return traced.inside(module, call, across)

    attend.__watched_attention__ = True  # type: ignore[attr-defined]
    return attend


def _traced(original: Callable[..., Any], given: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A call of F.scaled_dot_product_attention in compiled code; its output."""
    module = traced.traced_module()
    if module is None:  # a part of a call that is read, or of one that PyTorch traces as a whole
        return original(*given, **options)
    with traced.uncounted():
        out = original(*given, **options)

    def heads(x: Tensor) -> int:
        return head_count([module], x.shape, ())

    read = traced.read_or_count(
        module, lambda: scaled_dot_product(_memo, heads, *given, **options), out
    )
    if read is not None:
        call, kind = read
        shown = out if out.ndim == 4 else None
        across = kind == "cross" or traced.looks_elsewhere(
            module, call.k.shape[2], call.given.mask is not None
        )
        traced.beside(module, call, across, out=shown)
    return out
