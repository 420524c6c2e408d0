"""The page's "Lab": claims by topic, one claim with its results and its code, and its run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from headwise.apps.interface.page import Host, Route
from headwise.apps.interface.reply import Answer, Query, as_json, refused
from headwise.apps.lab import moves, record
from headwise.apps.lab.charts import Bars, Chart, Listing, Shown
from headwise.apps.lab.claim import KINDS, NOTES, TOPICS, Claim, Verdict
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.page_code import code
from headwise.apps.lab.page_job import LabJob
from headwise.apps.lab.record import Result
from headwise.apps.lab.revisions import REVISIONS
from headwise.apps.lab.runner import find
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
