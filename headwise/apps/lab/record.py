"""Results of experiments as files: written whole, read back, and known to be stale if they are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from headwise import __version__
from headwise.apps.lab.claim import Claim, Figures
from headwise.apps.lab.fingerprint import fingerprint
from headwise.files import cache_folder, write_whole
from headwise.messages import Sentence, from_json, with_chinese

RECORDED = Path(__file__).parent / "results"
"""The results that come with the package."""


@dataclass(frozen=True)
class Result:
    """The verdict on a claim, with the figures that gave it and where they come from."""

    id: str
    verdict: str
    condition: Sentence | None
    because: Sentence
    figures: Figures
    form: str  # quick or full
    command: str
    machine: str
    date: str
    seconds: float
    version: str  # of headwise
    code: str  # the fingerprint of the experiment

    def stale(self, claim: Claim) -> bool:
        """True if another version of headwise, or another experiment, gave this result."""
        return self.version != __version__ or self.code != fingerprint(claim.experiment)


def own_folder() -> Path:
    """The folder of this user's results."""
    return cache_folder() / "lab"


def file_of(folder: Path, id: str, form: str, ending: str = "json") -> Path:
    """The file of a claim's result in one form; "svg" and "zh.svg" are its pictures."""
    return folder / f"{id}.{form}.{ending}"


def write(folder: Path, result: Result) -> Path:
    """Write a result, whole or not at all; one line per field, so that changes can be compared."""
    folder.mkdir(parents=True, exist_ok=True)
    file = file_of(folder, result.id, result.form)
    fields_of = with_chinese(asdict(result)).items()
    lines = [f'"{name}": {json.dumps(value, ensure_ascii=False)}' for name, value in fields_of]
    write_whole(file, "{\n" + ",\n".join(lines) + "\n}\n")
    return file


def read(folder: Path, id: str, form: str) -> Result | None:
    """The result of a claim in a folder, None if there is none; ValueError if it is damaged."""
    file = file_of(folder, id, form)
    if not file.exists():
        return None
    try:
        content: dict[str, Any] = from_json(json.loads(file.read_text(encoding="utf-8")))
        known = {field.name: content[field.name] for field in fields(Result)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not a result of the lab ({error!r}); delete it") from error
    return Result(**known)


def best(claim: Claim, folders: Iterable[Path]) -> Result | None:
    """The result to show: a current one before a stale one, then full before quick.

    Among equals the earlier folder wins.
    """
    found = [read(folder, claim.id, form) for form in ("full", "quick") for folder in folders]
    there = [result for result in found if result is not None]
    return min(there, key=lambda result: result.stale(claim), default=None)


def described(claim: Claim, result: Result | None) -> dict[str, Any]:
    """A claim and its result as one entry of `headwise lab --json`; null where there is none."""
    entry: dict[str, Any] = {
        "id": claim.id,
        "topic": claim.topic,
        "notes": claim.notes,
        "source": claim.source,
        "sentence": claim.sentence,
        "derivation": claim.derivation,
        **{field.name: None for field in fields(Result) if field.name != "id"},
        "stale": None,
    }
    if result is not None:
        entry |= {**asdict(result), "stale": result.stale(claim)}
    return with_chinese(entry)
