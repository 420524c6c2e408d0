"""Answers the page's requests, whether they come over HTTP, from a file or from a notebook."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import urlsplit

from headwise.apps.interface.background import BusyError
from headwise.apps.interface.reply import Answer, Query, Refusal, as_json
from headwise.apps.look.pages import PAGES, Page
from headwise.apps.look.serving import input_answers
from headwise.apps.look.session import Session
from headwise.messages import halves, said_by, say, with_chinese


def answer(session: Session, address: str, check: Callable[[], None] = lambda: None) -> Answer:
    """Answer a path and query such as /api/inputs/0/heads.

    What takes long calls `check` now and then, which raises `StoppedError` to end it.

    >>> answer(Session(), "/api/nowhere").status
    404
    """
    parts = urlsplit(address)
    try:
        page = _page(parts.path)
        for pattern, reply in ROUTES if page is None else page.routes():
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
        page = _page(path)
        for pattern, reply in () if page is None else page.post_routes():
            if match := re.fullmatch(pattern, path):
                return reply(session, *match.groups())
        if path not in ("/api/inputs", "/api/tokens"):
            nothing = say("there is nothing at {path}", path=path[:200])
            raise Refusal(404, nothing, say("see docs/look.md"))
        if path == "/api/tokens" and isinstance(what, str):
            return as_json(session.count(what))
        if what is None or path == "/api/tokens":
            hint = say('send an object with "text" as application/json')
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


ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (r"/api/state", state),
    *input_answers.ROUTES,
)


def _page(path: str) -> Page | None:
    """The view that answers at /api/NAME and below it."""
    return PAGES.get(path.split("/")[2]) if path.count("/") > 1 else None
