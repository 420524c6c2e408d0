"""An attribute of someone else's that all watches replace together, and the last restores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

User = TypeVar("User")
_local = threading.local()


class Replacement(Generic[User]):
    """`owner.name`, replaced by what `make(original, users)` gives while there are users.

    The owner is a class or a module; a static method stays one.
    """

    def __init__(
        self, owner: Any, name: str, make: Callable[[Any, list[User]], Callable[..., Any]]
    ) -> None:
        self.owner, self.name, self.make = owner, name, make
        self.users: list[User] = []
        self._own = True
        self._before: Any = None
        self._ours: Any = None

    def add(self, user: User) -> Callable[[], None]:
        """Let the replacement serve one more; returns what undoes it."""
        if not self.users:
            self._own = self.name in vars(self.owner)  # or is it inherited?
            self._before = vars(self.owner).get(self.name)
            self._ours = self.make(getattr(self.owner, self.name), self.users)
            if isinstance(self._before, staticmethod):
                self._ours = staticmethod(self._ours)
            setattr(self.owner, self.name, self._ours)
        self.users.append(user)
        return partial(self._remove, user)

    def _remove(self, user: User) -> None:
        self.users[:] = [other for other in self.users if other is not user]
        if self.users or vars(self.owner).get(self.name) is not self._ours:
            return  # somebody replaced it once more; without users ours only passes on
        if self._own:
            setattr(self.owner, self.name, self._before)
        else:
            delattr(self.owner, self.name)


@contextmanager
def taken() -> Iterator[None]:
    """Where a call is being looked at already: what it calls itself is not one more attention."""
    _local.depth = getattr(_local, "depth", 0) + 1
    try:
        yield
    finally:
        _local.depth -= 1


def is_taken() -> bool:
    """Whether this runs inside a call that is being looked at already."""
    return getattr(_local, "depth", 0) > 0
