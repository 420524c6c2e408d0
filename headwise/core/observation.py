"""What a call's heads did: the statistics, and their reduction to a figure a head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from torch import Tensor

from headwise.core.arguments import as_int, is_integer


class Statistic:
    """A statistic of an `Observation`: (B, Hq, N), or (B, Hq, rows) where rows were sampled."""

    def __init__(self, meaning: str) -> None:
        self.__doc__ = meaning

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, seen: None, owner: type) -> Statistic: ...
    @overload
    def __get__(self, seen: Observation, owner: type) -> Tensor: ...
    def __get__(self, seen: Observation | None, owner: type) -> Statistic | Tensor:
        if seen is None:
            return self
        if self.name not in seen.values:
            raise AttributeError(
                f"{self.name} was not observed; this observation has {', '.join(seen.values)}. "
                f"Ask for it with stats=({self.name!r}, ...)"
            )
        return seen.values[self.name]


class Observation:
    """The statistics of one call, a tensor (B, Hq, N) each: those that were asked for.

    Their definitions stand beside them. There s are the logits of a row over the keys that it may
    see, scaled, capped and biased; p = exp(s - lse) are its weights, before dropout; i is the
    query's position in the whole sequence and j a key's.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.zeros(3, 1, 2, 4, 8).unbind(0)
    >>> out, seen = hw.observe(q, k, v, mask=hw.mask.causal())
    >>> seen.effective_keys[0, 0]
    tensor([1., 2., 3., 4.])
    """

    lse = Statistic("log Σ exp(s), the sinks included; -inf where a row sees nothing")
    max_logit = Statistic("max s; -inf where a row sees nothing")
    top_prob = Statistic("max p")
    entropy = Statistic("-Σ p log p, in nats")
    effective_keys = Statistic("exp(entropy): how many keys an even weighting would have")
    logit_mean = Statistic("mean of s over the visible keys")
    logit_var = Statistic("variance of s over the visible keys")
    sink_mass = Statistic("Σ p over the first keys of the row's sequence or document")
    self_mass = Statistic("the weight on the query's own position")
    previous_mass = Statistic("the weight on the position before the query's")
    distance = Statistic("Σ p (i - j): how far back the row looks")
    output_norm = Statistic("‖out‖, the length of what the head gives")

    def __init__(
        self,
        values: Mapping[str, Tensor],
        highest: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        self.values = dict(values)
        self.highest = highest.detach()  # (B, Hq, N): max_logit, whether asked for or not
        self.rows = rows  # which query rows were sampled, (rows,); None: all of them

    @cached_property
    def sees(self) -> Tensor:
        """Whether each row sees at least one key, (B, Hq, N) bool."""
        return self.highest != -torch.inf

    @property
    def sampled(self) -> bool:
        """Whether the statistics are of a sample of the rows."""
        return self.rows is not None

    def heads(self, padding: Tensor | None = None) -> dict[str, Tensor]:
        """A figure a head, (Hq,): the mean over rows that see a key, and max or min as named.

        `padding` (B, N) bool is True for rows to leave out. A maximum over sampled rows is only a
        lower bound of the true one, and is named so.
        """
        return Reduction.of(self, padding).figures()

    def __repr__(self) -> str:
        shape = tuple(self.highest.shape)
        rows = f", {shape[2]} sampled rows" if self.sampled else ""
        return f"Observation({', '.join(self.values)}; (B, Hq, N) = {shape}{rows})"


@dataclass(frozen=True)
class Reduction:
    """Rows of one or more calls on their way to a figure a head; every tensor is (Hq,)."""

    rows: Tensor  # how many were counted
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor]
    sampled: bool

    @classmethod
    def of(cls, seen: Observation, padding: Tensor | None = None) -> Reduction:
        """The rows of a call that see a key and are no padding (B, N)."""
        counted = seen.sees
        if padding is not None:
            padding = padding if seen.rows is None else padding.index_select(1, seen.rows)
            counted = counted & ~padding[:, None]
        sums, extremes = {}, {}
        for name, value in seen.values.items():
            value = value.detach().double()
            sums[name] = value.masked_fill(~counted, 0).sum((0, 2))
            if _EXTREMES.get(name) == "max":
                extremes[name] = value.masked_fill(~counted, -torch.inf).amax((0, 2))
            elif name in _EXTREMES:
                extremes[name] = value.masked_fill(~counted, torch.inf).amin((0, 2))
        return cls(counted.sum((0, 2)), sums, extremes, seen.sampled)

    def __add__(self, other: Reduction) -> Reduction:
        """The rows of both."""
        further = {"max": torch.maximum, "min": torch.minimum}
        return Reduction(
            self.rows + other.rows,
            {name: total + other.sums[name] for name, total in self.sums.items()},
            {
                name: further[_EXTREMES[name]](value, other.extremes[name])
                for name, value in self.extremes.items()
            },
            self.sampled or other.sampled,
        )

    def figures(self) -> dict[str, Tensor]:
        """A figure a head: NaN means where no row was counted."""
        figures = {}
        for name, total in self.sums.items():
            mean = total / self.rows.clamp_min(1)
            figures[f"{name}_mean"] = mean.masked_fill(self.rows == 0, torch.nan)
            if name in _EXTREMES:
                bound = "_lower_bound" if _EXTREMES[name] == "max" else "_upper_bound"
                said = f"{name}_{_EXTREMES[name]}{bound if self.sampled else ''}"
                figures[said] = self.extremes[name]
        return figures


STATISTICS: tuple[str, ...] = tuple(
    name for name, value in vars(Observation).items() if isinstance(value, Statistic)
)
_EXTREMES = {"max_logit": "max", "entropy": "min", "logit_var": "max", "sink_mass": "max"}


def check_statistics(stats: Iterable[str] | None) -> tuple[str, ...]:
    """The asked-for names, all of them for None; ValueError for a name that is none."""
    if stats is None:
        return STATISTICS
    names = (stats,) if isinstance(stats, str) else tuple(stats)
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"unknown statistic {unknown[0]!r}; there are {', '.join(STATISTICS)}")
    return names


def with_max_logit(names: tuple[str, ...]) -> tuple[str, ...]:
    """These names and max_logit, which tells whether a row sees a key, in their usual order."""
    return tuple(name for name in STATISTICS if name in names or name == "max_logit")


def check_sink_keys(sink_keys: int) -> None:
    """ValueError unless at least one key is looked at."""
    if not is_integer(sink_keys) or sink_keys < 1:
        raise ValueError(f"sink_keys={sink_keys!r}; how many, at least 1, would work")


def sample_rows(rows: int | Tensor | None, queries: int, device: torch.device) -> Tensor | None:
    """Which rows to look at: one from each of `rows` equal strata, always the same; None: all."""
    if rows is None:
        return None
    if isinstance(rows, Tensor):
        if rows.ndim != 1 or rows.dtype.is_floating_point or rows.dtype == torch.bool:
            raise ValueError(
                f"rows is {rows.dtype} of shape {tuple(rows.shape)}; a number, or a vector of row "
                "numbers, would work"
            )
        out_of_range = not torch.compiler.is_compiling() and ((rows < 0) | (rows >= queries)).any()
        if out_of_range:
            raise ValueError(f"rows has numbers outside the {queries} queries")
        return rows.to(device, torch.int64)
    if not is_integer(rows) or rows < 1:
        raise ValueError(
            f"rows={rows!r}; how many, at least 1, or which of them, as a tensor, would work"
        )
    rows = as_int(rows)
    if rows >= queries:
        return None
    # The golden ratio spreads the choice inside the strata, so no period of the input is favoured.
    edges = torch.arange(rows + 1, device=device) * queries // rows
    inside = torch.frac(torch.arange(rows, device=device, dtype=torch.float64) * 0.6180339887498949)
    return edges[:-1] + (inside * edges.diff()).long()
