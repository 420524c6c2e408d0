"""An answer as it travels: a body, what it is, and why there is none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field

from headwise.messages import with_chinese


@dataclass(frozen=True)
class Answer:
    """A body and what it is."""

    body: bytes
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


class Refusal(Exception):  # noqa: N818 - an answer like any other, only not the one hoped for
    """Why a question has no answer, and what to ask instead."""

    def __init__(self, status: int, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint

    def answer(self) -> Answer:
        """The refusal as it travels."""
        return as_json(with_chinese({"error": self.error, "hint": self.hint}), self.status)


def as_json(value: object, status: int = 200) -> Answer:
    """A JSON answer; numbers that JSON does not know must have become None before."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    return Answer(body, status=status)


def number(value: float) -> float | None:
    """A number that JSON knows, or None."""
    return value if math.isfinite(value) else None
