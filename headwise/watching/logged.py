"""Numbers of a training that are not about heads: its loss and whatever else a user logs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

MOST = 100_000
"""Steps that are kept of each name; the oldest are dropped beyond that."""

Course = tuple[list[int], list[float]]
"""Steps, and a number at each of them."""


class LoggedNumbers:
    """Numbers by name and step. A tensor is read when somebody asks, so that logging never waits.

    >>> logged = LoggedNumbers()
    >>> logged.add(3, {"loss": 2.5})
    >>> logged.courses()
    {'loss': ([3], [2.5])}
    """

    def __init__(self) -> None:
        self._read: dict[str, dict[int, float]] = {}
        self._waiting: list[tuple[int, str, float | Tensor]] = []

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the numbers of a step; ValueError for anything that is not one number."""
        for name, value in values.items():
            self._waiting.append((step, name, _one_number(name, value)))

    def take(self) -> list[tuple[int, str, float]]:
        """Read what waits: the step, name and number of everything added since the last time."""
        found = [(step, name, float(value)) for step, name, value in self._waiting]
        self._waiting = []
        for step, name, value in found:
            course = self._read.setdefault(name, {})
            course[step] = value
            while len(course) > MOST:
                del course[next(iter(course))]
        return found

    def courses(self) -> dict[str, Course]:
        """Each name's steps and numbers."""
        self.take()
        return {name: (list(found), list(found.values())) for name, found in self._read.items()}

    def restore(self, courses: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Take the courses of a state in place of what is known."""
        self._waiting = []
        self._read = {
            name: {int(step): float(value) for step, value in zip(*course, strict=True)}
            for name, course in courses.items()
        }


def _one_number(name: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().clone()
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"watch.log({name}={value!r:.60}) is not one number; pass a number or a tensor of one "
            "element, such as loss.mean()"
        ) from error
