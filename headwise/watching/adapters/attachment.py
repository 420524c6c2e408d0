"""Adapters for every way in which models attend, attached to a model together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.watching.adapters import (
    function_calls,
    headwise_calls,
    multi_head_calls,
    recurrent_calls,
    torch_calls,
    transformers_calls,
)
from headwise.watching.adapters.module_forwards import Follower, follow, named_modules
from headwise.watching.adapters.patching import Undo
from headwise.watching.recorder.call_recorder import CallRecorder

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def attach(model: nn.Module, recorder: CallRecorder, enter: Enter) -> list[Undo]:
    """Show the attention of a model to a recorder; `enter` is told when a pass of it begins.

    Returns the undoing, to be done from the last to the first, of whatever was done before an
    error too.
    """
    recorder.registry.towers = transformers_calls.towers(model)
    recorder.interventions.modules.update(named_modules(model))
    listener = torch_calls.Listener(recorder)
    whole = Follower({id(model)}, enter, lambda _: recorder.passes.end())
    undo: list[Undo] = []
    try:
        # First the forwards that are computed in another way; around them, those followed.
        undo += headwise_calls.attach(model, recorder)
        undo += multi_head_calls.attach(model, listener)
        undo += follow(model, whole)
        if not recorder.aside:  # while experiments run, nothing is compiled
            undo += function_calls.attach_traced(model, listener)
        for adapter in (torch_calls, function_calls):
            undo += adapter.attach(model, listener)
        undo += transformers_calls.attach(model, listener)
        undo += recurrent_calls.attach(model, listener)
    except BaseException:
        detach(undo)
        raise
    return undo


def detach(undo: list[Undo]) -> None:
    """Undo what was attached."""
    while undo:
        undo.pop()()
