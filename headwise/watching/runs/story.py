"""The story of a watched run: its loss, and its alarms from the first on, with what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from headwise.messages import Sentence, say
from headwise.watching.alarms import Alarm
from headwise.watching.rules import RULES, digits
from headwise.watching.runs.run_reader import WatchedRun

NAMES = {
    "logit growth": say("logit growth"),
    "entropy collapse": say("entropy collapse"),
    "dead head": say("dead head"),
    "sink take-over": say("sink take-over"),
    "duplicated heads": say("duplicated heads"),
}

MEANINGS = {
    "logit growth": say(
        "the softmax of these heads is nearly saturated: hardly any gradient passes it, and "
        "growing logits have ended in divergence before"
    ),
    "entropy collapse": say(
        "each row looks at a single key, which its position does not explain: training becomes "
        "unstable when attention collapses"
    ),
    "dead head": say("these heads add next to nothing to what their layer computes"),
    "sink take-over": say(
        "most heads rest on the first token: they add little where they find nothing to look at"
    ),
    "duplicated heads": say("these heads do the same work as another one of their layer"),
}
"""What an alarm of each rule means."""

REMEDIES = {
    "logit growth": say(
        "try a lower learning rate or a longer warm-up, or hw.qk_clip(model, watch) after each "
        "step of the optimiser"
    ),
    "entropy collapse": say("try a lower learning rate, or QK-norm in the model"),
    "dead head": say("seen.importance(loss) tells whether the loss needs it"),
    "sink take-over": say(
        "usual in pretrained models; learned sinks (sinks=) take such weight away"
    ),
    "duplicated heads": say("fewer heads may do: seen.importance(loss) tells which the loss needs"),
}
"""A first thing to try for each rule."""


def finding(
    rule: str, alarms: Sequence[Alarm], values: Sequence[float], limit: float | None
) -> Sentence:
    """Say what was found of several heads, in the plural.

    >>> print(finding("logit growth", [], [120.0, 310.0], 100.0))
    their largest logits are 120 to 310, above 100
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or limit is None:
        said = Sentence("") if not alarms else alarms[0].says
        nan = rule == "logit growth"
        return say("their largest logits are NaN") if nan else Sentence(said, chinese(said))
    low, high, most = digits(min(finite), limit, 3), digits(max(finite), limit, 3), f"{limit:.3g}"
    span: str = low if low == high else say("{low} to {high}", low=low, high=high)
    if rule == "logit growth":
        return say("their largest logits are {span}, above {limit}", span=span, limit=most)
    if rule == "entropy collapse":
        return say("their mean entropies are {span} nats, below {limit}", span=span, limit=most)
    if rule == "dead head":
        return say("their mean output norms are {span}, at most {limit}", span=span, limit=most)
    return Sentence(alarms[0].says, chinese(alarms[0].says))


def chinese(said: str) -> str:
    """The 中文 of a sentence that may have none."""
    return said.zh if isinstance(said, Sentence) else said


WINDOWS = 24
"""The loss is smoothed over one in so many of its points, before it is asked where it turned."""

RISEN = 0.2
"""The loss has turned where it stays above its lowest by this share of all it had fallen."""

TOLD = ("entropy_mean", "max_logit_max", "output_norm_mean", "sink_mass_mean")
"""Figures of a chapter's heads that are compared before and after, beside the rule's own."""


class Threshold(NamedTuple):
    """The figure that a rule reads, the name of its limit, and the side where it rings."""

    figure: str
    limit: str
    above: bool
    of_layer: bool = False  # the limit is a share of the mean of the layer's heads


THRESHOLDS = {
    "logit growth": Threshold("max_logit_max", "limit", above=True),
    "entropy collapse": Threshold("entropy_mean", "nats", above=False),
    "dead head": Threshold("output_norm_mean", "share", above=False, of_layer=True),
    "sink take-over": Threshold("sink_mass_mean", "mass", above=True),
}


@dataclass(frozen=True)
class Loss:
    """The course of the loss: where it was lowest, and from which step on it was worse for good."""

    name: str
    steps: list[int]
    values: list[float]
    lowest: int | None  # the step
    turned: int | None  # the step; None if it never did

    @classmethod
    def of(cls, run: WatchedRun) -> Loss | None:
        """The loss of a run; another number if it has none; None if nothing was logged."""
        logged = run.logged
        name = next((x for x in ("loss", "train_loss", *logged) if x in logged), None)
        if name is None:
            return None
        steps, values = logged[name]
        finite = [
            (value, step) for step, value in zip(steps, values, strict=True) if value == value
        ]
        return cls(name, steps, values, min(finite)[1] if finite else None, turning(steps, values))


