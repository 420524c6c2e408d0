"""Several trainings in one process, a step of each in turn, so that a GPU works on all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.sessions.pieces import TrainingPiece
from headwise.apps.lab.translation_runs import Training

TOLD = 10.0
"""Seconds between two reports."""


@dataclass
class StartedTraining:
    """A piece that is being trained."""

    piece: TrainingPiece
    training: Training
    begun: float = field(default_factory=time.monotonic)
    step: int = 0


@dataclass
class SideBySide:
    """Pieces in training, `at_once` of them in turn, until they are done or `seconds` are over.

    `stopped` is asked between two steps. What is in training then is saved, and resumes when it is
    trained again. A piece starts only if the longest one so far would still fit.
    """

    lab: Lab
    at_once: int
    seconds: float
    stopped: Callable[[], bool]
    tell: Callable[[str], None]
    steps: int = 0
    longest: float = 0.0
    failed: list[str] = field(default_factory=list)
    running: list[StartedTraining] = field(default_factory=list)

    def make(self, pieces: Sequence[TrainingPiece]) -> None:
        """Train the pieces in this order and keep the figures of each."""
        begun = told = time.monotonic()
        waiting = [piece for piece in pieces if not piece.done(self.lab)]
        try:
            while waiting or self.running:
                left = self.seconds - (time.monotonic() - begun)
                if self.stopped() or left <= 0:
                    return
                while waiting and len(self.running) < self.at_once and left > self.longest:
                    self.start(waiting.pop(0))
                if not self.running:
                    return
                for each in list(self.running):
                    self.advance(each)
                if time.monotonic() - told > TOLD:
                    told = time.monotonic()
                    self.tell(self.report(told - begun))
        finally:
            for each in self.running:
                each.training.close()  # which saves it
            self.tell(self.report(time.monotonic() - begun))

    def start(self, piece: TrainingPiece) -> None:
        """Begin a piece, or resume it."""
        assert piece.in_steps is not None
        folder = self.lab.place(piece.name, piece.compute, **piece.settings)
        training = piece.in_steps(self.lab, folder, **piece.settings)
        self.running.append(StartedTraining(piece, training))

    def advance(self, each: StartedTraining) -> None:
        """Take a step; keep the figures after the last one. A failure stops no other piece."""
        piece = each.piece
        try:
            each.step = next(each.training)
            self.steps += 1
            return
        except StopIteration as finished:
            seconds = time.monotonic() - each.begun
            figures = self.lab.store(
                piece.name, piece.compute, finished.value, seconds, **piece.settings
            )
            self.longest = max(self.longest, seconds)
            bleu = "diverged" if figures["diverged"] else f"BLEU {figures['bleu']:.2f}"
            self.tell(f"{piece.name}  {bleu}  {seconds:.1f} s")
        except Exception as error:
            self.failed.append(piece.name)
            self.tell(f"{piece.name} failed: {error!r}")
        self.running.remove(each)

    def report(self, seconds: float) -> str:
        """The speed so far, and the step of each piece in training."""
        at = ", ".join(f"{x.piece.name} {x.step}" for x in self.running) or "no training"
        return f"{self.steps / max(seconds, 1e-9):.0f} steps/s since the start; at {at}"
