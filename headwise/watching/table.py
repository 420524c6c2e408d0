"""A small table with one row per head: for people, notebooks, programs and loggers.

For TensorBoard and Weights & Biases, `scalars` gives plain dictionaries: `writer.add_scalar(name,
value, step)` for each, or `wandb.log(scalars, step=step)`. Names are the same for all rows and for
sampled ones, whose maxima are lower bounds.
"""

from __future__ import annotations

import difflib
import html
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headwise.core.spans import SPAN_PREFIX
from headwise.maps.sparse_losses import ERROR, KEPT, NEEDED

if TYPE_CHECKING:  # optional packages
    from pandas import DataFrame  # type: ignore[import-untyped]
    from rich.table import Table as RichTable

Value = int | float | str

MOST_ROWS = 60
"""A longer table is shown by its first and last rows."""


FIRST = (
    "layer",
    "head",
    "type",
    "entropy_mean",
    "effective_keys_mean",
    "distance_mean",
    "max_logit_max",
    "sink_mass_mean",
    "top_prob_mean",
    "previous_mass_mean",
    "self_mass_mean",
)
"""The columns that are printed first where a terminal has no room for all."""


class LaterRows(Sequence[Mapping[str, Value]]):
    """Rows that are made when somebody asks for them; their number is known before."""