@dataclass(frozen=True)
class Chapter:
    """The alarms of one rule in one layer, or in the whole model."""

    rule: str
    layer: int | None
    module: str
    alarms: list[Alarm]
    figure: str | None = None  # as the run names it
    limit: float | None = None
    above: bool = True
    values: list[float] = field(default_factory=list)  # of each alarm, when it was raised
    compared: dict[str, list[float]] = field(default_factory=dict)  # figure: first, alarm, last

    @property
    def step(self) -> int:
        """The step of its first alarm."""
        return self.alarms[0].step

    @property
    def heads(self) -> list[str]:
        """The names of its heads."""
        return [f"{alarm.layer}.{alarm.head}" for alarm in self.alarms if alarm.head is not None]

    @property
    def where(self) -> Sentence:
        """The place of the alarms: the model, a head, or several heads of a layer."""
        heads = self.heads
        if not heads:
            return say("the whole model")
        if len(heads) == 1:
            return say("head {name}", name=heads[0])
        names = ", ".join(heads[:4]) + (", …" if len(heads) > 4 else "")
        return say("{count} heads ({names})", count=len(heads), names=names)

    @property
    def meaning(self) -> Sentence | None:
        """The meaning of such an alarm; None for a rule of somebody else."""
        return MEANINGS.get(self.rule)

    @property
    def remedy(self) -> Sentence | None:
        """A first thing to try; None for a rule of somebody else."""
        return REMEDIES.get(self.rule)

    @property
    def says(self) -> Sentence:
        """The finding, of one head or of several."""
        if len(self.alarms) == 1:
            says = self.alarms[0].says
            return says if isinstance(says, Sentence) else Sentence(says)
        return finding(self.rule, self.alarms, self.values, self.limit)

    @property
    def logarithmic(self) -> bool:
        """True if its figure spans so much that only a logarithm shows it."""
        seen = [abs(x) for x in (*self.values, self.limit or 0.0) if x and math.isfinite(x)]
        seen += [abs(x) for x in self.compared.get(self.figure or "", []) if x and math.isfinite(x)]
        return bool(seen) and max(seen) > 30 * min(seen)

    def to_dict(self) -> dict[str, Any]:
        """The chapter for the page."""
        return {
            "rule": self.rule,
            "layer": self.layer,
            "module": self.module,
            "step": self.step,
            "heads": [
                {"head": alarm.head, "step": alarm.step, "says": alarm.says}
                for alarm in self.alarms
            ],
            "figure": self.figure,
            "limit": self.limit,
            "log": self.logarithmic,
            "says": self.says,
            "meaning": self.meaning,
            "remedy": self.remedy,
            "compared": {
                name: [x if math.isfinite(x) else None for x in values]
                for name, values in self.compared.items()
            },
        }


