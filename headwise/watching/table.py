"""A small table with a row a head: for people, notebooks and programs."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]
    from rich.table import Table as RichTable

Value = int | float | str

MOST_ROWS = 60
"""A longer table is shown by its first and last rows."""


class Table:
    """Rows of named values, every row with the same names; without rows they may be given.

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
        self, rows: Sequence[Mapping[str, Value]], columns: Sequence[str] | None = None
    ) -> None:
        self._rows = [dict(row) for row in rows]
        self._columns = list(self._rows[0]) if self._rows else list(columns or ())

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
            return Table(self._rows[wanted], self._columns)
        if wanted not in self._columns:
            raise KeyError(self._lacks(wanted))
        return [row[wanted] for row in self._rows]

    def sort(self, column: str, descending: bool = False) -> Table:
        """The rows in the order of a column, NaN last; ValueError where there is no such column."""
        if column not in self._columns:
            raise ValueError(self._lacks(column))
        last = -math.inf if descending else math.inf
        keys = [last if isinstance(x, float) and math.isnan(x) else x for x in self[column]]
        order = sorted(range(len(self)), key=lambda i: keys[i], reverse=descending)
        return Table([self._rows[i] for i in order], self._columns)

    def where(self, **values: Value) -> Table:
        """The rows that have these values, such as where(layer=3); ValueError as in `sort`."""
        for column in values:
            if column not in self._columns:
                raise ValueError(self._lacks(column))
        kept = (row for row in self._rows if all(row[k] == v for k, v in values.items()))
        return Table(list(kept), self._columns)

    def to_pandas(self) -> DataFrame:
        """The same as a DataFrame."""
        import pandas

        return pandas.DataFrame(self._rows)

    def __repr__(self) -> str:
        if not self._columns:
            return "(an empty table)"
        cells = [
            self.columns,
            *([_short(value) for value in row.values()] for row in self._shown()),
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ("  ".join(map(str.rjust, line, widths)) for line in cells)
        return "\n".join([*lines, *self._left_out()])

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable

        table = RichTable(box=None, header_style="bold", caption="".join(self._left_out()))
        for name in self.columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in self._shown():
            table.add_row(*map(_short, row.values()))
        return table

    def _repr_html_(self) -> str:
        def line(tag: str, values: Sequence[str]) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(x)}</{tag}>" for x in values) + "</tr>"

        body = "".join(line("td", list(map(_short, row.values()))) for row in self._shown())
        rest = "".join(f"<p>{html.escape(said)}</p>" for said in self._left_out())
        head = line("th", self.columns)
        return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{rest}"

    def _shown(self) -> list[dict[str, Value]]:
        half = MOST_ROWS // 2
        few = len(self) <= MOST_ROWS
        return self._rows if few else self._rows[:half] + self._rows[-half:]

    def _lacks(self, column: object) -> str:
        there = f"there are {', '.join(self._columns)}" if self._columns else "the table is empty"
        return f"there is no column {column!r}; {there}"

    def _left_out(self) -> list[str]:
        hidden = len(self) - MOST_ROWS
        return [f"({hidden} rows in the middle not shown)"] if hidden > 0 else []


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
