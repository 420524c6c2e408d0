"""Hooks and replaced attributes: how a watch gets into other people's code, and out again."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

Undo = Callable[[], None]
User = TypeVar("User")


class _Local(threading.local):
    depth = 0  # of calls that are already looked at


_local = _Local()


class Hook:
    """A function for PyTorch to call on the model that is watched, and on no copy of it.

    `copy.deepcopy(model)` and `torch.save(model)` take a model's hooks along; this one does nothing
    in a copy.

    >>> import copy
    >>> hook = Hook(print)
    >>> hook("seen")
    seen
    >>> copy.deepcopy(hook)("unseen")
    """

    def __init__(self, function: Callable[..., Any] | None = None) -> None:
        self.function = function

    def __call__(self, *given: Any, **options: Any) -> Any:
        return None if self.function is None else self.function(*given, **options)

    def __deepcopy__(self, memo: object) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()


class Replacement(Generic[User]):
    """`owner.name`, replaced by the result of `make(original, users)` while there are users.

    The owner is a class or a module. All watches share one replacement, and the last one restores
    the original; a static method stays one. The same original gets the same function each time: the
    compiler has one graph with it and one without.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Any, list[User]], Callable[..., Any]]
    ) -> None:
        self.owner, self.name, self.make = owner, name, make
        self.users: list[User] = []
        self._own = True
        self._before: Any = None
        self._original: Any = None
        self._ours: Any = None

    def add(self, user: User, last: bool = False) -> Undo:
        """Add a user, before the others or after them; returns the function that removes it."""
        if not self.users:
            self._own = self.name in vars(self.owner)  # or is it inherited?
            self._before = vars(self.owner).get(self.name)
            original = getattr(self.owner, self.name)
            if self._ours is None or self._original is not original:
                self._original, self._ours = original, self.make(original, self.users)
                if isinstance(self._before, staticmethod):
                    self._ours = staticmethod(self._ours)
            setattr(self.owner, self.name, self._ours)
        self.users.insert(len(self.users) if last else 0, user)
        return partial(self._remove, user)

    def _remove(self, user: User) -> None:
        self.users[:] = [other for other in self.users if other is not user]
        if self.users or vars(self.owner).get(self.name) is not self._ours:
            return  # somebody replaced it once more; without users ours only passes on
        if self._own:
            setattr(self.owner, self.name, self._before)
        else:
            delattr(self.owner, self.name)


def places(
    model: nn.Module, wanted: Callable[[object], bool], *owners: Any
) -> Iterator[tuple[Any, str]]:
    """The places where a model's code finds a function: an owner, and a name in it.

    They are the files and the classes of its modules, and further `owners`.
    """
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    kinds = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    files = {sys.modules.get(kind.__module__) for kind in kinds}
    for owner in (*owners, *files, *kinds):
        for name, value in list(vars(owner).items()) if owner is not None else ():
            if wanted(value.__func__ if isinstance(value, staticmethod) else value):
                yield owner, name


class ModelMode(TorchFunctionMode):
    """A mode that hears what a model computes, and should hear nothing else."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Take the mode off PyTorch's stack, where it would change or slow down what PyTorch does.

        Beneath another mode it stays: for that one PyTorch leaves its fast path anyway.
        """
        if _top_mode() is self:
            with _pop_mode_temporarily():
                yield
        else:
            yield


class unheard:  # noqa: N801 - a context, and several of them surround every call
    """Mark a call that is already looked at, so that what it calls is not heard again."""

    __slots__ = ("off",)

    def __enter__(self) -> None:
        _local.depth += 1
        mode = _top_mode()
        self.off = mode.off() if isinstance(mode, ModelMode) else None
        if self.off is not None:
            self.off.__enter__()

    def __exit__(self, *error: Any) -> None:
        _local.depth -= 1
        if self.off is not None:
            self.off.__exit__(*error)


def _top_mode() -> TorchFunctionMode | None:
    """The function mode that PyTorch asks first."""
    depth: int = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None


def is_unheard() -> bool:
    """True inside a call that is already looked at."""
    return _local.depth > 0


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what was compiled as plain Python while the block runs: only that can be changed."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and it takes long to import
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
