"""The statistics of a call's rows and heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple, overload

import torch
from torch import Tensor

from headwise.core.arguments import INTEGER_DTYPES, as_int, is_integer
from headwise.core.reduction import CallRows, Columns, reduce_rows
from headwise.core.spans import NEEDED, SPAN_PREFIX, Span


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
    participation = Statistic(
        "(Σp)² / Σp²: the number of keys that share the weight; 0 without keys"
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
    def spans(self) -> dict[str, Tensor]:
        """The weight on each span of keys that was asked for, Σ p over the span, (B, Hq, N)."""
        named = {name: x for name, x in self.values.items() if name.startswith(SPAN_PREFIX)}
        return {name.removeprefix(SPAN_PREFIX): x for name, x in named.items()}

    @property
    def sampled(self) -> bool:
        """True if the statistics cover a sample of the rows."""
        return self.rows is not None

    def heads(self, padding: Tensor | None = None) -> dict[str, Tensor]:
        """One value per head, (Hq,): the mean over rows that see a key, and max or min as named.

        `padding` (B, N) bool is True for rows to leave out. A maximum over sampled rows is only a
        lower bound of the true one, and its name says so.
        """
        columns, padding = Columns(tuple(self.values)), self.padding_of(padding)
        values = [x.detach().reshape(self.highest.shape) for x in self.values.values()]
        reduced = reduce_rows(
            CallRows(values, self.highest, padding, None, columns.maxima, columns.minima)
        )
        return columns.figures(torch.cat(reduced), self.sampled)

    def padding_of(self, padding: Tensor | None) -> Tensor | None:
        """The part (B, rows) of a padding mask (B, N) that belongs to the observed rows.

        ValueError unless it is a bool tensor of that shape.
        """
        if padding is None:
            return None
        _check_padding(padding, self.highest, self.rows)
        return padding if self.rows is None else padding.index_select(1, self.rows)

    def __repr__(self) -> str:
        shape = tuple(self.highest.shape)
        rows = f", {shape[2]} sampled rows" if self.sampled else ""
        return f"Observation({', '.join(self.values)}; (B, Hq, N) = {shape}{rows})"


STATISTICS: tuple[str, ...] = tuple(
    name for name, value in vars(Observation).items() if isinstance(value, Statistic)
)
"""The names of all statistics, in the order of `Observation`."""


def _check_padding(padding: object, counted: Tensor, rows: Tensor | None = None) -> None:
    """Raise ValueError unless padding is a bool tensor (B, N)."""
    shape = tuple(padding.shape) if isinstance(padding, Tensor) else None
    known = counted.shape[::2] if rows is None else (counted.shape[0], *(shape or ())[1:])
    if not isinstance(padding, Tensor) or padding.dtype != torch.bool or shape != tuple(known):
        kind = f"{padding.dtype} {shape}" if isinstance(padding, Tensor) else repr(padding)
        raise ValueError(
            f"padding is {kind}; give a bool tensor (B, N), True for the rows to leave out"
        )


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


class Asked(NamedTuple):
    """The statistics that a call is asked for, and those that are computed for them."""

    stats: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    sink_keys: int = 1
    spans: Mapping[str, Span] = {}

    @classmethod
    def of(
        cls,
        stats: Iterable[str] | None,
        sink_keys: int,
        spans: Mapping[str, Span],
        keys: int | None = None,
    ) -> Asked:
        """Check what a user asks for; ValueError if a call with so many keys has no such thing."""
        names = check_statistics(stats)
        computed = with_max_logit((*names, *NEEDED) if spans else names)
        return cls(names, computed, check_sink_keys(sink_keys, keys), spans)


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
    seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
    if seen or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return _strata(rows, queries, device)
    return _known_strata(rows, queries, device)


class SampledRows(NamedTuple):
    """The query rows of a call that are observed: as they were asked for, and their numbers."""

    asked: int | Tensor | None
    numbers: Tensor  # (rows,)

    @classmethod
    def of(
        cls, rows: int | Tensor | None, queries: int, device: torch.device
    ) -> SampledRows | None:
        """Sample rows of a call with so many queries; None for all of them."""
        numbers = sample_rows(rows, queries, device)
        return None if numbers is None else cls(rows, numbers)

    @property
    def key(self) -> int | None:
        """The number of rows, if it tells which: calls of one length have the same sample."""
        return None if isinstance(self.asked, Tensor) else self.asked

    def of_call(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return a call's tensors with these rows of its queries (B, Hq, N, D)."""
        return given[0].index_select(2, self.numbers), *given[1:]


def _strata(rows: int, queries: int, device: torch.device) -> Tensor:
    """One row from each of `rows` equal strata, (rows,)."""
    with torch.inference_mode(False):
        # The golden ratio spreads the choice within the strata, so that no period is favoured.
        edges = torch.arange(rows + 1, device=device) * queries // rows
        steps = torch.arange(rows, device=device, dtype=torch.float64)
        inside = torch.frac(steps * 0.6180339887498949)
        return edges[:-1] + (inside * edges.diff()).long()


_known_strata = lru_cache(maxsize=64)(_strata)
"""The same, remembered: a model's layers ask for the same rows in every step."""
