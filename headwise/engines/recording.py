"""Listening to a call while it takes its usual way, to write a `Tape` of it.

A tape holds allocations, views of them, and launches. A call that also asks PyTorch to compute
something, or launches a kernel past `start`, has none: nothing is ever left out of one.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from threading import local
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.engines.tape import (
    Fill,
    Launch,
    Made,
    Tape,
    View,
    filled_descriptor,
    filled_tuple,
)


class _UnplayableError(Exception):
    """Something that a tape can't hold."""


_NOW = local()


class Recorder(TorchDispatchMode):
    """Listens to a call while it takes its usual way."""

    def __init__(self, given: tuple[Tensor, ...]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given = given
        self.allocated: list[Tensor] = []
        self.launched: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.heard = 0  # launches that Triton tells of
        self.computed = self.launching = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        if self.launching:  # Triton's interpreter computes with PyTorch
            return found
        if func.overloadpacket in _ALLOCATING:
            self.allocated.append(found)
        elif not _only_views(func):
            self.computed = True
        return found

    def hear(self, *_: object) -> None:
        """One more launch of this thread, whoever asked for it."""
        self.heard += recorder() is self

    def __enter__(self) -> Recorder:
        hook = _launch_hook()
        if hook is not None:
            hook.add(self.hear)
        super().__enter__()  # type: ignore[no-untyped-call]
        _NOW.recorder = self
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        hook = _launch_hook()
        if hook is not None:
            hook.remove(self.hear)
        _NOW.recorder = None

    def tape(self, results: tuple[Tensor, ...]) -> Tape | None:
        """What was heard; None: not all of it can be played again."""
        past_start = _launch_hook() is not None and self.heard != len(self.launched)
        if self.computed or past_start or not self.launched:
            return None
        if len({x.data_ptr() for x in self.given}) < len(self.given):
            return None  # which of them a kernel took can't be told
        try:
            return _Writing(self.given, self.allocated).tape(self.launched, results)
        except _UnplayableError:
            return None


def recorder() -> Recorder | None:
    """The one that listens to this thread's call, if any does."""
    found: Recorder | None = getattr(_NOW, "recorder", None)
    return found


def launch(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel and tell a recorder of it."""
    listening = recorder()
    if listening is None:
        run(*arguments)
        return
    listening.launching = True
    try:
        run(*arguments)
    finally:
        listening.launching = False
    note(run, arguments)


def note(run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Tell a recorder of a launch that was made."""
    listening = recorder()
    if listening is not None:
        listening.launched.append((run, arguments))


def record(
    run: Callable[[], tuple[Tensor, ...]], given: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], Tape | None]:
    """What `run` returns, and its tape where it can be played again with other `given` tensors."""
    hook = _launch_hook()
    if hook is not None and not hasattr(hook, "add"):  # somebody's own function, which is alone
        return run(), None
    with Recorder(given) as listening:
        results = run()
    return results, listening.tape(results)


class _Writing:
    """From the tensors of a recorded call to their places among the known."""

    def __init__(self, given: tuple[Tensor, ...], allocated: list[Tensor]) -> None:
        self.given, self.allocated = given, allocated
        self.places = {id(x): place for place, x in enumerate(given)}
        self.grown: list[Made | View] = []  # what is known beyond the given, in this order

    def tape(
        self,
        launched: list[tuple[Callable[..., Any], tuple[Any, ...]]],
        results: tuple[Tensor, ...],
    ) -> Tape:
        """The launches, and where their results are."""
        if any(self._given(x) for x in results):
            raise _UnplayableError
        launches = [Launch(run, *self.arguments(arguments)) for run, arguments in launched]
        places = [self.place(x) for x in results]
        return Tape(self.grown, launches, places)

    def arguments(self, given: tuple[Any, ...]) -> tuple[list[Any], list[tuple[int, Fill]]]:
        """Arguments of a launch, and how those that hold tensors are filled in."""
        fills = [(at, fill) for at, x in enumerate(given) if (fill := self.fill(x)) is not None]
        filled = {at for at, _ in fills}
        return [None if at in filled else x for at, x in enumerate(given)], fills

    def fill(self, x: Any) -> Fill | None:
        """How to make an argument of the known tensors; None: it is the same in every call."""
        if isinstance(x, Tensor):
            return itemgetter(self.place(x))
        if isinstance(x, tuple):
            arguments, fills = self.arguments(x)
            make = getattr(type(x), "_make", tuple)  # a kernel may know the fields by name
            return filled_tuple(make, arguments, fills) if fills else None
        if isinstance(getattr(x, "base", None), Tensor):
            return filled_descriptor(x, self.place(x.base))
        return None

    def place(self, x: Tensor) -> int:
        """Where among the known tensors this one is, or one that starts where it does."""
        if id(x) not in self.places:
            self.places[id(x)] = self._input(x) if self._given(x) else self._grow(x)
        return self.places[id(x)]

    def _given(self, x: Tensor) -> bool:
        return any(_storage(x) == _storage(known) for known in self.given)

    def _input(self, x: Tensor) -> int:
        """A kernel takes an address: any view that starts where a given tensor does will do."""
        for place, known in enumerate(self.given):
            if known.data_ptr() == x.data_ptr() and known.dtype == x.dtype:
                return place
        raise _UnplayableError

    def _grow(self, x: Tensor) -> int:
        """One more tensor that is known: allocated, or a view of one that is."""
        for base in self.allocated:
            if x is base and x.is_contiguous():
                self.grown.append(Made(x.shape, x.dtype, x.device))
                break
            if _storage(x) == _storage(base) and x is not base and x.dtype == base.dtype:
                view = View(self.place(base), x.shape, x.stride(), int(x.storage_offset()))
                if view in self.grown:
                    return len(self.given) + self.grown.index(view)
                self.grown.append(view)
                break
        else:
            raise _UnplayableError
        return len(self.given) + len(self.grown) - 1


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


_ALLOCATING = {
    torch.ops.aten.empty,
    torch.ops.aten.new_empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
}


def _only_views(func: Any) -> bool:
    """Whether an operator returns what it was given under another shape, and writes nothing."""
    returns = func._schema.returns
    return bool(returns) and all(
        x.alias_info is not None and not x.alias_info.is_write for x in returns
    )


def _launch_hook() -> Any:
    """Where Triton tells of every launch; its interpreter does not."""
    from triton import knobs

    from headwise.engines.triton.host.cards import INTERPRETING

    return None if INTERPRETING else knobs.runtime.launch_enter_hook
