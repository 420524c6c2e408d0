"""Statistics of many rows, reduced to sums and extremes per head in one small tensor."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

EXTREMES = {"max_logit": "max", "entropy": "min", "logit_var": "max", "sink_mass": "max"}
"""The statistics whose largest or smallest value per head is kept beside the mean."""


@dataclass(frozen=True)
class Columns:
    """The columns of reduced statistics, float64 (columns, heads), for these statistics.

    First the number of rows, then one sum per statistic; both grow by adding. Then the largest
    values, those of minima negated; all of them grow by taking the maximum. Calls, steps and
    processes join by these two operations.

    >>> columns = Columns(("max_logit", "entropy", "top_prob"))
    >>> columns.sums, columns.maxima, columns.minima, columns.count
    (4, (0,), (1,), 6)
    """

    stats: tuple[str, ...]

    @property
    def maxima(self) -> tuple[int, ...]:
        """The places of the statistics whose largest value is kept."""
        return tuple(i for i, name in enumerate(self.stats) if EXTREMES.get(name) == "max")

    @property
    def minima(self) -> tuple[int, ...]:
        """The places of the statistics whose smallest value is kept."""
        return tuple(i for i, name in enumerate(self.stats) if EXTREMES.get(name) == "min")

    @property
    def sums(self) -> int:
        """The number of columns that grow by adding."""
        return 1 + len(self.stats)

    @property
    def count(self) -> int:
        """The number of all columns."""
        return self.sums + len(self.maxima) + len(self.minima)

    def largest(self, name: str) -> int:
        """The column of a statistic's largest value."""
        return self.sums + self.maxima.index(self.stats.index(name))

    def names(self, sampled: bool) -> dict[str, str]:
        """The names of the figures, each with its statistic.

        An extreme of sampled rows is only a bound of the true one, and its name says so.
        """
        found = {}
        for name in self.stats:
            found[f"{name}_mean"] = name
            if name in EXTREMES:
                kind = EXTREMES[name]
                bound = "_upper_bound" if kind == "min" else "_lower_bound"
                found[f"{name}_{kind}{bound if sampled else ''}"] = name
        return found

    @property
    def order(self) -> tuple[int, ...]:
        """The place of each figure, in the order of the names, among `means_and_extremes`."""
        extremes = {place: at for at, place in enumerate((*self.maxima, *self.minima))}
        found: list[int] = []
        for place in range(len(self.stats)):
            found.append(place)
            found += [len(self.stats) + extremes[place]] if place in extremes else []
        return tuple(found)

    def means_and_extremes(self, reduced: Tensor) -> Tensor:
        """The figures (..., figures, heads) of (..., columns, heads): all means, then extremes.

        Those of a head without counted rows are NaN.
        """
        sums, least, rows = self.sums, self.sums + len(self.maxima), reduced[..., :1, :]
        means = reduced[..., 1:sums, :] / rows  # 0 / 0 is NaN
        largest, lowest = reduced[..., sums:least, :], -reduced[..., least : self.count, :]
        extremes = torch.cat((largest, lowest), -2).masked_fill(rows == 0, torch.nan)
        return torch.cat((means, extremes), -2)

    def figures(
        self, reduced: Tensor, sampled: bool, stats: Collection[str] | None = None
    ) -> dict[str, Tensor]:
        """One value per head (..., heads) for each figure of (..., columns, heads).

        `stats` names the statistics that were seen, if not all of them were.
        """
        found = self.means_and_extremes(reduced).unbind(-2)
        named = zip(self.names(sampled).items(), self.order, strict=True)
        return {name: found[at] for (name, stat), at in named if stats is None or stat in stats}


class CallRows(NamedTuple):
    """The statistics of a call's rows, (B, H, N) each, for the columns of its heads."""

    values: Sequence[Tensor | None]  # None adds nothing
    highest: Tensor  # -inf for a row that sees no key
    padding: Tensor | None  # (B, N)
    proof: Tensor | None  # (): how far the call was from its reading, for a board
    maxima: Sequence[int]  # the places among the values of those whose extremes are kept
    minima: Sequence[int]


def reduce_rows(call: CallRows) -> tuple[Tensor, Tensor]:
    """Reduce statistics over the rows that see a key and are not padding.

    Returns the columns that add up, (1 + values, H), and those of which the maximum is taken,
    (maxima + minima, H).
    """
    values, highest, padding, _, maxima, minima = call
    counted = highest != -torch.inf
    if padding is not None:
        counted = counted & ~padding[:, None]
    heads = highest.shape[1]
    rows = counted.sum((0, 2), dtype=torch.float64)
    known = [x for x in values if x is not None]
    if not known or highest.numel() == 0:
        sums = rows.new_zeros(len(values), heads)
        none = rows.new_full((len(maxima) + len(minima), heads), -torch.inf)
        return torch.cat((rows[None], sums)), none
    sums = torch.where(counted, torch.stack(known), 0.0).sum((1, 3), dtype=torch.float64)
    if len(known) < len(values):
        found, none = iter(sums.unbind(0)), rows.new_zeros(heads)
        sums = torch.stack([none if x is None else next(found) for x in values])
    signed = [*(values[i] for i in maxima), *(_negated(values[i]) for i in minima)]
    if not signed:
        return torch.cat((rows[None], sums)), rows.new_empty(0, heads)
    lowest = torch.full_like(highest, -torch.inf)
    extremes = torch.stack([lowest if x is None else x for x in signed])
    extremes = torch.where(counted, extremes, -torch.inf).amax((1, 3)).double()
    return torch.cat((rows[None], sums)), extremes


def _negated(x: Tensor | None) -> Tensor | None:
    return None if x is None else -x
