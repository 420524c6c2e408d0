"""The words of a run's story: its rules by name, what an alarm means, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headwise.messages import Sentence, say
from headwise.watching.alarms import Alarm

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
    """What was found of several heads, in the plural.

    >>> print(finding("logit growth", [], [120.0, 310.0], 100.0))
    their largest logits are 120 to 310, above 100
    """
    finite = [value for value in values if math.isfinite(value)]
    if not finite or limit is None:
        said = Sentence("") if not alarms else alarms[0].says
        nan = rule == "logit growth"
        return say("their largest logits are NaN") if nan else Sentence(said, chinese(said))
    low, high, most = digits(min(finite), limit), digits(max(finite), limit), f"{limit:.3g}"
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


def digits(value: float, limit: float) -> str:
    """A number with as many digits as tell it from a limit.

    >>> digits(100.004, 100.0), digits(123.4, 100.0)
    ('100.004', '123')
    """
    tried = (f"{value:.{count}g}" for count in range(3, 17))
    return next((text for text in tried if float(text) != limit), f"{value:.3g}")
