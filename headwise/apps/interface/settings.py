"""The settings of a form on a page: whole numbers with bounds, and choices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headwise.messages import Sentence, say


@dataclass(frozen=True)
class Whole:
    """A whole number from `least` to `most`; only powers of two if `doubling`."""

    default: int
    least: int
    most: int
    doubling: bool = False

    def parse(self, name: str, text: str) -> int:
        """Parse a number; ValueError names the allowed ones."""
        try:
            number = int(text)
        except ValueError:
            said = say("{name}={text!r} is not a whole number", name=name, text=text)
            raise ValueError(self.instead(said)) from None
        if not self.least <= number <= self.most or (self.doubling and number & (number - 1)):
            said = say("{name}={number} is out of bounds", name=name, number=number)
            raise ValueError(self.instead(said))
        return number

    def instead(self, wrong: Sentence) -> Sentence:
        """The error, and after it the allowed numbers."""
        if self.doubling:
            return say(
                "{wrong}; use a power of two from {least} to {most}",
                wrong=wrong, least=self.least, most=self.most,
            )  # fmt: skip
        return say(
            "{wrong}; use a whole number from {least} to {most}",
            wrong=wrong, least=self.least, most=self.most,
        )  # fmt: skip


@dataclass(frozen=True)
class Choice:
    """One word of a few."""

    default: str
    options: tuple[str, ...]

    def parse(self, name: str, text: str) -> str:
        """The word, if it is one of the options; ValueError names them all."""
        if text not in self.options:
            said = say(
                "{name}={text!r} is not one of the options; use {options}",
                name=name, text=text, options=", ".join(self.options),
            )  # fmt: skip
            raise ValueError(said)
        return text


Setting = Whole | Choice


def read_settings(settings: Mapping[str, Setting], asked: Mapping[str, str]) -> dict[str, Any]:
    """The value of every setting: what was asked, else the default; ValueError for any other name.

    >>> read_settings({"width": Whole(64, 1, 1024), "seed": Whole(0, 0, 999)}, {"width": "16"})
    {'width': 16, 'seed': 0}
    >>> read_settings({"width": Whole(64, 1, 1024)}, {"width": "many"})
    Traceback (most recent call last):
    ValueError: width='many' is not a whole number; use a whole number from 1 to 1024
    """
    unknown = [name for name in asked if name not in settings]
    if unknown:
        there = ", ".join(settings)
        raise ValueError(
            say("there is no setting {name!r}; there are {there}", name=unknown[0], there=there)
        )
    return {
        name: setting.parse(name, asked[name]) if name in asked else setting.default
        for name, setting in settings.items()
    }
