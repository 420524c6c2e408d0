"""Attention functions that compiled code calls: traced with operators that record figures."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headwise.watching.adapters import traced
from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.patching import Replacement, Undo, places
from headwise.watching.adapters.scaled_dot_product import (
    SCALED_DOT_PRODUCT,
    MaskMemo,
    scaled_dot_product,
)
from headwise.watching.adapters.torch_calls import Listener, may_attend

_memo = MaskMemo()


def attach(model: nn.Module, listener: Listener) -> list[Undo]:
    """Let the compiler trace the attention of a model with its figures; returns the undoing."""
    names = {module: name for name, module in named_modules(model) if may_attend(module)}
    undo: list[Undo] = [traced.TracedModel(names, listener.recorder).detach, _allow_checkpoints()]
    for owner, name in set(places(model, _is_scaled_dot_product, F)):
        undo.append(_replacement(owner, name).add(listener))
    return undo


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


def _is_scaled_dot_product(value: object) -> bool:
    return value is SCALED_DOT_PRODUCT or hasattr(value, "__watched_sdpa__")


@functools.cache
def _replacement(owner: Any, name: str) -> Replacement[Listener]:
    return Replacement(owner, name, _make)


def _make(original: Any, users: list[Listener]) -> Callable[..., Any]:
    def scaled_dot_product_attention(*given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            out = original(*given, **options)
            call, kind = scaled_dot_product(_memo, *given, **options)
            traced.beside(traced.NOW.module, call, kind == "cross")
            return out
        for listener in users:
            if listener.listens:
                return listener.scaled_dot_product(original, given, options)
        return original(*given, **options)

    scaled_dot_product_attention.__watched_sdpa__ = True  # type: ignore[attr-defined]
    return scaled_dot_product_attention
