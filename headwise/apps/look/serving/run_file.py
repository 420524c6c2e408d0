"""A watched run as one file: its story, and every figure of every head over the steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headwise.apps.look.pages import PAGES
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.serving.page_file import STATIC, template
from headwise.apps.look.session import Progress, Session
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.files import write_whole
from headwise.messages import with_chinese

MOST_NUMBERS = 60_000
"""The most numbers of one figure in the file: fewer steps of a longer run."""


def write(
    folder: Path, path: Path, beside: Path | None = None, limit: int = 20_000_000,
    static: Path = STATIC,
) -> int:  # fmt: skip
    """Write a run, and perhaps another one beside it, as a page of at most `limit` bytes.

    The story is inside, and the figures that it tells of come before the others. Returns the size;
    ValueError if the folder holds no run.
    """
    other = None if beside is None else WatchedFolder(beside)
    session = Session(run=WatchedFolder(folder), beside=other, progress=Progress("ready", None))
    before, after = template(static)
    answers = _recorded(session, limit - len(before) - len(after))
    data = json.dumps(answers, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    content = (before + data + after).encode(errors="replace")
    write_whole(path.resolve(), content)
    return len(content)


def _recorded(session: Session, room: int) -> dict[str, Any]:
    """The answers that the page asks for, as many figures as there is room for."""
    state = session.state()
    pages = {name: name == "watch" for name in ("heads", *PAGES)}
    state |= {"pages": pages, "static": {"heads": []}}
    answers = {"/api/state": {"json": with_chinese(state)}}
    for number, run in enumerate((session.run, session.beside)):
        if run is None:
            continue
        asked = f"?run={number}" if number else ""
        known, told = (_asked(session, f"/api/watch{x}{asked}") for x in ("", "/story"))
        answers |= {f"/api/watch{asked}": known, f"/api/watch/story{asked}": told}
        room -= sum(len(json.dumps(x)) for x in (known, told))
        first = [chapter["figure"] for chapter in told["json"]["chapters"] if chapter["figure"]]
        usual = [x for x in known["json"]["statistics"] if x.startswith(("entropy_mean", "max_"))]
        inside: set[str] = set()
        for figure in dict.fromkeys((*first, *usual, *known["json"]["statistics"])):
            course = {"json": run.series(figure, most=MOST_NUMBERS)}
            room -= len(json.dumps(course))
            if room < 0:
                break
            inside.add(figure)
            answers[f"/api/watch/series?statistic={figure}{asked.replace('?', '&')}"] = course
        known["json"]["statistics"] = [x for x in known["json"]["statistics"] if x in inside]
    return {"version": state["version"], "answers": answers}


def _asked(session: Session, path: str) -> dict[str, Any]:
    given = answer(session, path)
    if given.status != 200:
        raise ValueError(json.loads(given.body)["error"])
    return {"json": json.loads(given.body)}
