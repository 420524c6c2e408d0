"""A head in a sentence, made from its figures and its type, and the reason for its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from headwise.apps.look.scene import Group, Input
from headwise.messages import Sentence, say
from headwise.watching import head_types

Numbers = Mapping[str, float]
Seen = Literal["past", "text", "source", "image", "prompt", "both"]
"""Where a head may look: the text before a token, all of it, another text, an image, the text that
an image is made by, or that and the image."""


def seen_by(read: Input, group: Group) -> Seen:
    """The things that a group's heads look at."""
    if read.kind == "image" or (group.pictures and group.looks is None):
        return "image"
    if group.looks == "image":
        return "both" if group.square else "prompt"
    if not group.square:
        return "source"
    return "past" if group.causal else "text"


def sentence(kind: str | None, scores: Numbers, figures: Numbers, seen: Seen = "past") -> Sentence:
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
                share=share, near=head_types.NEAR,
            )  # fmt: skip
        case "uniform":
            return say("spreads evenly, over {share:.0%} of the tokens that it sees", share=share)
        case "dormant":
            return say("outputs almost nothing: {share:.1%} of its layer's mean", share=share)
    return _searching(figures, seen)


def reason(kind: str | None, scores: Numbers, seen: Seen = "past") -> Sentence:
    """Explain the type of a head: its threshold, or the rule that it comes nearest to.

    >>> reason("content", {"induction": 0.24, "sink": 0.1})
    'On this input it fits no rule; the nearest is induction: 24%, and that starts at 30%.'
    """
    if kind == "dormant":
        return say("On this input; a dormant head is below {least:.0%}.", least=head_types.QUIET)
    if kind in head_types.LEAST:
        return say("On this input; its type starts at {least:.0%}.", least=head_types.LEAST[kind])
    if seen in ("past", "text") and "induction" not in scores:
        return say("Too few tokens return in this input to tell whether it is an induction head.")
    shares = {
        name: scores[name] / least for name, least in head_types.LEAST.items() if name in scores
    }
    if not shares:
        return say("On this input it fits no rule.")
    near = max(shares, key=lambda name: shares[name])
    return say(
        "On this input it fits no rule; the nearest is {kind}: {share:.0%}, and that starts at "
        "{least:.0%}.",
        kind=_named(near), share=scores[near], least=head_types.LEAST[near],
    )  # fmt: skip


def _searching(figures: Numbers, seen: Seen) -> Sentence:
    """A head of no simple pattern: how many tokens it takes at a time, and how far back.

    >>> _searching({"effective_keys_mean": 1.41}, "source")
    'looks for something in the source text: about 1.4 tokens for each one that is written'
    >>> _searching({"effective_keys_mean": 1.41}, "text")
    'looks for something in the input: one token at a time'
    """
    keys, distance = figures.get("effective_keys_mean"), figures.get("distance_mean")
    if keys is None:
        return say("looks for something in the input")
    rounded = round(keys, 1) if keys < 10 else round(keys)
    match seen:
        case "source":
            return say(
                "looks for something in the source text: about {keys:g} tokens for each one that "
                "is written",
                keys=rounded,
            )
        case "prompt":
            return say(
                "looks for something in the prompt: about {keys:g} tokens for each part of the "
                "image",
                keys=rounded,
            )
        case "both":
            return say(
                "looks for something in the prompt and the image: about {keys:g} tokens at a time",
                keys=rounded,
            )
        case "image":
            return say(
                "looks for something in the image: about {keys:g} patches at a time", keys=rounded
            )
    if keys < 1.5:
        return say("looks for something in the input: one token at a time")
    if distance is None or seen == "text":
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