class Table:
    """Rows of named values, every row with the same names; it works without pandas.

    `columns` names them where there may be no rows; `note` is shown below. `blind` has the (layer,
    head) of heads that saw no key: their figures are NaN, and that is no fault.

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
        blind: frozenset[tuple[int, int]] = frozenset(),
    ) -> None:
        later = isinstance(rows, LaterRows)
        self._given: Sequence[Mapping[str, Value]] = rows if later else ()
        self._kept = None if later else [dict(row) for row in rows]
        self._named = list(columns or ())
        self.note, self.blind = note, blind

    @property
    def _rows(self) -> list[dict[str, Value]]:
        if self._kept is None:
            self._kept, self._given = [dict(row) for row in self._given], ()
        return self._kept

    @property
    def _columns(self) -> list[str]:
        return list(self._rows[0]) if len(self) else self._named

    @property
    def columns(self) -> list[str]:
        """The names, in order."""
        return list(self._columns)

    def __len__(self) -> int:
        return len(self._given if self._kept is None else self._kept)

    def __iter__(self) -> Iterator[dict[str, Value]]:
        return iter(self._rows)

    def __getitem__(self, wanted: str | int | slice) -> Any:
        """A column by its name, a row by its number, a table of some rows by a slice."""
        if isinstance(wanted, int):
            return self._rows[wanted]
        if isinstance(wanted, slice):
            return Table(self._rows[wanted], self._columns, self.note, self.blind)
        self._check(wanted, KeyError)
        return [row[wanted] for row in self._rows]

    def sort(self, column: str, descending: bool = False) -> Table:
        """The rows in the order of a column, NaN last; ValueError if there is no such column."""
        self._check(column)
        last = -math.inf if descending else math.inf
        keys = [last if isinstance(x, float) and math.isnan(x) else x for x in self[column]]
        order = sorted(range(len(self)), key=lambda i: keys[i], reverse=descending)
        return Table([self._rows[i] for i in order], self._columns, self.note, self.blind)

    def where(self, **values: Value) -> Table:
        """The rows that have these values, such as where(layer=3); ValueError as in `sort`."""
        for column in values:
            self._check(column)
        kept = (row for row in self._rows if all(row[k] == v for k, v in values.items()))
        return Table(list(kept), self._columns, self.note, self.blind)

    def to_pandas(self) -> DataFrame:
        """The same as a DataFrame."""
        import pandas

        return pandas.DataFrame(self._rows)

    def text(self, width: int | None = None) -> str:
        """The table as text: in a terminal of this width the most telling columns, or all.

        >>> table = Table([{"layer": 0, "head": 1, "lse_mean": 3.5, "entropy_mean": 2.5}])
        >>> print(table.text(width=24))
        layer  head  entropy_mean
            0     1           2.5
        (1 more column, such as lse_mean: print(table.text()) shows all)
        """
        if not self._columns:
            return "(an empty table)"
        rows, footer = self._cells()
        lines = [self._columns, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        shown = self._fitting(widths, width)
        hidden = [name for n, name in enumerate(self._columns) if n not in shown]
        printed = ["  ".join(line[n].rjust(widths[n]) for n in shown) for line in lines]
        return "\n".join([*printed, *_hidden(hidden), *footer])

    def _fitting(self, widths: Sequence[int], width: int | None) -> list[int]:
        """The numbers of the columns that fit a width together, in order; at least three."""
        order = [self._columns.index(name) for name in FIRST if name in self._columns]
        order += [n for n in range(len(widths)) if n not in order]
        left = math.inf if width is None else width + 2
        shown: list[int] = []
        if sum(widths) + 2 * len(widths) <= left:
            return list(range(len(widths)))
        for n in order:
            left -= widths[n] + 2
            if left < 0 and len(shown) >= 3:
                break
            shown.append(n)
        return sorted(shown)

    def __repr__(self) -> str:
        return self.text(shutil.get_terminal_size((100, 24)).columns)

    def __rich__(self) -> RichTable:
        from rich.table import Table as RichTable

        lines, footer = self._cells()
        widths = [max(map(len, column)) for column in zip(self._columns, *lines, strict=True)]
        shown = self._fitting(widths, shutil.get_terminal_size((100, 24)).columns)
        footer = [*_hidden([x for n, x in enumerate(self._columns) if n not in shown]), *footer]
        table = RichTable(box=None, header_style="bold", caption="\n".join(footer))
        for n in shown:
            table.add_column(self._columns[n], justify="right", no_wrap=True)
        for line in lines:
            table.add_row(*(line[n] for n in shown))
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
        rest = f"({hidden} {'row' if hidden == 1 else 'rows'} in the middle not shown)"
        footer = [rest] if hidden > 0 else []
        footer += [] if self.note is None else [self.note]
        return [[_short(value) for value in row.values()] for row in rows], footer

    def _check(self, column: object, error: type[Exception] = ValueError) -> None:
        if column not in self._columns:
            there = (
                f"there are {', '.join(self._columns)}" if self._columns else "the table is empty"
            )
            meant = self._meant(str(column))
            raise error(f"there is no column {column!r}; {meant or there}{meant and f' ({there})'}")

    def _meant(self, wanted: str) -> str:
        """The columns that somebody who wrote this name may have meant."""
        begin = [name for name in self._columns if name.startswith(f"{wanted}_")]
        near = begin or difflib.get_close_matches(wanted, self._columns, 2)
        return f"did you mean {' or '.join(near)}?" if near else ""


def _hidden(names: Sequence[str]) -> list[str]:
    """A line that names the columns a terminal has no room for."""
    if not names:
        return []
    many = f"{len(names)} more column{'s' if len(names) > 1 else ''}"
    return [f"({many}, such as {names[-1]}: print(table.text()) shows all)"]


def _short(value: Value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


SCALARS = (
    "entropy_mean",
    "max_logit_max",
    "logit_var_mean",
    "sink_mass_mean",
    "output_norm_mean",
)
"""The figures that are written by default, beside those of spans: few enough for every layer."""

PLACES = ("layer", "name", "kind", "head")
"""The columns that tell a row's head."""

_BOUNDS = ("_lower_bound", "_upper_bound")


def figure_names(table: Table) -> list[str]:
    """The columns that are figures."""
    return [name for name in table.columns if name not in PLACES]


