"""What stands behind the question mark of an address, checked."""

from __future__ import annotations

import re
from typing import Literal
from urllib.parse import parse_qs

from headwise.look.serving.reply import Refusal
from headwise.maps.pooling import How
from headwise.messages import say


class Query:
    """What stands behind the question mark, checked."""

    def __init__(self, text: str) -> None:
        self.given = {name: values[-1] for name, values in parse_qs(text).items()}

    def number(self, name: str, default: int, low: int = 0, high: int = 1 << 31) -> int:
        """An integer from low to high."""
        written = self.given.get(name, str(default))
        if not re.fullmatch(r"\d{1,10}", written) or not low <= int(written) <= high:
            said = say(
                "{name}={written!r} is no number from {low} to {high}",
                name=name,
                written=written[:40],
                low=low,
                high=high,
            )
            raise Refusal(400, said)
        return int(written)

    def how(self) -> How:
        """How cells are pooled."""
        how: Literal["mean", "max"] = "mean"
        if self.given.get("how", how) == "max":
            how = "max"
        elif self.given.get("how", how) != "mean":
            given = self.given["how"][:40]
            raise Refusal(400, say("how={how!r}; cells hold the mean or the max", how=given))
        return how

    def range(self, axis: str, length: int) -> slice:
        """The positions from `axis_start` to `axis_stop`, all of them unless told."""
        start = self.number(f"{axis}_start", 0, 0, length)
        stop = self.number(f"{axis}_stop", length, start, length)
        return slice(start, stop)
