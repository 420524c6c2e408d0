"""A table of heads as plain dictionaries, under names that suit TensorBoard and Weights & Biases.

Use `writer.add_scalar(name, value, step)` for each, or `wandb.log(scalars, step=step)`. Names are
the same for all rows and for sampled ones, whose maxima are lower bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from headwise.core.spans import SPAN_PREFIX
from headwise.watching.recorder.watch_options import SPARSE
from headwise.watching.table import Table

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
    reduced = {
        name: _reduction(name)(values)
        for name, values in {
            **per_head(table, figures, prefix),
            **_over_all(table, figures, prefix),
        }.items()
        if values
    }
    return {**_of_each_head(table, figures, prefix), **reduced} if heads else reduced


def per_head(
    table: Table, figures: Iterable[str] | None = None, prefix: str = "attn"
) -> dict[str, list[float]]:
    """The heads' figures of each layer in a list, for histograms; NaN is left out.

    >>> table = Table([{"layer": 0, "name": "h", "kind": "self", "head": 0, "entropy_mean": 2.0},
    ...                {"layer": 0, "name": "h", "kind": "self", "head": 1, "entropy_mean": 1.0}])
    >>> per_head(table)
    {'attn/layer_00/entropy_mean': [2.0, 1.0]}
    """
    found: dict[str, list[float]] = {}
    for figure in wanted(table, figures):
        for row in table:
            values = found.setdefault(f"{prefix}/layer_{row['layer']:02d}/{_exact(figure)}", [])
            _add(values, row[figure])
    return found


def wanted(table: Table, figures: Iterable[str] | None) -> list[str]:
    """The names in the table of the figures asked for; ValueError if one is not there."""
    there = figure_names(table)
    if figures is None:
        begins = (SPAN_PREFIX, *SPARSE)
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


def _over_all(table: Table, figures: Iterable[str] | None, prefix: str) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in wanted(table, figures):
        values = found.setdefault(f"{prefix}/global/{_exact(name)}", [])
        for value in table[name]:
            _add(values, value)
    return found


def _of_each_head(table: Table, figures: Iterable[str] | None, prefix: str) -> dict[str, float]:
    return {
        f"{prefix}/layer_{row['layer']:02d}/head_{row['head']:02d}/{_exact(name)}": float(value)
        for name in wanted(table, figures)
        for row in table
        if isinstance(value := row[name], int | float) and not math.isnan(value)
    }


def _add(values: list[float], value: object) -> None:
    if isinstance(value, int | float) and not math.isnan(value):
        values.append(float(value))


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
