"""Modules whose attention could not be read: named, reported once, and never in the model's way."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headwise.watching.recorder.board import Board, Slot


@dataclass
class UnreadModules:
    """The modules that a watch could not read, and why; a strict one raises instead."""

    strict: bool
    asked_for: Callable[[str], bool]  # by the watch's options
    reasons: dict[str, str] = field(default_factory=dict)
    compiled: dict[str, tuple[Slot, str]] = field(default_factory=dict)
    """Where compiled code counts calls that can't be read, by module, and why they can't."""
    _reported: int = 0

    def reading(self, name: str, how: str = "") -> Reading:
        """Read and observe a call of this module: what goes wrong never reaches the model.

        `how` begins the reason that is reported then. Nothing inside is heard as a call of the
        model's: a mode that listens would take half of the time.
        """
        return Reading(self, name, how)

    def fail(self, name: str, error: Exception, how: str = "") -> None:
        """Note that this module's attention could not be read; raise ValueError if strict."""
        if self.asked_for(name):
            self.leave_out(name, error, how)

    def leave_out(self, name: str, error: Exception, how: str = "") -> None:
        """The same for a module that is known to be asked for."""
        reason = how + (str(error) or type(error).__name__)
        if self.strict:
            raise ValueError(f"{name or 'the model'} can't be watched: {reason}") from error
        self.reasons.setdefault(name, reason)

    def look(self, boards: Mapping[Board, Tensor]) -> None:
        """Note the modules whose unread calls compiled code has counted on these boards."""
        for name, (slot, reason) in self.compiled.items():
            known = name in self.reasons or slot.board not in boards
            if not known and boards[slot.board][slot.number, 0, 0] > 0:
                self.fail(name, ValueError(reason))

    def warn(self) -> None:
        """Warn of the modules that could not be read since the last warning."""
        new = list(self.reasons.items())[self._reported :]
        if new:
            self._reported = len(self.reasons)
            warnings.warn(
                f"hw.watch could not read the attention of {len(new)} "
                f"module{'s' if len(new) > 1 else ''}, and leaves them out (seen.unread; "
                f"strict=True raises instead): {described(dict(new))}",
                stacklevel=2,
            )


class Reading:
    """The context in which a call is read: a class, because every call enters one."""

    def __init__(self, unread: UnreadModules, name: str, how: str) -> None:
        self.unread, self.name, self.how = unread, name, how
        self.contexts = torch.no_grad(), torch._C.DisableTorchFunction()

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, kind: object, error: BaseException | None, trace: Any) -> bool:
        for context in reversed(self.contexts):
            context.__exit__(None, None, None)
        if not isinstance(error, Exception):
            return False
        self.unread.fail(self.name, error, self.how)
        return True


def described(reasons: dict[str, str]) -> str:
    """The first few modules with their reasons.

    >>> described({"a": "no values", "": "no heads"})
    'a: no values; the model: no heads'
    """
    first = [f"{name or 'the model'}: {reason}" for name, reason in list(reasons.items())[:3]]
    more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
    return "; ".join([*first, *more])
