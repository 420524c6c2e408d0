"""Hooks that stay behind when a watched model is copied or saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A function for PyTorch to call, on the model that is watched and on no other.

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
