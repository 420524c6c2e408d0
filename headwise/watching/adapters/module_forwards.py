"""The modules of a watched model, followed while they run.

Their forwards are replaced in their classes: a module that is copied or saved takes nothing along,
PyTorch keeps its fast paths, and compiled code is traced with the same function each time.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.watching.adapters import traced
from headwise.watching.adapters.other_sequence import parameters
from headwise.watching.adapters.patching import Hook, Replacement, Undo


@dataclass(frozen=True, eq=False)
class Follower:
    """Functions to call when some modules, by identity, start to run and when they have run."""

    modules: Collection[int]
    enter: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
    leave: Callable[[nn.Module], None]


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model by their names; compiling a part of it changes no name."""
    for name, module in model.named_modules():
        if not hasattr(module, "_orig_mod"):  # what torch.compile wraps around a module
            yield ".".join(part for part in name.split(".") if part != "_orig_mod"), module


def find_module(model: nn.Module, name: str) -> nn.Module:
    """The module of this name; ValueError if there is none."""
    for found, module in named_modules(model):
        if found == name:
            return module
    raise ValueError(f"there is no module {name!r} in this {type(model).__name__}")


def follow(model: nn.Module, follower: Follower) -> list[Undo]:
    """Tell a follower when its modules run; returns the undoing.

    A module whose forward somebody replaced in the object itself gets hooks instead.
    """
    undo: list[Undo] = []
    kinds: dict[type[nn.Module], None] = {}
    for module in model.modules():
        if id(module) not in follower.modules:
            continue
        kind = type(module)
        if "forward" not in vars(module) and inspect.isfunction(getattr(kind, "forward", None)):
            kinds[kind] = None
            continue
        before = module.register_forward_pre_hook(Hook(follower.enter), with_kwargs=True)
        left = Hook(lambda module, *_: follower.leave(module))
        after = module.register_forward_hook(left, always_call=True)
        undo += [before.remove, after.remove]
    return undo + [_replacement(kind).add(follower) for kind in kinds]  # type: ignore[arg-type]


@functools.cache  # watches share a replacement
def _replacement(kind: type[nn.Module]) -> Replacement[Follower]:
    return Replacement(kind, "forward", _make)


def _make(original: Any, users: list[Follower]) -> Callable[..., Any]:
    names = parameters(original)

    @functools.wraps(original)
    def forward(self: nn.Module, *given: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced.run(original, names, self, given, options)
        key = id(self)
        followers = [user for user in users if key in user.modules]
        if len(followers) == 1:  # most modules, and every one of the model asks
            (user,) = followers
            try:
                user.enter(self, given, options)
                return original(self, *given, **options)
            finally:
                user.leave(self)
        return _followed(original, followers, self, given, options)

    return forward


def _followed(
    original: Callable[..., Any],
    followers: list[Follower],
    module: nn.Module,
    given: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    entered: list[Follower] = []
    try:
        for user in followers:
            entered.append(user)
            user.enter(module, given, options)
        return original(module, *given, **options)
    finally:
        for user in reversed(entered):
            user.leave(module)
