"""The page's "Watch": a run while it trains, and its alarms."""

from __future__ import annotations

from headwise.apps.interface.page import Route
from headwise.apps.interface.reply import Answer, Query, Refusal, as_json, refused
from headwise.apps.look.session import Session
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.messages import say, with_chinese


def watched(session: Session, query: Query) -> Answer:
    """The progress and the alarms of the watched run."""
    with refused():
        state = _run(session, query).state()
        beside = session.beside.folder.resolve().name if session.beside is not None else None
        return as_json(with_chinese({**state, "beside": beside}))


def story(session: Session, query: Query) -> Answer:
    """The run as a story: its loss, and its alarms from the first on."""
    with refused():
        return as_json(with_chinese(_run(session, query).story()))


def series(session: Session, query: Query) -> Answer:
    """A figure of every head over the steps of the run."""
    with refused():
        after = float(query.given.get("from", "-inf"))
        return as_json(_run(session, query).series(query.given.get("statistic", ""), after))


ROUTES: tuple[Route, ...] = (
    (r"/api/watch", watched),
    (r"/api/watch/series", series),
    (r"/api/watch/story", story),
)


def _run(session: Session, query: Query) -> WatchedFolder:
    """The run that is asked about: the session's, or, as run=1, the one beside it."""
    if query.number("run", 0, 0, 1) and session.beside is not None:
        return session.beside
    if session.run is None:
        hint = say("open one with headwise look RUN_FOLDER")
        raise Refusal(404, say("no run is being watched"), hint)
    return session.run
