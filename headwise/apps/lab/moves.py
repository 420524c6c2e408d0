"""What a reader may move: recorded figures cut down to a part, and judged by the claim's own rule.

A claim fixes the sizes at which it is tested. Where its figures are tables of rows, one per size,
width or seed, a part of the rows is an experiment with other sizes that has already run: the rule
judges it, and the reader sees on which of the choices a verdict rests.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from headwise.messages import Sentence

Value = int | float | str
Figures = Mapping[str, Any]
Judged = TypeVar("Judged")
ALL = "all"
"""The position of an "only" that keeps every row."""


@dataclass(frozen=True)
class Move:
    """A column of tables of figures by which rows are left out.

    `how` says which rows stay: those up to a value, those from it on, those that have it. Without a
    `column` the rows count from one, and so do seeds. The rule needs rows of `needs` values.
    """

    name: str
    label: Sentence
    column: str = ""
    tables: tuple[str, ...] = ("rows",)
    how: Literal["up to", "from", "only"] = "up to"
    needs: int = 1

    def value_of(self, number: int, row: Any) -> Value | None:
        """The value of a row, which is the `number`-th of its table."""
        if not self.column:
            return number
        found: Value | None = row.get(self.column)
        return found + 1 if self.column == "seed" and isinstance(found, int) else found

    def stops(self, figures: Figures) -> list[Value]:
        """The positions to choose from; one keeps every row, the last or, for "from", the first."""
        rows = (pair for table in self.tables for pair in enumerate(figures.get(table, ()), 1))
        values = dict.fromkeys(
            value for number, row in rows if (value := self.value_of(number, row)) is not None
        )
        if self.how == "only":
            return [*values, ALL] if len(values) > 1 else []
        ordered = sorted(values)
        cut = ordered[self.needs - 1 :]
        return cut if self.how == "up to" else ordered[: len(cut)]

    def keeps(self, value: Value | None, stop: Value) -> bool:
        """True if a row of this value stays."""
        if value is None or stop == ALL:
            return True
        if self.how == "only":
            return value == stop
        assert not isinstance(value, str) and not isinstance(stop, str)
        return value <= stop if self.how == "up to" else value >= stop

    def whole(self, stops: Sequence[Value]) -> Value:
        """The position at which no row is left out."""
        return stops[0] if self.how == "from" else stops[-1]


SEEDS = Move("seeds", Sentence("seeds", "种子数"), "seed", ("rows", "runs"))
"""How many runs of each model count."""


def settings(moves: Sequence[Move], figures: Figures) -> dict[str, dict[str, Any]]:
    """The moves that these figures allow, with their positions and where they stand."""
    found = {}
    for move in moves:
        stops = move.stops(figures)
        if len(stops) > 1:
            whole = move.whole(stops)
            found[move.name] = {
                "label": move.label, "how": move.how, "stops": stops, "default": whole,
            }  # fmt: skip
    return found


def moved(
    moves: Sequence[Move], figures: Figures, positions: Mapping[str, Value]
) -> dict[str, Any]:
    """The figures without the rows that the positions leave out."""
    left = dict(figures)
    at = [move for move in moves if move.name in positions]
    for table in {table for move in at for table in move.tables if table in figures}:
        left[table] = [
            row
            for number, row in enumerate(figures[table], 1)
            if all(
                move.keeps(move.value_of(number, row), positions[move.name])
                for move in at
                if table in move.tables
            )
        ]
    return left


def grid(
    moves: Sequence[Move], rule: Callable[[Figures], Judged], figures: Figures
) -> Iterator[tuple[dict[str, Value], Judged | None]]:
    """Every position in the order of the moves, with what the rule says of the figures there.

    None where so little is left that the rule can't judge it.
    """
    there = settings(moves, figures)
    for stops in itertools.product(*(each["stops"] for each in there.values())):
        positions = dict(zip(there, stops, strict=True))
        try:
            yield positions, rule(moved(moves, figures, positions))
        except (ArithmeticError, LookupError, StopIteration, ValueError):
            yield positions, None
