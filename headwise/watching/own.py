"""headwise's own attention, seen inside its one pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from headwise.api import attention
from headwise.nn import AdditiveAttention, FixedAttention, MultiHeadAttention
from headwise.watching.layer import Kind
from headwise.watching.recorder import Recorder

OURS = (MultiHeadAttention, FixedAttention, AdditiveAttention)
Undo = Callable[[], None]


def attach(model: nn.Module, recorder: Recorder) -> list[Undo]:
    """Let every layer of ours in the model tell the recorder; returns what undoes it."""
    undo: list[Undo] = []
    for name, module in model.named_modules():
        if isinstance(module, OURS):
            module.__dict__["forward"] = partial(_observed, module, name, recorder)
            undo.append(partial(module.__dict__.pop, "forward"))
    return undo


def _observed(module: Any, name: str, recorder: Recorder, *given: Any, **options: Any) -> Tensor:
    """The module's forward, watched."""
    wanted = recorder.wants(name)
    if not wanted and name not in recorder.silenced:
        return type(module).forward(module, *given, **options)  # type: ignore[no-any-return]
    call = module.prepare(*given, **options)
    if wanted:
        out = recorder.inside(name, call, _kind(module, given, options))
    else:
        out = attention(call.q, call.k, call.v, **call.options())
    return module.join(recorder.silence(name, out))  # type: ignore[no-any-return]


def _kind(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> Kind:
    if isinstance(module, FixedAttention):
        return "self"
    context = options.get("keys" if isinstance(module, AdditiveAttention) else "context")
    return "self" if len(given) < 2 and context is None else "cross"
