"""Run the experiments of claims: judge their figures, write results and pictures, resume."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from headwise import __version__, devices
from headwise.apps.lab import design, own_claims, record
from headwise.apps.lab.claim import TOPICS, Claim, Verdict, both
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.drawing import draw
from headwise.apps.lab.estimates import NoStatisticsError
from headwise.apps.lab.fingerprint import fingerprint
from headwise.apps.lab.laboratory import CPU, Lab, plain
from headwise.apps.lab.record import Result
from headwise.apps.train.data.packages import CorpusUnavailableError
from headwise.messages import say


def find(ids: Sequence[str], *, files: bool = False) -> list[Claim]:
    """The claims of these ids, topics or files, in the order of the list; ValueError if unknown.

    With `files`, a name that ends in .py is a file of your own claims, which is run: never let a
    request name it.

    >>> [claim.id for claim in find(["scale-variance"])]
    ['scale-variance']
    """
    known = {claim.id for claim in CLAIMS}
    own = [id for id in ids if files and id.endswith(".py")]
    for id in ids:
        if id in own:
            continue
        if id not in known and id not in TOPICS:
            begun = sorted(name for name in (*known, *TOPICS) if name.startswith(id))
            near = begun or difflib.get_close_matches(id, [*known, *TOPICS], 1)
            if not near:
                raise ValueError(
                    say(
                        "there is no claim {id!r}; headwise lab lists them all, and a claim of "
                        "your own is named by its file, as in my_claim.py",
                        id=id,
                    )
                )
            raise ValueError(
                say(
                    "there is no claim {id!r}; did you mean {nearest}? headwise lab lists them all",
                    id=id,
                    nearest=" / ".join(near),
                )
            )
    built_in = [claim for claim in CLAIMS if claim.id in ids or claim.topic in ids]
    return built_in + [claim for id in own for claim in own_claims.claims_in(Path(id), known)]


@dataclass(frozen=True)
class RunProgress:
    """A report of progress: the claim, its place in the list, and how far its experiment is."""

    claim: Claim
    number: int
    of: int
    what: str = ""
    done: int = 0
    steps: int = 0
    missing: str = ""  # the reason why the claim can't be run here


def run(
    claims: Sequence[Claim],
    lab: Lab,
    out: Path,
    *,
    again: bool = False,
    tell: Callable[[RunProgress], None] = lambda told: None,
) -> Iterator[Result]:
    """Run claims one after the other and write each result as soon as it stands.

    A claim whose figures are in `out` already, from this code, is judged anew and not run again,
    unless `again`: an interrupted run goes on where it was, and claims that share an experiment
    share its run. A claim whose corpus can't be downloaded is reported and left out.
    """
    out.mkdir(parents=True, exist_ok=True)
    fresh: dict[object, Result] = {}  # by experiment: several claims may share one
    for number, claim in enumerate(claims):
        told = RunProgress(claim, number, len(claims))
        tell(told)

        def report(what: str, done: int, steps: int, told: RunProgress = told) -> None:
            tell(replace(told, what=what, done=done, steps=steps))

        found = fresh.get(claim.experiment)
        if found is None and not again:
            found = current(claim, lab.form, out)
        try:
            device = lab.device if claim.gpu else CPU
            here = replace(lab, folder=out, report=report, device=device)
            found = found or experimented(claim, here)
        except CorpusUnavailableError as error:
            tell(replace(told, missing=str(error)))
            continue
        fresh[claim.experiment] = result = judged(claim, found)
        record.write(out, result)
        draw(claim.shows(result.figures), record.file_of(out, claim.id, lab.form, "svg"))
        yield result


def experimented(claim: Claim, lab: Lab) -> Result:
    """Run the experiment of a claim; the figures are judged afterwards."""
    begun, used = time.monotonic(), len(lab.pieces)
    figures = plain(claim.experiment(lab))
    pieces = lab.pieces[used:]  # what was measured earlier took its time then and there
    machines = [devices.machine(lab.device), *(x["machine"] for x in pieces if x)]
    return Result(
        id=claim.id,
        verdict="undecided",
        condition=None,
        because=claim.sentence,
        figures=figures,
        form=lab.form,
        command="",
        machine=" / ".join(dict.fromkeys(machines)),
        date=datetime.now(UTC).date().isoformat(),
        seconds=round(time.monotonic() - begun + sum(x.get("seconds", 0.0) for x in pieces), 1),
        version=__version__,
        code=fingerprint(claim.experiment),
        design_hash=design.design_hash(claim),
        commit=design.commit(),
        settings=lab.settings,
    )


def judged(claim: Claim, found: Result) -> Result:
    """The result of a claim from figures of its experiment.

    Its design is the one that was registered when the figures were measured: a rule that changed
    afterwards judges them too, and the result keeps no hash.
    """
    try:
        verdict = claim.rule(found.figures)
    except NoStatisticsError as error:
        verdict = Verdict(
            "undecided", both("not judged yet: {error}", "尚未判定：{error}", error=error)
        )
    words = [claim.command, *(["--full"] if found.form == "full" else [])]
    words += [f"--set {name}={design.written(value)}" for name, value in found.settings.items()]
    hashed = design.design_hash(claim)
    same = found.id != claim.id or found.design_hash == hashed
    known = found.design_hash is not None and same
    return replace(
        found,
        id=claim.id,
        command=" ".join(words),
        verdict=verdict.verdict,
        condition=verdict.condition,
        because=verdict.because,
        interval=verdict.interval,
        power=verdict.power,
        design_hash=hashed if known else None,
        commit=found.commit if known else None,
    )


def current(claim: Claim, form: str, out: Path) -> Result | None:
    """A current result of this claim in a folder, or of another one with the same experiment."""
    siblings = [each for each in CLAIMS if each.experiment == claim.experiment]
    for each in (claim, *siblings):
        result = record.read(out, each.id, form)
        if result is not None and not result.stale(each):
            return result
    return None
