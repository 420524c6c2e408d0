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
        return as_json(with_chinese(_run(session).state()))


def series(session: Session, query: Query) -> Answer:
    """A figure of every head over the steps of the run."""
    with refused():
        after = float(query.given.get("from", "-inf"))
        return as_json(_run(session).series(query.given.get("statistic", ""), after))


ROUTES: tuple[Route, ...] = (
    (r"/api/watch", watched),
    (r"/api/watch/series", series),
)


def _run(session: Session) -> WatchedFolder:
    if session.run is None:
        hint = say("open one with headwise look RUN_FOLDER")
        raise Refusal(404, say("no run is being watched"), hint)
    return session.run
