"""Run the experiments of claims: judge their figures, write results and pictures, resume."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headwise import devices
from headwise.lab import record
from headwise.lab.claim import TOPICS, Claim
from headwise.lab.claims import CLAIMS
from headwise.lab.drawing import draw
from headwise.lab.fingerprint import fingerprint
from headwise.lab.laboratory import Lab, plain
from headwise.lab.record import Result
from headwise.messages import say
from headwise.version import __version__


def find(ids: Sequence[str]) -> list[Claim]:
    """The claims of these ids or topics, in the order of the list; ValueError for an unknown one.

    >>> [claim.id for claim in find(["scale-variance"])]
    ['scale-variance']
    """
    known = {claim.id for claim in CLAIMS}
    for id in ids:
        if id not in known and id not in TOPICS:
            nearest = difflib.get_close_matches(id, [*known, *TOPICS], 1, cutoff=0.0)[0]
            raise ValueError(
                say(
                    "there is no claim {id!r}; did you mean {nearest}? headwise lab lists them all",
                    id=id,
                    nearest=nearest,
                )
            )
    return [claim for claim in CLAIMS if claim.id in ids or claim.topic in ids]


@dataclass(frozen=True)
class Told:
    """A report of progress: the claim, its place in the list, and how far its experiment is."""

    claim: Claim
    number: int
    of: int
    what: str = ""
    done: int = 0
    steps: int = 0


def run(
    claims: Sequence[Claim],
    lab: Lab,
    out: Path,
    *,
    again: bool = False,
    tell: Callable[[Told], None] = lambda told: None,
) -> Iterator[Result]:
    """Run claims one after the other and write each result as soon as it stands.

    A claim whose figures are in `out` already, from this code, is judged anew and not run again,
    unless `again`: an interrupted run goes on where it was.
    """
    out.mkdir(parents=True, exist_ok=True)
    for number, claim in enumerate(claims):
        told = Told(claim, number, len(claims))
        tell(told)

        def report(what: str, done: int, steps: int, told: Told = told) -> None:
            tell(replace(told, what=what, done=done, steps=steps))

        result = measured(claim, replace(lab, folder=out, report=report), out, again)
        record.write(out, result)
        draw(claim.shows(result.figures), record.file_of(out, claim.id, lab.form, "svg"))
        yield result


def measured(claim: Claim, lab: Lab, out: Path, again: bool = False) -> Result:
    """The result of one claim: of the figures in `out` if they are current, else of a new run."""
    before = record.read(out, claim.id, lab.form)
    if before is None or before.stale(claim) or again:
        begun = time.monotonic()
        figures = plain(claim.experiment(lab))
        seconds = round(time.monotonic() - begun, 1)
        before = Result(
            id=claim.id,
            verdict="",
            condition=None,
            because=claim.sentence,
            figures=figures,
            form=lab.form,
            command=f"headwise lab run {claim.id}" + (" --full" if lab.form == "full" else ""),
            machine=devices.machine(lab.device),
            date=datetime.now(UTC).date().isoformat(),
            seconds=seconds,
            version=__version__,
            code=fingerprint(claim.experiment),
        )
    judged = claim.rule(before.figures)
    return replace(
        before, verdict=judged.verdict, condition=judged.condition, because=judged.because
    )
