"""What an experiment can be asked: whole numbers within bounds, and choices of a word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.messages import Sentence, say


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
            raise ValueError(
                say(
                    "{name}={text!r} is no whole number; {allowed}",
                    name=name,
                    text=text,
                    allowed=self.allowed(),
                )
            ) from None
        if not self.least <= number <= self.most or (self.doubling and number & (number - 1)):
            raise ValueError(
                say(
                    "{name}={number} is out of bounds; {allowed}",
                    name=name,
                    number=number,
                    allowed=self.allowed(),
                )
            )
        return number

    def allowed(self) -> Sentence:
        """What would work, in words."""
        if self.doubling:
            return say(
                "powers of two from {least} to {most} work", least=self.least, most=self.most
            )
        return say("whole numbers from {least} to {most} work", least=self.least, most=self.most)


@dataclass(frozen=True)
class Choice:
    """One word of a few."""

    default: str
    options: tuple[str, ...]

    def read(self, name: str, text: str) -> str:
        """The word, if it is one of them; ValueError names them all."""
        if text not in self.options:
            raise ValueError(
                say(
                    "{name}={text!r} is no choice; {allowed}",
                    name=name,
                    text=text,
                    allowed=self.allowed(),
                )
            )
        return text

    def allowed(self) -> Sentence:
        """What would work, in words."""
        return say("{options} work", options=", ".join(self.options))


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
        there = ", ".join(settings)
        raise ValueError(
            say("there is no setting {name!r}; there are {there}", name=unknown[0], there=there)
        )
    return {
        name: setting.read(name, asked[name]) if name in asked else setting.default
        for name, setting in settings.items()
    }
