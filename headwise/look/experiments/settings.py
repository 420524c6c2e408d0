"""What an experiment can be asked: whole numbers within bounds, and choices of a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`; `doubling`: only powers of two."""

    default: int
    least: int
    most: int
    doubling: bool = False

    def read(self, name: str, text: str) -> int:
        """The number that a text says; ValueError names what would work."""
        try:
            number = int(text)
        except ValueError:
            raise ValueError(f"{name}={text!r} is no whole number; {self.allowed()}") from None
        if not self.least <= number <= self.most or (self.doubling and number & (number - 1)):
            raise ValueError(f"{name}={number} is out of bounds; {self.allowed()}")
        return number

    def allowed(self) -> str:
        """What would work, in words."""
        kind = "powers of two" if self.doubling else "whole numbers"
        return f"{kind} from {self.least} to {self.most} work"


@dataclass(frozen=True)
class Choice:
    """One word of a few."""

    default: str
    options: tuple[str, ...]

    def read(self, name: str, text: str) -> str:
        """The word, if it is one of them; ValueError names them all."""
        if text not in self.options:
            raise ValueError(f"{name}={text!r} is no choice; {self.allowed()}")
        return text

    def allowed(self) -> str:
        """What would work, in words."""
        return f"{', '.join(self.options)} work"


Setting = Whole | Choice
SEED = Whole(0, 0, 999)
"""Which random numbers are drawn."""


def read(settings: Mapping[str, Setting], asked: Mapping[str, str]) -> dict[str, Any]:
    """Every setting's value: what was asked, else the default; ValueError for what is neither.

    >>> read({"width": Whole(64, 1, 1024), "seed": SEED}, {"width": "16"})
    {'width': 16, 'seed': 0}
    >>> read({"width": Whole(64, 1, 1024)}, {"width": "many"})
    Traceback (most recent call last):
    ValueError: width='many' is no whole number; whole numbers from 1 to 1024 work
    """
    unknown = [name for name in asked if name not in settings]
    if unknown:
        raise ValueError(f"there is no setting {unknown[0]!r}; there are {', '.join(settings)}")
    return {
        name: setting.read(name, asked[name]) if name in asked else setting.default
        for name, setting in settings.items()
    }
