"""Alarms: the findings of the rules in a run, each head and rule once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headwise.messages import from_json, with_chinese
from headwise.watching.recorder.layer import WatchedLayer
from headwise.watching.rules import RULES, Finding, Rule
from headwise.watching.table import Table

log = logging.getLogger("headwise")


@dataclass(frozen=True)
class Alarm:
    """A rule that began to hold: the step, the head (None for the whole model), the finding."""

    step: int
    rule: str
    layer: int | None
    head: int | None
    says: str

    @property
    def where(self) -> str:
        """The head by its number: 5.1 is the second head of the sixth layer."""
        return "the model" if self.layer is None else f"head {self.layer}.{self.head}"

    def to_dict(self) -> dict[str, Any]:
        """The alarm as a dictionary for JSON."""
        return with_chinese(asdict(self))

    @classmethod
    def from_dict(cls, content: Any) -> Alarm:
        """The alarm that `to_dict` returned; ValueError for anything else.

        >>> Alarm.from_dict({"step": "3"})
        Traceback (most recent call last):
        ValueError: this is not an alarm: {'step': '3'}
        """
        found: dict[str, Any] = from_json(content) if isinstance(content, dict) else {}
        numbers = [found.get(name) for name in ("step", "layer", "head")]
        texts = [found.get(name) for name in ("rule", "says")]
        whole = all(type(x) is int or x is None for x in numbers) and numbers[0] is not None
        if not (whole and all(isinstance(x, str) for x in texts)):
            raise ValueError(f"this is not an alarm: {content!r:.200}")
        given: dict[str, Any] = {each.name: found.get(each.name) for each in fields(cls)}
        return cls(**given)

    def __str__(self) -> str:
        return f"step {self.step}: {self.rule}: {self.where}: {self.says}"


@dataclass
class Alarms:
    """The rules that check each step of a run, and the alarms they raised so far.

    >>> table = Table([{"layer": 0, "kind": "self", "head": 1, "max_logit_max": 120.0}])
    >>> print(*Alarms().look(7, table, []))
    step 7: logit growth: head 0.1: its largest logit is 120, above 100
    """

    rules: tuple[Rule, ...] = RULES
    raised: list[Alarm] = field(default_factory=list)
    looked: int = 0  # steps that were checked
    _known: set[tuple[str, int | None, int | None]] = field(default_factory=set)
    _failed: set[str] = field(default_factory=set)  # rules, each reported once

    @property
    def need_maps(self) -> bool:
        """True if a rule that compares weights is checked in the next step."""
        return any(not rule.needs and (self.looked + 1) % rule.every == 0 for rule in self.rules)

    def look(
        self, step: int, table: Table, layers: Sequence[WatchedLayer], last: bool = False
    ) -> list[Alarm]:
        """The alarms that this step raises for the first time; they are logged too.

        On the `last` look the rules that look only now and then are checked too.
        """
        self.looked += 1
        new = []
        for rule in self.rules:
            if self.looked % rule.every and not last:
                continue
            found = []
            for layer, head, says in self._findings(rule, table, layers):
                if (rule.name, layer, head) not in self._known:
                    self._known.add((rule.name, layer, head))
                    found.append(Alarm(step, rule.name, layer, head, says))
            if found:
                more = {1: "", 2: " (and 1 more head)"}.get(
                    len(found), f" (and {len(found) - 1} more heads)"
                )
                log.warning("%s%s", found[0], more)
            new += found
        self.raised += new
        return new

    def know(self, alarms: Iterable[Alarm]) -> None:
        """Take alarms of the same run that were raised before; they are not raised again."""
        for alarm in alarms:
            if (alarm.rule, alarm.layer, alarm.head) not in self._known:
                self._known.add((alarm.rule, alarm.layer, alarm.head))
                self.raised.append(alarm)

    def state_dict(self) -> dict[str, Any]:
        """The alarms so far, the number of looks, and the states of rules that have one."""
        memories = {
            rule.name: rule.state_dict() for rule in self.rules if hasattr(rule, "state_dict")
        }
        raised = json.loads(json.dumps([alarm.to_dict() for alarm in self.raised]))  # plain text
        return {"raised": raised, "looked": self.looked, "rules": memories}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the alarms of a state: none of them is raised again."""
        self.raised = [Alarm(**from_json(dict(alarm))) for alarm in state["raised"]]
        self.looked = int(state["looked"])
        self._known = {(alarm.rule, alarm.layer, alarm.head) for alarm in self.raised}
        for rule in self.rules:
            if rule.name in state["rules"] and hasattr(rule, "load_state_dict"):
                rule.load_state_dict(state["rules"][rule.name])

    def _findings(self, rule: Rule, table: Table, layers: Sequence[WatchedLayer]) -> list[Finding]:
        """The findings of a rule; one that fails is reported once, and the others go on."""
        try:
            return list(rule.check(table, layers))
        except Exception as error:
            if rule.name not in self._failed:
                self._failed.add(rule.name)
                log.warning("the alarm for %s failed, and training goes on: %s", rule.name, error)
            return []


def alarm_scalars(
    alarms: Iterable[Alarm], rules: Iterable[str] = (), prefix: str = "attn"
) -> dict[str, float]:
    """Count the alarms raised so far: in all, and by each rule.

    >>> alarm_scalars([], ["logit growth"])
    {'attn/alarms': 0.0, 'attn/alarms/logit_growth': 0.0}
    """
    raised = [alarm.rule for alarm in alarms]
    names = dict.fromkeys((*rules, *raised))
    counts = {
        f"{prefix}/alarms/{name.replace(' ', '_')}": float(raised.count(name)) for name in names
    }
    return {f"{prefix}/alarms": float(len(raised)), **counts} if names else {}


def chosen_rules(
    asked: bool | Rule | Iterable[Rule], stats: Sequence[str], maps: bool
) -> tuple[Rule, ...]:
    """The rules of `alarms=`; ValueError if the watch leaves out what one of them reads.

    >>> [rule.name for rule in chosen_rules(True, ("entropy",), maps=True)]
    Traceback (most recent call last):
    ValueError: the alarm for logit growth reads max_logit; ...
    """
    if isinstance(asked, bool):
        rules = RULES if asked else ()
    else:
        rules = tuple(asked) if isinstance(asked, Iterable) else (asked,)
    for rule in rules:
        if not hasattr(rule, "check"):
            raise ValueError(
                f"alarms={asked!r} is not a rule; use True, or rules such as "
                "headwise.watching.RULES[:2]"
            )
        missing = [name for name in rule.needs if name not in stats]
        if missing:
            raise ValueError(
                f"the alarm for {rule.name} reads {', '.join(missing)}; name it in stats=, leave "
                "stats= out, or give alarms= only the rules you want"
            )
        if not rule.needs and not maps:
            raise ValueError(
                f"the alarm for {rule.name} compares weights, and maps=False keeps none; leave "
                "maps=False out, or give alarms= only the rules you want"
            )
    return rules
