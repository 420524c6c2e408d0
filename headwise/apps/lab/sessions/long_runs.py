"""Long work of the lab in sessions of minutes: the next pieces, then the claims that need them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headwise.apps.lab import ablations, record, runner
from headwise.apps.lab.claim import Claim
from headwise.apps.lab.fingerprint import covered
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.sessions import pieces, pool
from headwise.apps.lab.sessions.pieces import TrainingPiece
from headwise.apps.lab.sessions.pool import Ended, Job
from headwise.apps.lab.translation_runs import learn_subwords

RUN = "lab run"
TIMED = "headwise.apps.lab.counting.in_turns"
"""The function by which experiments measure time; one that uses it runs alone."""

Tell = Callable[[Ended], None]


@dataclass(frozen=True)
class LabSession:
    """A lab with its folder, how many processes may work in it, and for how long."""

    lab: Lab
    workers: int
    seconds: float
    tell: Tell
    watch: Callable[[str, str], None] = lambda name, line: None

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

    def piece_jobs(self, left: Sequence[TrainingPiece]) -> list[Job]:
        """A job for each piece that trains on a GPU; others are dealt out to the workers."""
        alone = [x.name for x in left if x.alone]
        names = [x.name for x in left if not x.alone]
        hands = min(self.workers, len(names))
        dealt = {f"worker-{number}": names[number::hands] for number in range(hands)}
        return [
            *(self.job(name, "piece", name) for name in alone),
            *(self.job(name, "piece", *of) for name, of in dealt.items()),
        ]

    def work(self, what: str, jobs: Sequence[Job], deadline: float) -> None:
        """Run jobs and note the session; it ends by the deadline, what is saved included."""
        begun = time.monotonic()
        seconds = max(0.0, deadline - begun)
        ended = pool.work(
            jobs,
            workers=self.workers,
            seconds=seconds - min(pool.STOPPING, seconds / 10),
            logs=self.folder / "logs",
            tell=self.tell,
            watch=self.watch,
        )
        if jobs:
            done = [each.name for each in ended if each.code == 0]
            record.note_session(self.folder, what, self.lab.device, time.monotonic() - begun, done)


def train_table(session: LabSession) -> tuple[int, int]:
    """Train the next translators of the table and write it; how many are done, of how many."""
    session.folder.mkdir(parents=True, exist_ok=True)
    planned = pieces.translators(session.lab)
    left = [piece for piece in planned if not piece.done(session.lab)]
    deadline = time.monotonic() + session.seconds
    if left and session.seconds:
        learn_subwords(session.lab)
    jobs = session.piece_jobs(left) if session.seconds else []  # none: what is kept is written
    if jobs and not (timed := pieces.times(session.lab)).done(session.lab):
        jobs = [session.job(timed.name, "piece", timed.name, alone=True), *jobs]
    session.work(ablations.COMMAND, jobs, deadline)
    file = f"translation.{session.lab.form}.json"
    return ablations.collect(session.lab, session.folder / file), len(planned)


def run_claims(session: LabSession, claims: Sequence[Claim]) -> list[Claim]:
    """Run claims in several processes; those that have no current result at the end.

    First the pieces that they need and, beside them, the claims that need none; then the claims
    that have all their pieces. Claims that measure time come first, by themselves.
    """
    session.folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + session.seconds
    waiting = unfinished(session.lab, claims)
    every = pieces.every(session.lab)
    needed = {claim.id: pieces.needed(claim, every) for claim in waiting}
    missing = {x.name: x for of in needed.values() for x in of if not x.done(session.lab)}
    free = [claim for claim in waiting if not any(x.name in missing for x in needed[claim.id])]
    jobs = session.piece_jobs(list(missing.values()))
    session.work(RUN, claim_jobs(session, free) + jobs, deadline)
    rest = [claim for claim in unfinished(session.lab, claims) if claim not in free]
    # those that lack a piece end at once
    session.work(RUN, claim_jobs(session, rest, "--only-read"), deadline)
    return unfinished(session.lab, claims)


def unfinished(lab: Lab, claims: Sequence[Claim]) -> list[Claim]:
    """The claims that have no current result in the lab's folder."""
    assert lab.folder is not None
    return [claim for claim in claims if runner.current(claim, lab.form, lab.folder) is None]


def claim_jobs(session: LabSession, claims: Sequence[Claim], *options: str) -> list[Job]:
    """One job for each experiment, with all claims that share it; one for all that measure time.

    Those run alone, so that each would keep the machine waiting until its process has started.
    """
    by_experiment: dict[object, list[str]] = {}
    timed: list[str] = []
    for claim in claims:
        alone = TIMED in covered(claim.experiment)
        of = timed if alone else by_experiment.setdefault(claim.experiment, [])
        of.append(claim.id)
    jobs = [session.job(of[0], "run", *of, *options) for of in by_experiment.values()]
    return [session.job("timed", "run", *timed, alone=True), *jobs] if timed else jobs
