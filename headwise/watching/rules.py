"""Rules for alarms, each with its threshold and the source of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.core.spans import SPAN_PREFIX
from headwise.messages import Sentence, say
from headwise.watching.head_types import sampled_weights
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.table import Table, Value, figure


class Finding(NamedTuple):
    """A finding of a rule: in a layer and a head, or in the whole model if both are None."""

    layer: int | None
    head: int | None
    says: str


class Rule(Protocol):
    """A condition on the heads of one step."""

    @property
    def name(self) -> str:
        """Its name: an alarm is raised once for each name and head."""
        ...

    @property
    def source(self) -> str:
        """The source of its threshold."""
        ...

    @property
    def needs(self) -> tuple[str, ...]:
        """The statistics that it reads."""
        ...

    @property
    def every(self) -> int:
        """The rule is checked in one of this many recorded steps."""
        ...

    @property
    def says(self) -> str:
        """The rule in words."""
        ...

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The heads of a closed step that it holds for; `layers` hold the maps of its last pass."""
        ...


@dataclass(frozen=True)
class LogitGrowth:
    """A head's largest logit exceeds `limit`."""

    limit: float = 100.0
    name: ClassVar[str] = "logit growth"
    source: ClassVar[str] = say(
        "Kimi K2 (2507.20534) clips a head's queries and keys where its largest logit passes 100; "
        "ViT-22B (2302.05442) and Wortsman and others (2309.14322) saw growing logits end in "
        "divergence"
    )
    needs: ClassVar[tuple[str, ...]] = ("max_logit",)
    every: ClassVar[int] = 1

    @property
    def says(self) -> str:
        """The rule in words."""
        return say(
            "the largest logit of a head is above {limit:g}, or NaN",
            limit=self.limit,
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The heads whose largest logit is above the limit; of sampled rows it is a lower bound.

        A head that saw no key has no logits.
        """
        for row, largest in zip(table, figure(table, "max_logit_max"), strict=False):
            if math.isnan(largest) and (row["layer"], row["head"]) not in table.blind:
                yield _head_finding(row, say("its largest logit is NaN"))
            elif largest > self.limit:
                said = say(
                    "its largest logit is {largest}, above {limit:g}",
                    largest=digits(largest, self.limit),
                    limit=self.limit,
                )
                yield _head_finding(row, said)


@dataclass(frozen=True)
class EntropyCollapse:
    """A head looks at one key per row, and its position alone does not explain which.

    Heads that look at the token before, at themselves or at the first token are left out.
    """

    nats: float = 0.1
    name: ClassVar[str] = "entropy collapse"
    source: ClassVar[str] = say(
        "Zhai and others, 2023 (2303.06296): training becomes unstable when attention entropy "
        "collapses; the threshold is ours, e^0.1 = 1.1 keys per row"
    )
    needs: ClassVar[tuple[str, ...]] = ("entropy", "self_mass", "previous_mass", "sink_mass")
    every: ClassVar[int] = 1

    @property
    def says(self) -> str:
        """The rule in words."""
        return say(
            "the mean entropy of a head is below {nats:g} nats, and the previous token, the token "
            "itself and the first one get less than half of its weight",
            nats=self.nats,
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The heads whose entropy is below the threshold for no such reason."""
        entropies = figure(table, "entropy_mean")
        placed = [figure(table, f"{name}_mean") for name in self.needs[1:]]
        for number, (row, entropy) in enumerate(zip(table, entropies, strict=False)):
            masses = [mass[number] for mass in placed if mass]
            explained = sum(mass for mass in masses if not math.isnan(mass))
            if entropy < self.nats and explained < 0.5:
                said = say(
                    "its mean entropy is {entropy:.3f} nats: {keys:.2f} keys per row",
                    entropy=entropy,
                    keys=math.exp(entropy),
                )
                yield _head_finding(row, said)


@dataclass(frozen=True)
class DeadHead:
    """A head's output is far smaller than that of the others in its layer."""

    share: float = 0.1
    name: ClassVar[str] = "dead head"
    source: ClassVar[str] = say(
        "Sandoval-Segura and others (2504.03889): the norm of a head's output relative to its "
        "layer finds inactive heads best among a dozen scores; the threshold is ours"
    )
    needs: ClassVar[tuple[str, ...]] = ("output_norm",)
    every: ClassVar[int] = 1

    @property
    def says(self) -> str:
        """The rule in words."""
        return say(
            "a head's mean output norm is at most {share:g} of its layer's mean", share=self.share
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The heads whose output is small compared with their neighbours', or zero.

        Heads with NaN logits have no meaningful output, and are left out.
        """
        norms = figure(table, "output_norm_mean")
        logits = figure(table, "max_logit_max") or [0.0] * len(norms)
        by_layer: dict[object, list[tuple[dict[str, Value], float]]] = {}
        for row, norm, logit in zip(table, norms, logits, strict=False):
            if not math.isnan(norm) and not math.isnan(logit):
                by_layer.setdefault(row["layer"], []).append((row, norm))
        for heads in by_layer.values():
            mean = sum(norm for _, norm in heads) / len(heads)
            for row, norm in heads:
                if norm <= self.share * mean:
                    yield _head_finding(row, _small(norm, mean))


@dataclass(frozen=True)
class SinkTakeOver:
    """Most heads put their weight on the first token.

    With few keys the first one gets much weight in any case: with M keys and even causal weights
    about (1 + log M)/M on average, and a head must have three times that.
    """

    mass: float = 0.3
    heads: float = 0.6
    name: ClassVar[str] = "sink take-over"
    source: ClassVar[str] = say(
        "Gu and others (2410.10781) count a head as a sink from a mean weight of 0.3 on the first "
        "token; public monitors call a model with more than 0.6 of such heads sunk. Pretrained "
        "language models may be there from the start"
    )
    needs: ClassVar[tuple[str, ...]] = ("sink_mass",)
    every: ClassVar[int] = 1

    @property
    def says(self) -> str:
        """The rule in words."""
        return say(
            "more than {heads:.0%} of the self-attention heads put more than {mass:g} of their "
            "weight on the first token",
            heads=self.heads,
            mass=self.mass,
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The model, if the share of its sinking heads is above the threshold."""
        least = {layer.number: max(self.mass, 3 * _even_mass(layer)) for layer in layers}
        sunk = [
            mass > least.get(int(row["layer"]), self.mass)
            for row, mass in zip(table, figure(table, "sink_mass_mean"), strict=False)
            if row["kind"] == "self"
        ]
        if sunk and sum(sunk) > self.heads * len(sunk):
            said = say(
                "{sunk} of {heads} heads rest on the first token", sunk=sum(sunk), heads=len(sunk)
            )
            yield Finding(None, None, said)


@dataclass(frozen=True)
class DuplicatedHeads:
    """Two heads of a layer give the same weights to the same keys.

    Checked in some rows of the last pass's first sequence, and not in every step: it takes longer
    than the others. Heads with even weights, as all have before training, and heads that rest on
    the first token are left out.
    """

    distance: float = 0.05
    every: int = 50
    name: ClassVar[str] = "duplicated heads"
    source: ClassVar[str] = say(
        "Bhojanapalli and others (2110.06821) compare heads by the total variation between their "
        "rows; the threshold is ours"
    )
    needs: ClassVar[tuple[str, ...]] = ()

    @property
    def says(self) -> str:
        """The rule in words."""
        return say(
            "the weights of two heads of a layer differ by a total variation of less than "
            "{distance:g} on average, while both differ from even weights by more than 0.2 and put "
            "less than 0.9 on the first token; every {every} steps",
            distance=self.distance,
            every=self.every,
        )

    def check(self, table: Table, layers: Sequence[WatchedLayer]) -> Iterator[Finding]:
        """The later head of each pair."""
        for layer in layers:
            if layer.last is None or layer.last.call is None:
                continue
            weights = sampled_weights(layer)[0].transpose(0, 1)  # (rows, heads, keys)
            alike = torch.cdist(weights, weights, p=1).mean(0) / 2 < self.distance
            able = (_from_even(weights) > 0.2) & (weights[..., 0].mean(0) < 0.9)
            pairs = (alike & able & able[:, None]).triu(1).nonzero().tolist()
            for first, second in pairs:
                said = say("it weights the keys as head {first} does", first=first)
                yield Finding(layer.number, layer.first_head + second, said)


RULES: tuple[Rule, ...] = (
    LogitGrowth(),
    EntropyCollapse(),
    DeadHead(),
    SinkTakeOver(),
    DuplicatedHeads(),
)
"""The rules of `hw.watch(model, alarms=True)`."""


def _small(norm: float, mean: float) -> Sentence:
    """The finding for a head whose output is small compared with the mean of its layer."""
    if not mean:
        return say("its mean output norm is 0: nothing at all")
    share = norm / mean
    return say(
        "its mean output norm is {norm:.3g}: {share:.1%} of its layer's mean",
        norm=norm,
        share=share,
    )


def digits(value: float, limit: float, least: int = 4) -> str:
    """A number with as many digits as tell it from a limit, and at least so many.

    >>> digits(100.004, 100.0), digits(123.456, 100.0)
    ('100.004', '123.5')
    """
    tried = (f"{value:.{count}g}" for count in range(least, 17))
    return next((text for text in tried if float(text) != limit), f"{value:.{least}g}")


def _head_finding(row: dict[str, Value], says: str) -> Finding:
    return Finding(int(row["layer"]), int(row["head"]), says)


def _even_mass(layer: WatchedLayer) -> float:
    """The mean weight of the first key if every causal row had even weights."""
    if layer.last is None:
        return 0.0
    keys = layer.last.start + layer.last.queries
    return (1 + math.log(keys)) / keys


def _from_even(weights: Tensor) -> Tensor:
    """The distance of heads from even weights: the mean total variation, (heads,).

    Keys to which no head gives any weight are taken for hidden. If only one key is left, the
    distance is 1: such a row could not be more decided.
    """
    seen = (weights > 0).any(1, keepdim=True)  # (rows, 1, keys)
    count = seen.sum(-1, keepdim=True)
    apart = (weights - seen / count.clamp_min(1)).abs().sum(-1, keepdim=True) / 2
    return apart.masked_fill(count == 1, 1.0).mean((0, 2))


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
