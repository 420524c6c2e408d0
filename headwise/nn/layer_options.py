"""What a layer may be built with, refused where it is given and not at the first call."""

from __future__ import annotations

from typing import Any

from headwise.core.problem import check_mask, check_softcap, describe
from headwise.dropout import Dropout, check_rate
from headwise.engines.plan import check_engine
from headwise.nn.learned_scores import LearnedScore
from headwise.nn.norms import Norm
from headwise.nn.positions import Position
from headwise.score import Score


def check_options(
    score: object,
    position: object,
    qk_norm: object,
    mask: object,
    softcap: float | None,
    sinks: object,
    dropout: float | Dropout,
    engine: str,
) -> None:
    """Raise ValueError for what no layer can be built with."""
    check_kind("score", score, Score | LearnedScore, "hw.Dot() or hw.nn.Additive()")
    check_kind("position", position, Position | None, "hw.nn.Rotary(), hw.nn.ALiBi() or None")
    check_kind("qk_norm", qk_norm, Norm | None, "hw.nn.RMSNorm(), hw.nn.LayerNorm() or None")
    check_kind("sinks", sinks, bool, "True (they are learned) or False")
    check_mask(mask)
    check_softcap(softcap)
    if not isinstance(dropout, Dropout):
        check_rate(dropout)
    check_engine(engine)


def check_kind(name: str, given: object, kind: Any, examples: str) -> None:
    """Raise ValueError where an option is no description of the kind, such as a class of them."""
    if not isinstance(given, kind):
        raise ValueError(f"{name}= takes something like {examples}, not {describe(given)}")
