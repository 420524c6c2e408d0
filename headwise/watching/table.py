"""A small table with one row per head: for people, notebooks and programs."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # optional packages
    from pandas import DataFrame  # type: ignore[import-untyped]
    from rich.table import Table as RichTable

Value = int | float | str

MOST_ROWS = 60
"""A longer table is shown by its first and last rows."""


class Table:
    """Rows of named values, every row with the same names; it works without pandas.

    `columns` names them where there may be no rows; `note` is shown below.

    >>> table = Table([{"layer": 0, "head": 1, "entropy_mean": 2.5},
    ...                {"layer": 1, "head": 0, "entropy_mean": 0.5}])
    >>> table["entropy_mean"]
    [2.5, 0.5]
    >>> table.sort("entropy_mean")[0]
    {'layer': 1, 'head': 0, 'entropy_mean': 0.5}
    >>> table
    layer  head  entropy_mean
        0     1           2.5
        1     0           0.5
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Value]],
        columns: Sequence[str] | None = None,
        note: str | None = None,
    ) -> None:
        self._rows = [dict(row) for row in rows]
        self._columns = list(self._rows[0]) if self._rows else list(columns or ())
        self.note = note

    @property
    def columns(self) -> list[str]:
        """The names, in order."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return iter(self._rows)

    def __getitem__(self, wanted: str | int | slice) -> Any:
        """A column by its name, a row by its number, a table of some rows by a slice."""
        if isinstance(wanted, int):
            return self._rows[wanted]
        if isinstance(wanted, slice):
            return Table(self._rows[wanted], self._columns, self.note)
        self._check(wanted, KeyError)
        return [row[wanted] for row in self._rows]

    def sort(self, column: str, descending: bool = False) -> Table:
        """The rows in the order of a column, NaN last; ValueError if there is no such column."""
        self._check(column)
        last = -math.inf if descending else math.inf
        keys = [last if isinstance(x, float) and math.isnan(x) else x for x in self[column]]
        order = sorted(range(len(self)), key=lambda i: keys[i], reverse=descending)
        return Table([self._rows[i] for i in order], self._columns, self.note)

    def where(self, **values: Value) -> Table:
        """The rows that have these values, such as where(layer=3); ValueError as in `sort`."""
        for column in values:
            self._check(column)
        kept = (row for row in self._rows if all(row[k] == v for k, v in values.items()))
        return Table(list(kept), self._columns, self.note)

    def to_pandas(self) -> DataFrame:
        """The same as a DataFrame."""
        import pandas

        return pandas.DataFrame(self._rows)

    def __repr__(self) -> str:
        if not self._columns:
            return "(an empty table)"
        lines, footer = self._cells()
        lines = [self._columns, *lines]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join([*("  ".join(map(str.rjust, line, widths)) for line in lines), *footer])

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable

        lines, footer = self._cells()
        table = RichTable(box=None, header_style="bold", caption="\n".join(footer))
        for name in self._columns:
            table.add_column(name, justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*line)
        return table

    def _repr_html_(self) -> str:
        def line(tag: str, values: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in values) + "</tr>"

        lines, footer = self._cells()
        head, body = line("th", self._columns), "".join(line("td", values) for values in lines)
        rest = "".join(f"<p>{html.escape(note)}</p>" for note in footer)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{rest}"

    def _cells(self) -> tuple[list[list[str]], list[str]]:
        """The rows that are shown, as text, and the lines below them."""
        hidden, half = len(self) - MOST_ROWS, MOST_ROWS // 2
        rows = self._rows if hidden <= 0 else self._rows[:half] + self._rows[-half:]
        footer = [f"({hidden} rows in the middle not shown)"] if hidden > 0 else []
        footer += [] if self.note is None else [self.note]
        return [[_short(value) for value in row.values()] for row in rows], footer

    def _check(self, column: object, error: type[Exception] = ValueError) -> None:
        if column not in self._columns:
            there = ", ".join(self._columns)
            there = f"there are {there}" if there else "the table is empty"
            raise error(f"there is no column {column!r}; {there}")


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
