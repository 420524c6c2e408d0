"""The page's "Lab": claims by topic, one claim with its results and its code, and its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch

from headwise.apps.interface.background import Background, BusyError, StoppedError
from headwise.apps.interface.page import Host, Route
from headwise.apps.interface.reply import Answer, Query, as_json, refused
from headwise.apps.lab import moves, record
from headwise.apps.lab.charts import Bars, Chart, Listing, Shown
from headwise.apps.lab.claim import KINDS, NOTES, TOPICS, Claim, Verdict
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.page_code import code
from headwise.apps.lab.record import Result
from headwise.apps.lab.revisions import REVISIONS
from headwise.apps.lab.runner import RunProgress, find, run
from headwise.messages import Sentence, said_by, say, with_chinese


class FoundResult(NamedTuple):
    """A result and the folder it was found in."""

    folder: Path
    result: Result
    stale: bool


def listing(folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """Every claim with the verdict of its best result, and the topics in their order."""
    claims = [_summary(claim, folders) for claim in CLAIMS]
    there = {claim.topic for claim in CLAIMS}
    topics = [{"id": id, "title": title} for id, title in TOPICS.items() if id in there]
    return with_chinese({"topics": topics, "claims": claims})


def entry(id: str, folders: Sequence[Path] | None = None) -> dict[str, Any]:
    """One claim: where it comes from, its results, best first, and its code; ValueError if none."""
    claim = claim_of(id)
    results, problem = _results(claim, folders)
    return with_chinese(
        {
            "id": claim.id,
            "topic": TOPICS[claim.topic],
            "sentence": claim.sentence,
            "notes": [{"letter": letter, "about": NOTES[letter]} for letter in claim.notes],
            "derivation": claim.derivation,
            "kind": claim.kind,
            "kind_text": KINDS[claim.kind],
            "history": [asdict(each) for each in REVISIONS.get(claim.id, ())],
            "command": claim.command,
            "movable": bool(claim.moves),
            "results": [_described(claim, kept) for kept in results],
            "problem": problem,
            "experiment": [asdict(piece) for piece in code(claim.experiment)],
            "rule": [asdict(piece) for piece in code(claim.rule)],
        }
    )


def moved(id: str, key: str) -> dict[str, Any]:
    """The moves that a result allows, and the verdict at each of their positions.

    The key names the result: "own" or "recorded", and its form. ValueError if there is none.
    """
    claim = claim_of(id)
    for kept in _results(claim)[0]:
        if _key(kept) == key and not kept.stale:
            figures = kept.result.figures
            cells = [
                {"at": list(at.values()), **({} if found is None else _told(found))}
                for at, found in moves.grid(claim.moves, claim.rule, figures)
            ]
            return with_chinese({"settings": moves.settings(claim.moves, figures), "cells": cells})
    raise ValueError(say("{id} has no result {key} that can be moved", id=id, key=key))


def _told(found: Verdict) -> dict[str, Any]:
    return {"verdict": found.verdict, "condition": found.condition, "because": found.because}


def _key(kept: FoundResult) -> str:
    own = kept.folder != record.RECORDED
    return f"{'own' if own else 'recorded'}-{kept.result.form}"


def recorded() -> dict[str, dict[str, Any]]:
    """The answers of a page in a file, by their paths: of the results that come with headwise."""
    folders = [record.RECORDED]
    answers = {"/api/lab": listing(folders), "/api/lab/job": {"id": None}}
    for claim in CLAIMS:
        path = f"/api/lab/claims/{claim.id}"
        answers[path] = entry(claim.id, folders)
        for kept in _results(claim, folders)[0]:
            if claim.moves and not kept.stale:
                key = _key(kept)
                answers[f"{path}/moved?result={key}"] = moved(claim.id, key)
    return answers


def claim_of(id: str) -> Claim:
    """The claim of an id; ValueError names the nearest if there is none."""
    claim, *more = find([id])
    if claim.id != id:
        there = ", ".join(each.id for each in (claim, *more))
        raise ValueError(say("{id} is a topic; use one of {there}", id=id, there=there))
    return claim


def _summary(claim: Claim, folders: Sequence[Path] | None) -> dict[str, Any]:
    results, problem = _results(claim, folders)
    best = results[0] if results else None
    return {
        "id": claim.id,
        "topic": claim.topic,
        "sentence": claim.sentence,
        "verdict": None if best is None else best.result.verdict,
        "stale": best is not None and best.stale,
        "problem": problem,
    }


def _results(
    claim: Claim, folders: Sequence[Path] | None = None
) -> tuple[list[FoundResult], Sentence | None]:
    """The results of a claim in the order of `record.best`; a damaged one is named."""
    found, problem = [], None
    for form in ("full", "quick"):
        for folder in folders or (record.own_folder(), record.RECORDED):
            try:
                result = record.read(folder, claim.id, form)
            except ValueError as error:
                problem = said_by(error)
            else:
                if result is not None:
                    found.append(FoundResult(folder, result, result.stale(claim)))
    return sorted(found, key=lambda kept: kept.stale), problem


def _described(claim: Claim, kept: FoundResult) -> dict[str, Any]:
    """A result, with what it shows unless it is stale: drawings may not fit older figures."""
    return {
        **asdict(kept.result),
        "stale": kept.stale,
        "own": kept.folder != record.RECORDED,
        "folder": str(kept.folder),
        "shown": [] if kept.stale else [_shown(x) for x in claim.shows(kept.result.figures)],
    }


def _shown(shown: Shown) -> dict[str, Any]:
    if isinstance(shown, Bars):
        columns = [group.y for group in shown.groups]
        rows = [(name, *values) for name, *values in zip(shown.names, *columns, strict=True)]
        headings = (shown.x, *(group.label for group in shown.groups))
        shown = Listing(shown.title, headings, tuple(rows))
    kind = "chart" if isinstance(shown, Chart) else "table"
    kind = kind if isinstance(shown, Chart | Listing) else "map"
    return {"kind": kind, **asdict(shown)}


@dataclass(frozen=True)
class JobProgress:
    """The state of the last experiment: how many of its steps are done, and the current one."""

    id: str
    state: Literal["running", "stopping", "stopped", "failed", "done"] = "running"
    what: str = ""
    done: int = 0
    steps: int = 0
    seconds: float = 0.0
    error: Sentence | None = None

    @property
    def going(self) -> bool:
        """True until the experiment has ended, in whichever way."""
        return self.state in ("running", "stopping")


@dataclass
class LabJob:
    """Runs the quick form of a claim and saves it where `headwise lab run` does."""

    progress: JobProgress | None = None
    threads: int = field(default_factory=torch.get_num_threads)
    _work: Background = field(default_factory=lambda: Background("lab"))
    _lock: Lock = field(default_factory=Lock)

    def start(self, claim: Claim) -> None:
        """Run an experiment in the background; BusyError while one is running."""
        with self._lock:
            now = self.progress
            if now is not None and now.going:
                hint = say("wait for it, or stop it")
                raise BusyError(say("the lab is still running {id}", id=now.id), hint)
            self.progress = JobProgress(claim.id)
            self._work.begin(lambda: self._measure(claim))

    def _measure(self, claim: Claim) -> None:
        begun = time.monotonic()
        missing = ""

        def tell(told: RunProgress) -> None:
            nonlocal missing
            self._work.check()
            missing = told.missing
            seconds = time.monotonic() - begun
            self._change(what=told.what, done=told.done, steps=told.steps, seconds=seconds)

        # All cores, as on the command line, although an experiment of "Why" may have set one.
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        state, error = "done", None
        try:
            if not list(run([claim], Lab("quick"), record.own_folder(), again=True, tell=tell)):
                state, error = "failed", Sentence(missing)
        except StoppedError:
            state = "stopped"
        except Exception as raised:  # whatever an experiment raises is shown on the page
            known = isinstance(raised, ValueError | OSError)
            said = said_by(raised) if known else Sentence(f"{type(raised).__name__}: {raised}")
            state, error = "failed", said
        finally:
            torch.set_num_threads(before)
        self._change(state=state, error=error, seconds=time.monotonic() - begun)

    def stop(self) -> None:
        """End the experiment at its next report; nothing happens if there is none."""
        with self._lock:
            if self.progress is not None and self.progress.state == "running":
                self.progress = replace(self.progress, state="stopping")
                self._work.stop()

    def join(self, seconds: float) -> bool:
        """Wait for the experiment; True if it ended in this time."""
        return self._work.join(seconds)

    def state(self) -> dict[str, Any] | None:
        """The progress as one dictionary, as `/api/lab/job` gives it; None before the first job."""
        return None if self.progress is None else asdict(self.progress)

    def _change(self, **changes: Any) -> None:
        with self._lock:
            assert self.progress is not None
            self.progress = replace(self.progress, **changes)


def job_of(host: Host) -> LabJob:
    """The experiment that runs in the background of a session."""
    found = host.jobs.setdefault("lab", LabJob())
    assert isinstance(found, LabJob)
    return found


def claims(host: Host, query: Query) -> Answer:
    """The claims of the lab with their verdicts."""
    return as_json(listing())


def claim(host: Host, query: Query, id: str) -> Answer:
    """One claim: its results, its derivation, its code."""
    with refused(404):
        return as_json(entry(id))


def positions(host: Host, query: Query, id: str) -> Answer:
    """The verdict at every position to which a reader may move a result."""
    with refused(404):
        return as_json(moved(id, query.given.get("result", "")))


def progress(host: Host, query: Query) -> Answer:
    """The experiment that is running, or the last one; its `id` is null before the first."""
    return as_json(_progress(host))


def begin(host: Host, id: str) -> Answer:
    """Begin the experiment of a claim."""
    with refused(404):
        found = claim_of(id)
    job_of(host).start(found)
    return as_json(_progress(host), 202)


def end(host: Host) -> Answer:
    """End the experiment that is running."""
    job_of(host).stop()
    return as_json(_progress(host), 202)


def _progress(host: Host) -> dict[str, Any]:
    return with_chinese(job_of(host).state() or {"id": None})


CLAIM = r"([a-z][a-z0-9-]{0,60})"
ROUTES: tuple[Route, ...] = (
    (r"/api/lab", claims),
    (r"/api/lab/job", progress),
    (rf"/api/lab/claims/{CLAIM}", claim),
    (rf"/api/lab/claims/{CLAIM}/moved", positions),
)
POSTS: tuple[Route, ...] = (
    (rf"/api/lab/claims/{CLAIM}/run", begin),
    (r"/api/lab/stop", end),
)
