"""The heads worth a look first: those that lead all others in something."""

from __future__ import annotations

from headwise.look.scene import Group, Head

RECORDS = (
    ("previous_mass_mean", "looks most at the token before"),
    ("induction_mean", "looks most at what followed the same token last time"),
    ("self_mass_mean", "looks most at itself"),
    ("sink_mass_mean", "looks most at the first token"),
    ("top_prob_mean", "is most decided"),
    ("effective_keys_mean", "spreads most widely"),
    ("max_logit_max", "has the largest logit"),
)
"""What a head can be first in of all. Of cross-attention only the last three say anything."""


def records(group: Group) -> list[tuple[Head, str]]:
    """The heads that are first in something, and in what; each once."""
    found: dict[str, tuple[Head, str]] = {}
    for figure, reason in RECORDS if group.square else RECORDS[-3:]:
        able = [head for head in group.heads if figure in head.figures]
        if able:
            head = max(able, key=lambda head: head.figures[figure])
            found.setdefault(head.name, (head, reason))
    return list(found.values())
