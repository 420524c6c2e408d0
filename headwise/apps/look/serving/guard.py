"""Refuses requests that do not come from this machine's own page.

The server listens on the loopback address alone, but a page from anywhere can make a browser on
this machine send requests there. Such a request names another host or comes from another origin.
"""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwise.messages import Sentence, say, with_chinese

MOST_BYTES = 4 << 20
"""The largest request body."""

HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d{1,5})?", re.IGNORECASE)

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' blob: data:; style-src 'self' 'unsafe-inline'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""Headers of every answer."""


class Guard:
    """Middleware that refuses other hosts, other origins, and bodies that are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), said.encode()) for name, said in HEADERS.items()]
                message["headers"] = [*message["headers"], *extra]
            await send(message)

        refusal = refused(Headers(scope=scope), port_of(scope), scope["path"])
        if refusal is None:
            await self.app(scope, Limited(receive), guarded)
        else:
            await refusal(scope, receive, guarded)


class Limited:
    """Receives a body, and raises once it is longer than `MOST_BYTES`."""

    def __init__(self, receive: Receive) -> None:
        self.receive, self.bytes = receive, 0

    async def __call__(self) -> Message:
        message = await self.receive()
        self.bytes += len(message.get("body", b""))
        if self.bytes > MOST_BYTES:
            raise TooLargeError
        return message


class TooLargeError(Exception):
    """A body that did not state its length is too long."""


def refused(headers: Headers, port: int | None, path: str) -> JSONResponse | None:
    """The refusal of a request, or None; another site may link to the page, but not ask it."""
    host = headers.get("host", "")
    if not ours(host, port):
        return refusal(
            421,
            say("this page is not served as {host!r}", host=host[:100]),
            say("open http://127.0.0.1:{port}/", port=port),
        )
    origin = headers.get("origin")
    if origin is not None and not ours(origin.removeprefix("http://"), port):
        said = say("requests from {origin!r} are refused", origin=origin[:100])
        return refusal(403, said, say("use the page itself"))
    elsewhere = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
    if elsewhere and path.startswith("/api"):
        said = say("requests from other sites are refused")
        return refusal(403, said, say("use the page itself"))
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MOST_BYTES:
        return too_large()
    return None


def ours(host: str, port: int | None) -> bool:
    """True if a host with its port names this server; clients leave out port 80.

    >>> ours("localhost:8000", 8000), ours("localhost", 80), ours("localhost", 8000)
    (True, True, False)
    """
    match = HOST.fullmatch(host)
    return match is not None and (port is None or (match[2] or ":80") == f":{port}")


def port_of(scope: Scope) -> int | None:
    """The port on which the request came in."""
    server = scope.get("server")
    return None if server is None else server[1]


def too_large() -> JSONResponse:
    """The refusal of a body over the limit."""
    said = say("this is larger than {most} MiB", most=MOST_BYTES >> 20)
    return refusal(413, said, say("use a shorter text or a smaller image"))


def refusal(status: int, error: Sentence, hint: Sentence) -> JSONResponse:
    """An error in the form that the page reads."""
    return JSONResponse(with_chinese({"error": error, "hint": hint}), status)
