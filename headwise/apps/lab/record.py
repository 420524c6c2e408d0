"""Results of experiments as files: written whole, read back, and known to be stale if they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from headwise import __version__, devices
from headwise.apps.lab import design
from headwise.apps.lab.charts import cells
from headwise.apps.lab.claim import VERDICTS, Claim, Figures
from headwise.apps.lab.fingerprint import fingerprint
from headwise.apps.lab.revisions import REVISIONS
from headwise.files import cache_folder, read_json, write_whole
from headwise.messages import Sentence, from_json, with_chinese

RECORDED = Path(__file__).parent / "results"
"""The results that come with the package."""


TEXT = (str, Sentence)
TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "verdict", "because", "form", "command", "machine", "date"), TEXT),
    **dict.fromkeys(("version", "code"), TEXT),
    "condition": (*TEXT, type(None)),
    "figures": (dict,),
    "seconds": (int, float),
    "interval": (dict, type(None)),
    "power": (int, float, type(None)),
    "design_hash": (str, Sentence, type(None)),
    "commit": (str, Sentence, type(None)),
    "settings": (dict,),
}
"""The types that the fields of a result have in its file."""
LATER: dict[str, Any] = {
    **dict.fromkeys(("interval", "power", "design_hash", "commit")),
    "settings": {},
}
"""What the results of before designs were registered do not have."""


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
    interval: Mapping[str, Any] | None = None  # of the comparison that decided
    power: float | None = None  # to show a difference that matters
    design_hash: str | None = None  # None: measured before designs were registered
    commit: str | None = None  # of the code that measured
    settings: Mapping[str, Any] = field(default_factory=dict)  # those that a user replaced

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
        content: dict[str, Any] = from_json(read_json(file))
        content = LATER | content
        known = {field.name: content[field.name] for field in fields(Result)}
        wrong = [name for name, kinds in TYPES.items() if type(known[name]) not in kinds]
        if wrong or known["verdict"] not in VERDICTS or known["id"] != id:
            raise ValueError(f"its {(wrong or ['verdict or id'])[0]} is not what it should be")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, error) from error
    return Result(**known)


def _damaged(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is not a result of the lab ({error!r:.200}); delete it")


def best(claim: Claim, folders: Iterable[Path]) -> Result | None:
    """The result to show: a current one before a stale one, then full before quick.

    Among equals the earlier folder wins.
    """
    there = [
        (file_of(folder, claim.id, form), result)
        for form in ("full", "quick")
        for folder in folders
        if (result := read(folder, claim.id, form)) is not None
    ]
    if not there:
        return None
    file, result = min(there, key=lambda found: found[1].stale(claim))
    if not result.stale(claim):  # older figures may not fit, and are not drawn
        _check_figures(file, claim, result)
    return result


def _check_figures(file: Path, claim: Claim, result: Result) -> None:
    """ValueError if the figures of a result can't be shown."""
    try:
        for shown in claim.shows(result.figures):
            _, rows = cells(shown)
            if not all(isinstance(cell, str) for row in rows for cell in row):
                raise ValueError("a figure is neither a number nor a text")
    except Exception as error:  # whatever damage does to figures
        raise _damaged(file, error) from error


def described(claim: Claim, result: Result | None) -> dict[str, Any]:
    """A claim and its result as one entry of `headwise lab --json`; null where there is none."""
    entry: dict[str, Any] = {
        "id": claim.id,
        "topic": claim.topic,
        "notes": claim.notes,
        "source": claim.source,
        "sentence": claim.sentence,
        "derivation": claim.derivation,
        "kind": claim.kind,
        "design": design.settings(claim),
        "history": [asdict(each) for each in REVISIONS.get(claim.id, ())],
        **{field.name: None for field in fields(Result) if field.name != "id"},
        "stale": None,
        "registered": None,
    }
    if result is not None:
        entry |= {**asdict(result), "stale": result.stale(claim)}
        entry["registered"] = result.design_hash is not None and result.commit is not None
        if claim.kind == "read":  # a quotation needs no machine
            entry["machine"] = None
    return with_chinese(entry)


SESSIONS = "sessions.jsonl"
"""The list of a folder's sessions of long work: when, where, for how long, what was finished."""


def note_session(
    folder: Path, what: str, device: torch.device, seconds: float, done: Sequence[str]
) -> None:
    """Add a session to the folder's list."""
    line = {
        "what": what,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": devices.machine(device),
        "seconds": round(seconds, 1),
        "done": list(done),
    }
    with (folder / SESSIONS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def sessions(folder: Path, what: str) -> list[dict[str, object]]:
    """The sessions of a kind that a folder lists."""
    file = folder / SESSIONS
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["what"] == what]
