"""headwise's own attention, seen inside its one pass."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.api import attention
from headwise.nn import AdditiveAttention, FixedAttention, MultiHeadAttention
from headwise.watching.adapters.replacement import Replacement
from headwise.watching.layer import Kind
from headwise.watching.recorder import Recorder

OURS = (MultiHeadAttention, FixedAttention, AdditiveAttention)
Undo = Callable[[], None]


@dataclass(eq=False)
class Watched:
    """The layers of ours in a watched model, and who hears of them."""

    names: weakref.WeakKeyDictionary[nn.Module, str]
    recorder: Recorder


def attach(model: nn.Module, recorder: Recorder) -> list[Undo]:
    """Let every layer of ours in the model tell the recorder; returns what undoes it.

    The forwards are replaced in their classes: a module that is copied or saved has nothing to take
    along, and one whose forward somebody wrapped goes on through the wrapping.
    """
    watched = Watched(weakref.WeakKeyDictionary(), recorder)
    for name, module in model.named_modules():
        if isinstance(module, OURS):
            watched.names[module] = name
    return [replacement.add(watched) for replacement in _REPLACED] if watched.names else []


def _make_forward(original: Any, users: list[Watched]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
        for watched in users:
            name = watched.names.get(self)
            if name is not None:
                run = functools.partial(original, self)
                return _observed(self, name, watched.recorder, run, given, options)
        return original(self, *given, **options)

    return forward


_REPLACED = tuple(Replacement[Watched](kind, "forward", _make_forward) for kind in OURS)


def _observed(
    module: Any,
    name: str,
    recorder: Recorder,
    run: Callable[..., Tensor],
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Tensor:
    """The module's forward, watched."""
    wanted = recorder.wants(name)
    if not wanted and name not in recorder.silenced:
        return run(*given, **options)
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
