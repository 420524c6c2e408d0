"""Long work of the lab in sessions of minutes: the next pieces, then the claims that need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.lab import ablations, pieces, pool, runner
from headwise.lab.claim import Claim
from headwise.lab.fingerprint import covered
from headwise.lab.laboratory import Lab
from headwise.lab.pool import Ended, Job

RUN = "lab run"
TIMED = "headwise.lab.counting.in_turns"
"""The function by which experiments measure time; one that uses it runs alone."""

Tell = Callable[[Ended], None]


@dataclass(frozen=True)
class LabSession:
    """A lab with its folder, how many processes may work in it, and for how long."""

    lab: Lab
    workers: int
    seconds: float
    tell: Tell

    @property
    def folder(self) -> Path:
        """The folder of results and pieces."""
        assert self.lab.folder is not None
        return self.lab.folder

    def job(self, name: str, *arguments: str, alone: bool = False) -> Job:
        """A command of the lab with this session's form, folder and device."""
        form = ("--full",) if self.lab.form == "full" else ("--form", self.lab.form)
        place = ("--out", str(self.folder), "--device", str(self.lab.device))
        return Job(name, ("lab", *arguments, *form, *place), alone)

    def work(self, what: str, jobs: Sequence[Job], seconds: float) -> list[Ended]:
        """Run jobs and note the session."""
        begun = time.monotonic()
        ended = pool.work(
            jobs,
            workers=self.workers,
            seconds=seconds,
            logs=self.folder / "logs",
            tell=self.tell,
        )
        if jobs:
            done = [each.name for each in ended if each.code == 0]
            pool.note(self.folder, what, self.lab.device, time.monotonic() - begun, done)
        return ended


def train_table(session: LabSession) -> tuple[int, int]:
    """Train the next translators of the table and write it; how many are done, of how many."""
    session.folder.mkdir(parents=True, exist_ok=True)
    planned = pieces.translators(session.lab)
    left = [piece for piece in planned if not piece.done(session.lab)]
    jobs = [session.job(piece.name, "piece", piece.name) for piece in left]
    session.work(ablations.COMMAND, jobs, session.seconds)
    file = f"translation.{session.lab.form}.json"
    return ablations.collect(session.lab, session.folder / file), len(planned)


def run_claims(session: LabSession, claims: Sequence[Claim]) -> list[Claim]:
    """Run claims in several processes; those that have no current result at the end.

    First the pieces that they need and, beside them, the claims that need none; then the claims
    whose pieces are complete. Claims that measure time come first, each by itself.
    """
    session.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + session.seconds
    waiting = unfinished(session.lab, claims)
    every = pieces.every(session.lab)
    needed = {claim.id: pieces.needed(claim, every) for claim in waiting}
    missing = {x.name: x for of in needed.values() for x in of if not x.done(session.lab)}
    free = [claim for claim in waiting if not any(x.name in missing for x in needed[claim.id])]
    jobs = [session.job(name, "piece", name) for name in missing]
    session.work(RUN, claim_jobs(session, free) + jobs, deadline - time.monotonic())
    freed = [
        claim
        for claim in unfinished(session.lab, claims)
        if claim not in free and all(x.done(session.lab) for x in needed[claim.id])
    ]
    session.work(RUN, claim_jobs(session, freed), max(0.0, deadline - time.monotonic()))
    return unfinished(session.lab, claims)


def unfinished(lab: Lab, claims: Sequence[Claim]) -> list[Claim]:
    """The claims that have no current result in the lab's folder."""
    assert lab.folder is not None
    return [claim for claim in claims if runner.current(claim, lab.form, lab.folder) is None]


def claim_jobs(session: LabSession, claims: Sequence[Claim]) -> list[Job]:
    """One job for each experiment, with all claims that share it."""
    by_experiment: dict[object, list[Claim]] = {}
    for claim in claims:
        by_experiment.setdefault(claim.experiment, []).append(claim)
    return [
        session.job(
            of[0].id, "run", *(claim.id for claim in of), alone=TIMED in covered(of[0].experiment)
        )
        for of in by_experiment.values()
    ]
