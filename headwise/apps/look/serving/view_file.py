"""One view of the page as one file, without a model: the lab, a report, or a watched run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.apps.look.pages import PAGES
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.serving.page_file import STATIC, template
from headwise.apps.look.session import Progress, Session
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.files import write_whole
from headwise.messages import with_chinese
from headwise.version import __version__

MOST_NUMBERS = 60_000
"""The most numbers of one figure in the file: fewer steps of a longer run."""

Told = Mapping[str, Any]  # what the page asks for, by its address


def write(view: str, answers: Told, path: Path, static: Path = STATIC) -> int:
    """Write the page with this view alone, and the answers that it asks for; returns the size."""
    session = Session(progress=Progress("ready", None))
    return _write({**_state(session, view), **answers}, path, template(static))


def write_run(
    folder: Path, path: Path, beside: Path | None = None, limit: int = 20_000_000,
    static: Path = STATIC,
) -> int:  # fmt: skip
    """Write a run, and perhaps another one beside it, as a page of at most `limit` bytes.

    The story is inside, and the figures that it tells of come before the others. Returns the size;
    ValueError if the folder holds no run.
    """
    other = None if beside is None else WatchedFolder(beside)
    session = Session(run=WatchedFolder(folder), beside=other, progress=Progress("ready", None))
    around = template(static)
    told = _state(session, "watch") | _figures(session, limit - sum(map(len, around)))
    return _write(told, path, around)


def _write(told: Told, path: Path, around: tuple[str, str]) -> int:
    """Write a page with these answers inside; returns the size."""
    kept = {"version": __version__, "answers": {x: {"json": y} for x, y in told.items()}}
    data = json.dumps(kept, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    content = data.join(around).encode(errors="replace")
    write_whole(path.resolve(), content)
    return len(content)


def _state(session: Session, view: str) -> dict[str, Any]:
    """The answer that says which view there is."""
    pages = {name: name == view for name in ("heads", *PAGES)}
    state = session.state() | {"pages": pages, "static": {"heads": [], "reasons": []}}
    return {"/api/state": with_chinese(state)}


def _figures(session: Session, room: int) -> dict[str, Any]:
    """The answers that the page asks for about runs, as many figures as there is room for."""
    answers: dict[str, Any] = {}
    for number, run in enumerate((session.run, session.beside)):
        if run is None:
            continue
        asked = f"?run={number}" if number else ""
        known, story = (_answered(session, f"/api/watch{x}{asked}") for x in ("", "/story"))
        answers |= {f"/api/watch{asked}": known, f"/api/watch/story{asked}": story}
        room -= sum(len(json.dumps(x)) for x in (known, story))
        first = [chapter["figure"] for chapter in story["chapters"] if chapter["figure"]]
        usual = [x for x in known["statistics"] if x.startswith(("entropy_mean", "max_"))]
        inside: set[str] = set()
        for figure in dict.fromkeys((*first, *usual, *known["statistics"])):
            course = run.series(figure, most=MOST_NUMBERS)
            room -= len(json.dumps(course))
            if room < 0:
                break
            inside.add(figure)
            answers[f"/api/watch/series?statistic={figure}{asked.replace('?', '&')}"] = course
        known["statistics"] = [x for x in known["statistics"] if x in inside]
    return answers


def _answered(session: Session, path: str) -> dict[str, Any]:
    given = answer(session, path)
    found: dict[str, Any] = json.loads(given.body)
    if given.status != 200:
        raise ValueError(found["error"])
    return found
