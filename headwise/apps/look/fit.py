"""Remarks on a model that does not fit its input: an unknown script, weights never trained."""

from __future__ import annotations

from collections.abc import Sequence

from headwise.apps.look.scene import Group, Input
from headwise.messages import Sentence, say

CUT = 0.3
"""The tokeniser does not know a script if this share of the tokens only continue a character."""

EVEN = 0.95
"""A model looks untrained if the weights of this share of its heads are nearly even."""

SPREAD = 0.9
"""Weights are nearly even if they spread over this share of the keys that a row sees."""


def remarks(read: Input) -> tuple[Sentence, ...]:
    """What someone should know before reading these maps; nothing for a model that fits."""
    found = [_cut(group.columns) for group in read.groups[:1] if read.kind != "image"]
    return tuple(said for said in (*found, _untrained(read.groups)) if said is not None)


def _cut(tokens: Sequence[str]) -> Sentence | None:
    """The remark on a text in a script that the tokeniser has not learnt; None for others.

    A token that continues a character is written as an empty piece.

    >>> print(_cut(["⟨start⟩", "我", "", "", "们", "", ""]))
    the tokeniser does not know this script: it cuts each character into about 3 pieces (· ...
    >>> _cut(["to", " be", " or"]) is None
    True
    """
    pieces = sum(token == "" for token in tokens)
    if pieces < CUT * len(tokens):
        return None
    whole = sum(_is_cut(tokens, at) for at in range(len(tokens)))
    return say(
        "the tokeniser does not know this script: it cuts each character into about {pieces} "
        "pieces (· continues one), so the model has hardly learnt from it and its heads find "
        "little; try a text in the language it was trained on, or train a model on yours: "
        "headwise train language --data FILE --out RUN",
        pieces=round((whole + pieces) / max(1, whole)),
    )


def _is_cut(tokens: Sequence[str], at: int) -> bool:
    return tokens[at] != "" and at + 1 < len(tokens) and tokens[at + 1] == ""


def _untrained(groups: Sequence[Group]) -> Sentence | None:
    """The remark on a model whose heads all give nearly even weights."""
    shares = [head.scores.get("uniform", 0.0) for group in groups for head in group.heads]
    if len(shares) < 2 or sum(share >= SPREAD for share in shares) < EVEN * len(shares):
        return None
    return say(
        "nearly all heads give even weights: this model looks untrained; were its weights loaded?"
    )
