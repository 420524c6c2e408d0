"""Work in a thread of its own: one piece at a time, which can be told to stop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread


class BusyError(Exception):
    """Raised while other work is being done, or if there is nobody who could do it."""


class StoppedError(BaseException):
    """Raised inside background work that was told to stop; `except Exception` lets it pass."""


@dataclass
class Background:
    """A thread for one piece of work; work that is told to stop ends at its next `check`."""

    name: str
    _stopping: Event = field(default_factory=Event)
    _thread: Thread | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Do this work in the background; the work before it must have ended."""
        self._stopping.clear()
        self._thread = Thread(target=self._do, args=(work,), name=self.name, daemon=True)
        self._thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        with suppress(StoppedError):
            work()

    def check(self) -> None:
        """Raise StoppedError if the work was told to stop; the work calls this now and then."""
        if self._stopping.is_set():
            raise StoppedError

    def stop(self) -> None:
        """Tell the work to stop."""
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Wait for the work; True if it ended in this time."""
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()
