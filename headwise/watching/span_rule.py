"""A rule for alarms about the weight on a named span of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from headwise.core.spans import SPAN_PREFIX
from headwise.messages import say
from headwise.watching.figure_names import figure
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.rules import Finding
from headwise.watching.table import Table


@dataclass(frozen=True)
class SpanWeight:
    """The mean weight on a span is `above` or `below` a limit: over all heads, or `per_head`.

    >>> rule = SpanWeight("image", below=0.05)
    >>> table = Table([{"layer": 0, "head": 0, "span_image_mean": 0.03}])
    >>> next(rule.check(table, [])).says
    'the mean weight on the span image is 0.030, below 0.05'
    """

    span: str
    above: float | None = None
    below: float | None = None
    per_head: bool = False
    source: ClassVar[str] = say("the limit is yours")
    every: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if (self.above is None) == (self.below is None):
            raise ValueError(f"SpanWeight({self.span!r}) takes one limit: above=0.5 or below=0.05")

    @property
    def name(self) -> str:
        """Its name, with that of the span."""
        return f"{'little' if self.above is None else 'much'} weight on {self.span}"

    @property
    def needs(self) -> tuple[str, ...]:
        """The statistic that it reads."""
        return (SPAN_PREFIX + self.span,)

    @property
    def says(self) -> str:
        """The rule in words."""
        if self.above is None:
            return say(
                "the mean weight on the span {span} is below {limit:g}",
                span=self.span,
                limit=self.below,
            )
        return say(
            "the mean weight on the span {span} is above {limit:g}",
            span=self.span,
            limit=self.above,
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The heads, or the model, whose mean weight is beyond the limit."""
        weights = figure(table, f"{SPAN_PREFIX}{self.span}_mean")
        rows = [(row, x) for row, x in zip(table, weights, strict=False) if not math.isnan(x)]
        if self.per_head:
            for row, weight in rows:
                if self._beyond(weight):
                    yield Finding(int(row["layer"]), int(row["head"]), self._said(weight))
        elif rows:
            mean = sum(x for _, x in rows) / len(rows)
            if self._beyond(mean):
                yield Finding(None, None, self._said(mean))

    def _beyond(self, weight: float) -> bool:
        if self.above is None:
            assert self.below is not None
            return weight < self.below
        return weight > self.above

    def _said(self, weight: float) -> str:
        if self.above is None:
            return say(
                "the mean weight on the span {span} is {weight:.3f}, below {limit:g}",
                span=self.span,
                weight=weight,
                limit=self.below,
            )
        return say(
            "the mean weight on the span {span} is {weight:.3f}, above {limit:g}",
            span=self.span,
            weight=weight,
            limit=self.above,
        )
