"""The list of a folder's sessions of long work: when, where, for how long, what was finished."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from headwise import devices

SESSIONS = "sessions.jsonl"
"""One line for every session."""


def note(
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
