"""The page inside a notebook, where the kernel answers in place of the server."""

from __future__ import annotations

import json
from typing import Any

try:
    import anywidget
    import traitlets
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        "the notebook's page needs anywidget: pip install 'headwise[notebook]'", name=missing.name
    ) from missing

from headwise.apps.interface.reply import Answer
from headwise.apps.look.serving.answers import answer, answer_post
from headwise.apps.look.serving.page_file import STATIC
from headwise.apps.look.session import Session


class LookWidget(anywidget.AnyWidget):  # type: ignore[misc, unused-ignore]
    """The page of a session, `height` pixels high; `view` is the address inside the page."""

    _esm = STATIC / "headwise.js"
    _css = STATIC / "headwise.css"
    height = traitlets.Int(680).tag(sync=True)
    view = traitlets.Unicode("").tag(sync=True)

    def __init__(self, session: Session, **traits: Any) -> None:
        super().__init__(**traits)
        self.session = session
        self.on_msg(self._asked)

    def _asked(self, _: Any, message: dict[str, Any], buffers: list[Any]) -> None:
        """Answer a request of the page: {id, path, method, body}."""
        given = replied(self.session, message, [bytes(each) for each in buffers or []])
        reply = {"id": message.get("id"), "status": given.status, "headers": given.headers}
        if given.media == "application/json":
            self.send({**reply, "json": json.loads(given.body)})
        else:
            self.send(reply, buffers=[given.body])


def replied(session: Session, message: dict[str, Any], buffers: list[bytes]) -> Answer:
    """Answer a message as the server does, or add a new input."""
    path = str(message.get("path", ""))
    if message.get("method") != "POST":
        return answer(session, path)
    body = message.get("body") or {}
    what = buffers[0] if buffers else body.get("text")
    return answer_post(session, path, what if isinstance(what, str | bytes) else None)
