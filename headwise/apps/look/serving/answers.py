"""Answers the page's requests, whether they come over HTTP, from a file or from a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from headwise.apps.look.background import BusyError
from headwise.apps.look.serving import cost_answers, input_answers, lab_answers
from headwise.apps.look.serving import why_answers as why
from headwise.apps.look.serving.reply import Answer, Query, Refusal, as_json
from headwise.apps.look.session import Session
from headwise.apps.look.watched_folder import WatchedFolder
from headwise.messages import halves, said_by, say, with_chinese


def answer(session: Session, address: str, check: Callable[[], None] = lambda: None) -> Answer:
    """Answer a path and query such as /api/inputs/0/heads.

    What takes long calls `check` now and then, which raises `StoppedError` to end it.

    >>> answer(Session(), "/api/nowhere").status
    404
    """
    parts = urlsplit(address)
    try:
        for pattern, reply in ROUTES:
            match = re.fullmatch(pattern, parts.path)
            if match:
                return reply(session, Query(parts.query, check), *match.groups())
        nothing = say("there is nothing at {path}", path=parts.path[:200])
        raise Refusal(404, nothing, say("see docs/look.md"))
    except Refusal as refusal:
        return refusal.answer()
    except ValueError as error:  # the library restates the call and says what to do
        return Refusal(404, said_by(error)).answer()


def answer_post(session: Session, path: str, what: str | bytes | None) -> Answer:
    """Read a text or an image, at /api/inputs, or count the tokens of a text, at /api/tokens.

    /api/lab/claims/ID/run begins an experiment, and /api/lab/stop ends it.

    >>> answer_post(Session(), "/api/inputs", None).status
    400
    """
    try:
        if asked := re.fullmatch(LAB_POST, path):
            return _lab_job(session, asked[1])
        if path not in ("/api/inputs", "/api/tokens"):
            nothing = say("there is nothing at {path}", path=path[:200])
            raise Refusal(404, nothing, say("see docs/look.md"))
        if path == "/api/tokens" and isinstance(what, str):
            return as_json(session.count(what))
        if what is None or path == "/api/tokens":
            hint = say('send {{"text": "…"}} as application/json')
            raise Refusal(400, say("the body has no text"), hint)
        return as_json({"id": session.add(what)}, 202)
    except BusyError as busy:
        return Refusal(409, *busy.args).answer()
    except Refusal as refusal:
        return refusal.answer()
    except ValueError as error:
        return Refusal(413, *halves(said_by(error))).answer()


def state(session: Session, query: Query) -> Answer:
    """The progress, the model and its inputs."""
    return as_json(with_chinese(session.state()))


def experiment(session: Session, query: Query, name: str) -> Answer:
    """The measurements of an experiment of "Why" at the asked settings."""
    with _explained():
        return Answer(why.answer(name, query.given).encode())


def cost(session: Session, query: Query) -> Answer:
    """The cost of the opened model, or of one that the form describes."""
    with _explained():
        opened = None if session.reader is None else session.reader.model
        return Answer(cost_answers.answer(query.given, opened).encode())


def lab(session: Session, query: Query) -> Answer:
    """The claims of the lab with their verdicts."""
    return as_json(lab_answers.listing())


def claim(session: Session, query: Query, id: str) -> Answer:
    """One claim: its results, its derivation, its code."""
    with _explained(404):
        return as_json(lab_answers.entry(id))


def lab_job(session: Session, query: Query) -> Answer:
    """The progress of the experiment that is running, or of the last one."""
    return as_json(lab_answers.job(session.lab))


def watched(session: Session, query: Query) -> Answer:
    """The progress and the alarms of the watched run."""
    with _explained():
        return as_json(with_chinese(_run(session).state()))


def series(session: Session, query: Query) -> Answer:
    """A figure of every head over the steps of the run."""
    with _explained():
        after = float(query.given.get("from", "-inf"))
        return as_json(_run(session).series(query.given.get("statistic", ""), after))


CLAIM = r"([a-z][a-z0-9-]{0,60})"
LAB_POST = rf"/api/lab/(?:claims/{CLAIM}/run|stop)"
ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (r"/api/state", state),
    *input_answers.ROUTES,
    (r"/api/why/(\w+)", experiment),
    (r"/api/cost", cost),
    (r"/api/lab", lab),
    (r"/api/lab/job", lab_job),
    (rf"/api/lab/claims/{CLAIM}", claim),
    (r"/api/watch", watched),
    (r"/api/watch/series", series),
)


def _lab_job(session: Session, id: str | None) -> Answer:
    """Begin the experiment of a claim; without an id, end the one that is running."""
    if id is None:
        session.lab.stop()
    else:
        with _explained(404):
            found = lab_answers.claim_of(id)
        session.lab.start(found)
    return as_json(lab_answers.job(session.lab), 202)


@contextmanager
def _explained(status: int = 400) -> Iterator[None]:
    """Turn an error of the form "problem; remedy" into a refusal with a hint."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise Refusal(status, *halves(said_by(error))) from error


def _run(session: Session) -> WatchedFolder:
    if session.run is None:
        hint = say("open one with headwise look RUN_FOLDER")
        raise Refusal(404, say("no run is being watched"), hint)
    return session.run
