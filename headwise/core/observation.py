"""The statistics of a call's heads, and their reduction to one value per head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from headwise.core.arguments import INTEGER_DTYPES, as_int, is_integer


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
    """The statistics of one call that were asked for, a tensor (B, Hq, N) each.

    In their definitions, s are a row's logits over the keys it may see (scaled, capped and biased),
    p = exp(s - lse) its weights before dropout, i the query's position in the whole sequence and j
    a key's.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.zeros(3, 1, 2, 4, 8).unbind(0)
    >>> out, seen = hw.observe(q, k, v, mask=hw.mask.causal())
    >>> seen.effective_keys[0, 0]
    tensor([1., 2., 3., 4.])
    """

    lse = Statistic("log Σ exp(s), the sinks included; -inf for a row that sees no key")
    max_logit = Statistic("max s; -inf for a row that sees no key")
    top_prob = Statistic("max p")
    entropy = Statistic("-Σ p log p, in nats")
    effective_keys = Statistic(
        "exp(entropy): the number of keys with equal weights of that entropy"
    )
    logit_mean = Statistic("mean of s over the visible keys")
    logit_var = Statistic("variance of s over the visible keys")
    sink_mass = Statistic("Σ p over the first keys of the row's sequence or document")
    self_mass = Statistic("the weight on the query's own position")
    previous_mass = Statistic("the weight on the position before the query's")
    distance = Statistic("Σ p (i - j): how far back the row looks")
    output_norm = Statistic("‖out‖, the length of the head's output")

    def __init__(
        self,
        values: Mapping[str, Tensor],
        highest: Tensor,
        rows: Tensor | None = None,
    ) -> None:
        self.values = dict(values)
        self.highest = highest.detach()  # (B, Hq, N): max_logit, even if it was not asked for
        self.rows = rows  # the query rows that were sampled, (rows,); None if all were observed

    @property
    def sees(self) -> Tensor:
        """True for rows that see at least one key, (B, Hq, N) bool."""
        return self.highest != -torch.inf

    @property
    def sampled(self) -> bool:
        """True if the statistics cover a sample of the rows."""
        return self.rows is not None

    def heads(self, padding: Tensor | None = None) -> dict[str, Tensor]:
        """One value per head, (Hq,): the mean over rows that see a key, and max or min as named.

        `padding` (B, N) bool is True for rows to leave out. A maximum over sampled rows is only a
        lower bound of the true one, and its name says so.
        """
        return Reduction.of(self, padding).figures()

    def __repr__(self) -> str:
        shape = tuple(self.highest.shape)
        rows = f", {shape[2]} sampled rows" if self.sampled else ""
        return f"Observation({', '.join(self.values)}; (B, Hq, N) = {shape}{rows})"


@dataclass(frozen=True)
class Reduction:
    """Sums and extremes over the rows of one or more calls; every tensor is (Hq,)."""

    rows: Tensor  # the number of rows counted
    sums: dict[str, Tensor]
    extremes: dict[str, Tensor]
    sampled: bool

    @classmethod
    def of(cls, seen: Observation, padding: Tensor | None = None) -> Reduction:
        """The rows of a call that see a key and are not padding (B, N)."""
        counted = seen.sees
        if padding is not None:
            _check_padding(padding, counted, seen.rows)
            padding = padding if seen.rows is None else padding.index_select(1, seen.rows)
            counted = counted & ~padding[:, None]
        sums, extremes = {}, {}
        for name, value in seen.values.items():
            value = value.detach().double()
            sums[name] = value.masked_fill(~counted, 0).sum((0, 2))
            if name in _EXTREMES:
                extremes[name] = _extreme(value, counted, _EXTREMES[name])
        return cls(counted.sum((0, 2)), sums, extremes, seen.sampled)

    def __add__(self, other: Reduction) -> Reduction:
        """The rows of both together."""
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
        """One value per head; the mean of a head without counted rows is NaN."""
        figures = {}
        for name, total in self.sums.items():
            mean = total / self.rows.clamp_min(1)
            figures[f"{name}_mean"] = mean.masked_fill(self.rows == 0, torch.nan)
            if name in _EXTREMES:
                bound = "_lower_bound" if _EXTREMES[name] == "max" else "_upper_bound"
                suffix = bound if self.sampled else ""
                figures[f"{name}_{_EXTREMES[name]}{suffix}"] = self.extremes[name]
        return figures


STATISTICS: tuple[str, ...] = tuple(
    name for name, value in vars(Observation).items() if isinstance(value, Statistic)
)
_EXTREMES = {"max_logit": "max", "entropy": "min", "logit_var": "max", "sink_mass": "max"}


def _check_padding(padding: object, counted: Tensor, rows: Tensor | None = None) -> None:
    """Raise ValueError unless padding is a bool tensor (B, N)."""
    shape = tuple(padding.shape) if isinstance(padding, Tensor) else None
    known = counted.shape[::2] if rows is None else (counted.shape[0], *(shape or ())[1:])
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or shape != tuple(known):
        kind = f"{padding.dtype} {shape}" if isinstance(padding, Tensor) else repr(padding)
        raise ValueError(
            f"padding is {kind}; give a bool tensor (B, N), True for the rows to leave out"
        )


def _extreme(value: Tensor, counted: Tensor, which: str) -> Tensor:
    """The largest or smallest counted value of each head, (Hq,); -inf or inf if there is none."""
    none = -torch.inf if which == "max" else torch.inf
    flat = value.masked_fill(~counted, none).transpose(0, 1).flatten(1)  # (Hq, B·N)
    if flat.shape[1] == 0:
        return flat.new_full(flat.shape[:1], none)
    return flat.amax(1) if which == "max" else flat.amin(1)


def check_statistics(stats: Iterable[str] | None) -> tuple[str, ...]:
    """The names asked for, all of them for None; ValueError for an unknown name."""
    if stats is None:
        return STATISTICS
    names = (stats,) if isinstance(stats, str) else tuple(stats)
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise ValueError(f"unknown statistic {unknown[0]!r}; choose from {', '.join(STATISTICS)}")
    return names


def with_max_logit(names: tuple[str, ...]) -> tuple[str, ...]:
    """These names and max_logit, which shows whether a row sees a key, in the usual order."""
    return tuple(name for name in STATISTICS if name in names or name == "max_logit")


def check_sink_keys(sink_keys: int, keys: int | None = None) -> int:
    """The number of keys that count for `sink_mass`, at most `keys`; ValueError if below 1."""
    if not is_integer(sink_keys) or sink_keys < 1:
        raise ValueError(f"sink_keys={sink_keys!r} must be an integer, at least 1")
    sink_keys = as_int(sink_keys)
    return sink_keys if keys is None or sink_keys <= keys else max(1, keys)


def sample_rows(rows: int | Tensor | None, queries: int, device: torch.device) -> Tensor | None:
    """The rows to observe: one from each of `rows` equal strata, always the same; None for all."""
    if rows is None:
        return None
    if isinstance(rows, Tensor):
        if rows.ndim != 1 or rows.dtype not in INTEGER_DTYPES or rows.layout != torch.strided:
            raise ValueError(
                f"rows is a {rows.dtype} tensor of shape {tuple(rows.shape)}; give a number of "
                "rows, or a 1-D integer tensor of row numbers"
            )
        out_of_range = not torch.compiler.is_compiling() and ((rows < 0) | (rows >= queries)).any()
        if out_of_range:
            raise ValueError(f"rows has numbers outside 0 <= row < {queries}")
        return rows.to(device, torch.int64)
    if not is_integer(rows) or rows < 1:
        raise ValueError(
            f"rows={rows!r} must be a number of rows, at least 1, or a tensor of row numbers"
        )
    rows = as_int(rows)
    if rows >= queries:
        return None
    # The golden ratio spreads the choice within the strata, so that no period is favoured.
    edges = torch.arange(rows + 1, device=device) * queries // rows
    inside = torch.frac(torch.arange(rows, device=device, dtype=torch.float64) * 0.6180339887498949)
    return edges[:-1] + (inside * edges.diff()).long()