def scalars(
    table: Table,
    figures: Iterable[str] | None = None,
    prefix: str = "attn",
    heads: bool = False,
) -> dict[str, float]:
    """One number for each layer and figure, and one for the whole model; with `heads` one per head.

    Over heads a figure is reduced as its name ends: the mean of means, the max of maxima, the min
    of minima. A maximum of sampled rows, which is a lower bound, has the name of the exact one.

    >>> table = Table([{"layer": 3, "name": "h.3", "kind": "self", "head": 0, "entropy_mean": 2.0},
    ...                {"layer": 3, "name": "h.3", "kind": "self", "head": 1, "entropy_mean": 1.0}])
    >>> scalars(table)
    {'attn/layer_03/entropy_mean': 1.5, 'attn/global/entropy_mean': 1.5}
    >>> list(scalars(table, heads=True))[:2]
    ['attn/layer_03/head_00/entropy_mean', 'attn/layer_03/head_01/entropy_mean']
    """
    found = {
        **per_head(table, figures, prefix),
        **_by_name(table, figures, lambda _, name: f"{prefix}/global/{name}"),
    }
    reduced = {name: _reduction(name)(values) for name, values in found.items() if values}
    if not heads:
        return reduced

    def of_head(row: Mapping[str, Any], name: str) -> str:
        return f"{prefix}/layer_{row['layer']:02d}/head_{row['head']:02d}/{name}"

    each = _by_name(table, figures, of_head).items()
    return {**{name: values[0] for name, values in each if values}, **reduced}


def per_head(
    table: Table, figures: Iterable[str] | None = None, prefix: str = "attn"
) -> dict[str, list[float]]:
    """The heads' figures of each layer in a list, for histograms; NaN is left out.

    >>> table = Table([{"layer": 0, "name": "h", "kind": "self", "head": 0, "entropy_mean": 2.0},
    ...                {"layer": 0, "name": "h", "kind": "self", "head": 1, "entropy_mean": 1.0}])
    >>> per_head(table)
    {'attn/layer_00/entropy_mean': [2.0, 1.0]}
    """
    return _by_name(table, figures, lambda row, name: f"{prefix}/layer_{row['layer']:02d}/{name}")


def _by_name(
    table: Table, figures: Iterable[str] | None, name: Callable[[Mapping[str, Any], str], str]
) -> dict[str, list[float]]:
    """The numbers in the table by the name that each row's figure gets; NaN is left out."""
    found: dict[str, list[float]] = {}
    for figure in wanted(table, figures):
        for row in table:
            values, value = found.setdefault(name(row, _exact(figure)), []), row[figure]
            if isinstance(value, int | float) and not math.isnan(value):
                values.append(float(value))
    return found


def wanted(table: Table, figures: Iterable[str] | None) -> list[str]:
    """The names in the table of the figures asked for; ValueError if one is not there."""
    there = figure_names(table)
    if figures is None:
        begins = (SPAN_PREFIX, NEEDED, KEPT, ERROR)
        return [name for name in there if _exact(name) in SCALARS or name.startswith(begins)]
    asked = [figures] if isinstance(figures, str) else list(figures)
    found = [next((x for x in there if name in (x, _exact(x))), None) for name in asked]
    for name, known in zip(asked, found, strict=True):
        if known is None:
            raise ValueError(f"there is no figure {name!r}; there are {', '.join(there)}")
    return [name for name in found if name is not None]


def figure(table: Table, name: str) -> list[float]:
    """A column, of all rows or of sampled ones; empty if the table has neither.

    >>> figure(Table([{"head": 0, "max_logit_max_lower_bound": 7.5}]), "max_logit_max")
    [7.5]
    """
    column = next((x for x in table.columns if _exact(x) == name), None)
    return [] if column is None else [float(x) for x in table[column]]


def _exact(name: str) -> str:
    """A figure's name without the suffix of sampled rows."""
    for bound in _BOUNDS:
        name = name.removesuffix(bound)
    return name


def _reduction(name: str) -> Callable[[Sequence[float]], float]:
    exact = _exact(name)
    if exact.endswith("_max"):
        return max
    return min if exact.endswith("_min") else lambda values: sum(values) / len(values)