@dataclass(frozen=True)
class Story:
    """A run, told: one headline, the loss, and the chapters in the order of their first alarms."""

    steps: list[int]
    loss: Loss | None
    chapters: list[Chapter]

    @classmethod
    def of(cls, run: WatchedRun) -> Story:
        """The story of a run as it stands."""
        return cls(run.steps, Loss.of(run), chapters(run))

    @property
    def headline(self) -> Sentence:
        """The run in one sentence."""
        if not self.steps:
            return say("nothing has been recorded yet")
        if not self.chapters:
            return say("no alarm in {count:,} recorded steps", count=len(self.steps))
        first = self.chapters[0]
        name, where = NAMES.get(first.rule, Sentence(first.rule)), first.where
        begun = say("the first alarm came at step {step}: {rule}, {where}",
                    step=first.step, rule=name, where=where)  # fmt: skip
        turned = None if self.loss is None else self.loss.turned
        if self.loss is None or turned is None:
            return begun
        if turned > first.step:
            return say(
                "{begun}; the loss turned {lead} steps later, at step {turned}",
                begun=begun, lead=turned - first.step, turned=turned,
            )  # fmt: skip
        return say("{begun}; the loss had turned at step {turned}", begun=begun, turned=turned)

    def to_dict(self) -> dict[str, Any]:
        """The story for the page; the loss at no more than 1,000 of its points."""
        loss = self.loss
        every = 1 if loss is None else max(1, len(loss.steps) // 1000)
        return {
            "headline": self.headline,
            "loss": None
            if loss is None
            else {
                "name": loss.name,
                "points": [
                    [step, value if math.isfinite(value) else None]
                    for step, value in zip(loss.steps[::every], loss.values[::every], strict=True)
                ],
                "lowest": loss.lowest,
                "turned": loss.turned,
            },
            "chapters": [chapter.to_dict() for chapter in self.chapters],
        }


def chapters(run: WatchedRun) -> list[Chapter]:
    """The alarms of a run by rule and layer, the earliest first."""
    groups: dict[tuple[str, int | None], list[Alarm]] = {}
    for alarm in sorted(run.alarms, key=lambda x: x.step):
        groups.setdefault((alarm.rule, alarm.layer), []).append(alarm)
    modules = {layer.number: layer.name for layer in run.layers}
    known: dict[str, Histories] = {}
    found = []
    for (rule, layer), alarms in groups.items():
        module = "" if layer is None else modules.get(layer, "")
        found.append(_measured(run, Chapter(rule, layer, module, alarms), known))
    return found


Histories = tuple[list[int], Mapping[tuple[int, int], Sequence[float]]]


def _measured(run: WatchedRun, chapter: Chapter, known: dict[str, Histories]) -> Chapter:
    """A chapter with its figure, its threshold, and its heads before and after."""
    rule = THRESHOLDS.get(chapter.rule)
    named = [rule.figure] if rule is not None else []
    figures = [x for name in dict.fromkeys((*named, *TOLD)) if (x := _named(run, name))]
    for name in figures:
        if name not in known:
            known[name] = run.history(name)
    compared: dict[str, list[float]] = {}
    for name in figures:
        steps, lines = known[name]
        heads = [x for x in lines if chapter.layer is None or (x[0], x[1]) in _heads(chapter)]
        if not heads or chapter.step not in steps:
            continue
        at = (0, steps.index(chapter.step), len(steps) - 1)
        compared[name] = [_mean([lines[head][place] for head in heads]) for place in at]
    figure = _named(run, rule.figure) if rule is not None else None
    if rule is None or figure is None:
        return replace(chapter, compared=compared)
    steps, lines = known[figure]
    values = [_value(alarm, steps, lines) for alarm in chapter.alarms]
    limit = _limit(run, chapter.rule, rule.limit)
    if rule.of_layer and limit is not None and chapter.step in steps:
        mine = [line for (layer, _), line in lines.items() if layer == chapter.layer]
        limit *= _mean([line[steps.index(chapter.step)] for line in mine])
    return replace(
        chapter, compared=compared, figure=figure, limit=limit, above=rule.above, values=values
    )


def _heads(chapter: Chapter) -> set[tuple[int | None, int | None]]:
    return {(alarm.layer, alarm.head) for alarm in chapter.alarms}


def _named(run: WatchedRun, figure: str) -> str | None:
    """The name of a figure in a run, which may have looked at some of the rows only."""
    there = run.figures
    names = (figure, f"{figure}_lower_bound", f"{figure}_upper_bound")
    return next((name for name in names if name in there), None)


def _value(alarm: Alarm, steps: list[int], lines: Mapping[Any, Sequence[float]]) -> float:
    line = lines.get((alarm.layer, alarm.head))
    return math.nan if line is None or alarm.step not in steps else line[steps.index(alarm.step)]


def _limit(run: WatchedRun, rule: str, name: str) -> float | None:
    """The limit of a rule in this run; folders that do not hold it have the usual ones."""
    for about in run.manifest.get("rules", []):
        limits = about.get("limits") if isinstance(about, dict) else None
        if about.get("rule") == rule and isinstance(limits, dict):
            found = limits.get(name)
            return float(found) if isinstance(found, int | float) else None
    usual = next((getattr(x, name, None) for x in RULES if x.name == rule), None)
    return None if usual is None else float(usual)


def turning(steps: Sequence[int], values: Sequence[float]) -> int | None:
    """The step from which the smoothed loss stays well above its lowest; None if there is none.

    >>> turning(range(6), [5.0, 3.0, 1.0, 4.0, 4.5, 5.0])
    3
    >>> turning(range(4), [5.0, 3.0, 2.0, 1.0]) is None
    True
    """
    size = max(1, len(values) // WINDOWS)
    means = [_mean(values[max(0, at - size + 1) : at + 1]) for at in range(len(values))]
    lowest, turned = math.inf, None
    for at, mean in enumerate(means):
        lowest = min(lowest, mean) if mean == mean else lowest
        if mean <= lowest + RISEN * (means[0] - lowest):
            turned = None
        elif turned is None and lowest < means[0]:
            turned = at
    return None if turned is None else steps[turned]


def _mean(values: Sequence[float]) -> float:
    finite = [x for x in values if x == x]
    return sum(finite) / len(finite) if finite else math.nan
