"""A head in a sentence, made from its figures and its type, and the reason for its type."""

from __future__ import annotations

from collections.abc import Mapping

from headwise.messages import Sentence, say
from headwise.watching.head_types import LEAST, NEAR, QUIET

Numbers = Mapping[str, float]


def sentence(kind: str | None, scores: Numbers, figures: Numbers, causal: bool = True) -> Sentence:
    """Describe a head by the pattern that it follows, and how much of its weight does.

    `scores` are those of its rules, by type; a head of no pattern is described by its figures.

    >>> said = sentence("induction", {"induction": 0.354}, {})
    >>> said
    'looks at what followed the same token last time: induction, 35% of its weight'
    >>> said.zh
    '看同一词元上次出现之后的内容：归纳，占其权重的 35%'
    """
    share = scores.get(kind or "", 0.0)
    match kind:
        case "induction":
            return say(
                "looks at what followed the same token last time: induction, {share:.0%} of its "
                "weight",
                share=share,
            )
        case "previous-token":
            return say("looks at the token before: {share:.0%} of its weight", share=share)
        case "self":
            return say("looks at the token itself: {share:.0%} of its weight", share=share)
        case "sink":
            return say(
                "rests on the first token, {share:.0%} of its weight: heads do so when they find "
                "nothing to look at",
                share=share,
            )
        case "local":
            return say(
                "looks at its neighbours: {share:.0%} of its weight is within {near} tokens",
                share=share, near=NEAR,
            )  # fmt: skip
        case "uniform":
            return say("spreads evenly, over {share:.0%} of the tokens that it sees", share=share)
        case "dormant":
            return say("outputs almost nothing: {share:.1%} of its layer's mean", share=share)
    return _searching(figures, causal)


def reason(kind: str | None, scores: Numbers, square: bool = True) -> Sentence:
    """Explain the type of a head: its threshold, or the rule that it comes nearest to.

    >>> reason("content", {"induction": 0.24, "sink": 0.1})
    'On this input it fits no rule; the nearest is induction, with 24% where 30% are asked for.'
    """
    if kind == "dormant":
        return say("On this input; a dormant head is below {least:.0%}.", least=QUIET)
    if kind in LEAST:
        return say("On this input; its type starts at {least:.0%}.", least=LEAST[kind])
    if square and "induction" not in scores:
        return say("Too few tokens return in this input to tell whether it is an induction head.")
    shares = {name: scores[name] / least for name, least in LEAST.items() if name in scores}
    if not shares:
        return say("On this input it fits no rule.")
    near = max(shares, key=lambda name: shares[name])
    return say(
        "On this input it fits no rule; the nearest is {kind}, with {share:.0%} where {least:.0%} "
        "are asked for.",
        kind=_named(near), share=scores[near], least=LEAST[near],
    )  # fmt: skip


def _searching(figures: Numbers, causal: bool) -> Sentence:
    """A head of no simple pattern: how many tokens it takes at a time, and how far back."""
    keys, distance = figures.get("effective_keys_mean"), figures.get("distance_mean")
    if keys is None:
        return say("looks for something in the input")
    if distance is None or not causal:
        return say("looks for something in the input: about {keys:.0f} tokens at a time", keys=keys)
    return say(
        "looks for something in the input: about {keys:.0f} tokens at a time, {distance:.0f} back "
        "on average",
        keys=keys, distance=distance,
    )  # fmt: skip


def _named(kind: str) -> Sentence:
    """The name of a type of heads."""
    names = {
        "induction": say("induction"),
        "previous-token": say("previous token"),
        "self": say("self"),
        "sink": say("sink"),
        "local": say("local"),
        "uniform": say("uniform"),
    }
    return names[kind]
