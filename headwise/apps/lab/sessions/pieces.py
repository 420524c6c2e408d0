"""The long pieces of experiments: trainings that several processes can share out among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.apps.lab.ablations import plan
from headwise.apps.lab.claim import Claim
from headwise.apps.lab.claims.dot_quality import at_widths, on_few, on_relation
from headwise.apps.lab.claims.examples import chinese_runs
from headwise.apps.lab.claims.positions import readings
from headwise.apps.lab.claims.qk_training import on_tasks, watched_trainings
from headwise.apps.lab.claims.recalling import by_content, by_place, over_distances
from headwise.apps.lab.claims.rivals_phase import phase_pieces
from headwise.apps.lab.claims.scale_atlas import atlas_pieces
from headwise.apps.lab.claims.scale_training import cells
from headwise.apps.lab.claims.settings import in_settings
from headwise.apps.lab.claims.translation_quality import CLAIMED
from headwise.apps.lab.fingerprint import covered
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.masked_characters import read_sentence
from headwise.apps.lab.translation_runs import seeds_of, step_times, train

READERS = (
    over_distances,
    at_widths,
    on_few,
    on_relation,
    on_tasks,
    by_content,
    by_place,
    cells,
    in_settings,
    watched_trainings,
    readings,
)
"""Trainings of small readers, the longest first; the last pieces of each are the largest."""


@dataclass(frozen=True)
class TrainingPiece:
    """The arguments of `Lab.keep`: a name, the function that trains, and its settings."""

    name: str
    compute: Callable[..., Mapping[str, Any]]
    settings: Mapping[str, Any]
    alone: bool = False  # in a process of its own: it trains on a GPU

    def done(self, lab: Lab) -> bool:
        """True if the lab has it."""
        return lab.kept(self.name, self.compute, **self.settings) is not None

    def make(self, lab: Lab) -> dict[str, Any]:
        """The figures of the piece, computed if the lab does not have it."""
        return lab.keep(self.name, self.compute, **self.settings)


def needed(claim: Claim, pieces: Sequence[TrainingPiece]) -> list[TrainingPiece]:
    """The pieces whose function the experiment of a claim uses; of translators, any claim's."""
    uses = covered(claim.experiment)
    found = [x for x in pieces if f"{x.compute.__module__}.{x.compute.__qualname__}" in uses]
    return [x for x in found if x.settings.get("variant", "base") in CLAIMED]


def translators(lab: Lab) -> list[TrainingPiece]:
    """The trainings behind the translation table."""
    return [
        TrainingPiece(
            f"translate-{variant}",
            train,
            {"variant": variant, "seeds": seeds_of(lab, variant)},
            alone=True,
        )
        for variant in plan(lab)
    ]


def times(lab: Lab) -> TrainingPiece:
    """The time of a step of each row of the table."""
    return TrainingPiece("step-times", step_times, {})


def every(lab: Lab) -> list[TrainingPiece]:
    """All pieces of a form, the longest first."""
    return [
        *(
            TrainingPiece(
                f"chinese-{kind}-{seed}", read_sentence, {"kind": kind, "seed": seed}, alone=True
            )
            for kind, seed in chinese_runs(lab)
        ),
        times(lab),
        *translators(lab),
        *(TrainingPiece(*each, alone=True) for each in (*atlas_pieces(lab), *phase_pieces(lab))),
        *(TrainingPiece(*each) for of in READERS for each in reversed(of(lab))),
    ]
