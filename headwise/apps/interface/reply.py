"""A request's query, checked, and its reply: an answer, or a refusal with a hint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from headwise.maps import How
from headwise.messages import halves, said_by, say, with_chinese


@dataclass(frozen=True)
class Answer:
    """A body with its media type, headers and status."""

    body: bytes
    media: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 200


class Refusal(Exception):  # noqa: N818 - an answer like any other, with another status
    """The reason why a request has no answer, and what to ask instead."""

    def __init__(self, status: int, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint

    def answer(self) -> Answer:
        """The refusal as JSON, in both languages."""
        return as_json(with_chinese({"error": self.error, "hint": self.hint}), self.status)


def as_json(value: object, status: int = 200) -> Answer:
    """A JSON answer; infinities and NaN must have become None before (`number`)."""
    body = json.dumps(value, ensure_ascii=False, allow_nan=False).encode(errors="replace")
    return Answer(body, status=status)


def number(value: float) -> float | None:
    """The value, or None if JSON has no way to write it."""
    return value if math.isfinite(value) else None


@contextmanager
def refused(status: int = 400) -> Iterator[None]:
    """Turn an error of the form "problem; remedy" into a refusal with a hint."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Refusal(status, *halves(said_by(error))) from error


class Query:
    """The part of an address after the question mark; a bad value is a `Refusal`."""

    def __init__(self, text: str, check: Callable[[], None] = lambda: None) -> None:
        self.check = check  # raises StoppedError once nobody waits for the answer
        self.given = {name: values[-1] for name, values in parse_qs(text).items()}

    def number(self, name: str, default: int, low: int = 0, high: int = 1 << 31) -> int:
        """An integer from low to high."""
        written = self.given.get(name, str(default))
        if not re.fullmatch(r"\d{1,10}", written) or not low <= int(written) <= high:
            said = say(
                "{name}={written!r} is not a number from {low} to {high}",
                name=name, written=written[:40], low=low, high=high,
            )  # fmt: skip
            raise Refusal(400, said)
        return int(written)

    def how(self) -> How:
        """The pooling of cells: mean or max."""
        how = self.given.get("how", "mean")
        if how == "mean":
            return "mean"
        if how == "max":
            return "max"
        raise Refusal(400, say("how={how!r}; use mean or max", how=how[:40]))

    def range(self, axis: str, length: int) -> slice:
        """The positions from `axis_start` to `axis_stop`, by default all of them."""
        start = self.number(f"{axis}_start", 0, 0, length)
        stop = self.number(f"{axis}_stop", length, start, length)
        return slice(start, stop)
