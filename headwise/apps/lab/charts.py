"""Curves, tables and maps that a claim shows: data that the page and the SVG are drawn from."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.messages import Sentence, both

YES, NO = both("yes", "是"), both("no", "否")
Cell = str | int | float | bool | None  # a Sentence is a str


@dataclass(frozen=True)
class Series:
    """One curve: y against x, with an interval around each point if `low` and `high` are given."""

    label: Sentence
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Chart:
    """Curves over one pair of axes."""

    title: Sentence
    x: Sentence
    y: Sentence
    series: tuple[Series, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Listing:
    """A table: headings, and rows of numbers and texts."""

    title: Sentence
    headings: tuple[Sentence, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Bars:
    """A value for each of some names, of one group or of several, with intervals if there are."""

    title: Sentence
    x: Sentence
    names: tuple[Sentence, ...]
    groups: tuple[Series, ...]  # of each the y, low and high; its x counts the names
    stacked: bool = False


@dataclass(frozen=True)
class WeightMap:
    """The weights of one head: rows are queries, columns are keys."""

    title: Sentence
    rows: Sequence[str]
    columns: Sequence[str]
    weights: Sequence[Sequence[float]]


def series(
    rows: Sequence[Mapping[str, Any]], x: str, *lines: tuple[str, Sentence]
) -> tuple[Series, ...]:
    """Curves of rows of figures: for each name its values against those of `x`.

    Entries `<name>_low` and `<name>_high` of the rows become the curve's interval.

    >>> rows = [{"d": 4, "top": 0.5}, {"d": 8, "top": 0.7}]
    >>> series(rows, "d", ("top", Sentence("largest weight")))[0].y
    [0.5, 0.7]
    """
    return tuple(
        Series(
            label,
            [row[x] for row in rows],
            [row[name] for row in rows],
            [row[f"{name}_low"] for row in rows] if f"{name}_low" in rows[0] else None,
            [row[f"{name}_high"] for row in rows] if f"{name}_high" in rows[0] else None,
        )
        for name, label in lines
    )


def bars(
    title: Sentence,
    x: Sentence,
    names: Sequence[Sentence],
    *groups: tuple[Sentence, Sequence[float]],
) -> Bars:
    """Bars of these groups, each with a value per name.

    >>> found = bars(Sentence("a"), Sentence("b"), [Sentence("c")], (Sentence("d"), [0.5]))
    >>> cells(found)
    (['b', 'd'], [['c', '0.5']])
    """
    places = list(range(len(names)))
    return Bars(
        title, x, tuple(names), tuple(Series(label, places, values) for label, values in groups)
    )


Shown = Chart | Listing | Bars | WeightMap


def text(value: Cell | Sentence, chinese: bool = False) -> str:
    """A cell as people read it: four significant digits, thousands apart.

    >>> text(0.123456), text(1234567), text(2.0e-9), text(None), text(True)
    ('0.1235', '1,234,567', '2e-09', '–', 'yes')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        value = YES if value else NO
    if isinstance(value, Sentence):
        return value.zh if chinese else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"
    return value


def cells(shown: Shown, chinese: bool = False) -> tuple[list[str], list[list[str]]]:
    """The headings and rows of a chart, listing or map written as a table of texts.

    >>> cells(WeightMap(Sentence("a head"), ["q"], ["k"], [[1.0]]))
    (['', 'k'], [['q', '1']])
    """
    rows: list[list[Cell]]
    if isinstance(shown, Listing):
        headings = [text(heading, chinese) for heading in shown.headings]
        rows = [list(row) for row in shown.rows]
    elif isinstance(shown, Chart):
        headings = [text(name, chinese) for name in (shown.x, *(x.label for x in shown.series))]
        points = [dict(zip(line.x, _without_dust(line.y), strict=True)) for line in shown.series]
        places = sorted({x for line in points for x in line})
        rows = [[x, *(line.get(x) for line in points)] for x in places]
    elif isinstance(shown, Bars):
        headings = [text(name, chinese) for name in (shown.x, *(x.label for x in shown.groups))]
        rows = [[name, *(x.y[at] for x in shown.groups)] for at, name in enumerate(shown.names)]
    else:
        headings = ["", *shown.columns]
        rows = [[name, *row] for name, row in zip(shown.rows, shown.weights, strict=True)]
    return headings, [[text(cell, chinese) for cell in row] for row in rows]


def _without_dust(values: Sequence[float]) -> list[float]:
    """Zeros instead of what rounding leaves of them, 1e-32 beside 0.5."""
    dust = max((abs(value) for value in values), default=0.0) * sys.float_info.epsilon
    return [0.0 if abs(value) < dust else value for value in values]
