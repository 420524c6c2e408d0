"""headwise's own modules, observed in the pass that computes their output."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.nn import AdditiveAttention, FixedAttention, MultiHeadAttention
from headwise.nn.caches.cache import RollbackOnError
from headwise.watching.adapters import traced
from headwise.watching.adapters.module_forwards import named_modules
from headwise.watching.adapters.patching import Replacement, Undo, unheard
from headwise.watching.recorder.call_recorder import CallRecorder
from headwise.watching.recorder.seen_call import Kind

OURS = (MultiHeadAttention, FixedAttention, AdditiveAttention)


@dataclass(eq=False)
class HeadwiseModules:
    """The names of headwise's attention modules in a watched model, and its recorder."""

    names: weakref.WeakKeyDictionary[nn.Module, str]
    recorder: CallRecorder


def attach(model: nn.Module, recorder: CallRecorder) -> list[Undo]:
    """Show every call of headwise's modules in the model to the recorder; returns the undoing.

    The forwards are replaced in their classes: a module that is copied or saved takes nothing
    along, and one whose forward somebody wrapped still runs through the wrapper.
    """
    modules = HeadwiseModules(weakref.WeakKeyDictionary(), recorder)
    for name, module in named_modules(model):
        if isinstance(module, OURS):
            modules.names[module] = name
    if not modules.names:
        return []
    return [replacement.add(modules, recorder.aside) for replacement in _REPLACED]


def _make_forward(original: Any, users: list[HeadwiseModules]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(self, given, options)
        for modules in users:
            name = modules.names.get(self)
            if name is not None:
                run = functools.partial(original, self)
                return _observed(self, name, modules.recorder, run, given, options)
        return original(self, *given, **options)

    return forward


_REPLACED = tuple(Replacement[HeadwiseModules](kind, "forward", _make_forward) for kind in OURS)


def _observed(
    module: Any,
    name: str,
    recorder: CallRecorder,
    run: Callable[..., Tensor],
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Tensor:
    """The module's forward, watched."""
    wanted, changes = recorder.wants(name), recorder.interventions
    if not wanted and name not in changes.silenced and not changes.wants(name):
        return run(*given, **options)
    with unheard():
        return _computed(module, name, recorder, wanted, given, options)


def _computed(
    module: Any,
    name: str,
    recorder: CallRecorder,
    wanted: bool,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Tensor:
    """The module's output, observed if that is wanted."""
    call, cache = module.prepare(*given, **options), options.get("cache")
    with RollbackOnError(cache, call.q.shape[-2]):
        forgotten = None if cache is None else int(cache.first)
        kind = _kind(module, given, options)
        changed = recorder.interventions.change(name, call, kind, forgotten)
        if wanted:
            out = recorder.inside(name, call, kind, forgotten=forgotten, changed=changed)
        else:
            out = (call if changed is None else changed).attend()
    return module.join(recorder.interventions.silence(name, out))  # type: ignore[no-any-return]


def _traced(module: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """The module's forward in compiled code."""
    call = module.prepare(*given, **options)
    out = traced.inside(module, call, _kind(module, given, options) == "cross")
    return module.join(out)  # type: ignore[no-any-return]


def _kind(module: nn.Module, given: tuple[Any, ...], options: dict[str, Any]) -> Kind:
    if isinstance(module, FixedAttention):
        return "self"
    context = options.get("keys" if isinstance(module, AdditiveAttention) else "context")
    return "self" if len(given) < 2 and context is None else "cross"
