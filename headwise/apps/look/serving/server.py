"""The page's HTTP server, on the loopback address only."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from threading import Event

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import BaseRoute, Mount, Route
    from starlette.staticfiles import StaticFiles
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"the page's server needs {missing.name}: pip install 'headwise[look]'", name=missing.name
    ) from missing

from headwise.apps.interface.background import StoppedError
from headwise.apps.interface.reply import Answer, Refusal
from headwise.apps.look.pages import PAGES
from headwise.apps.look.serving.answers import answer, answer_post
from headwise.apps.look.serving.guard import Guard, TooLargeError, too_large
from headwise.apps.look.serving.page_file import STATIC, built
from headwise.apps.look.session import Session
from headwise.messages import say

IMAGES = ("image/png", "image/jpeg")


def application(session: Session, static: Path = STATIC) -> Starlette:
    """The application that serves a session, and the page built in a folder."""
    turns = asyncio.Semaphore(2)

    async def get(request: Request) -> Response:
        address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        if request.url.path == "/api/state":
            return response(answer(session, address))
        async with turns:
            if await request.is_disconnected():  # the user has scrolled past it
                return Response(status_code=499)
            return await computed(request, lambda check: answer(session, address, check))

    async def post(request: Request) -> Response:
        try:
            what = _sent(request.headers.get("content-type", ""), await request.body())
        except TooLargeError:
            return too_large()
        except ClientDisconnect:  # before the body had come
            return Response(status_code=499)
        except Refusal as refusal:
            return response(refusal.answer())
        path = request.url.path
        return await computed(request, lambda check: answer_post(session, path, what))

    routes = [
        Route("/api/inputs", post, methods=["POST"]),
        Route("/api/tokens", post, methods=["POST"]),
        *(
            Route(f"/api/{name}/{{path:path}}", post, methods=["POST"])
            for name, page in PAGES.items()
            if page.posts
        ),
        Route("/api/{path:path}", get, methods=["GET"]),
        page(static),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Guard)])


def page(static: Path) -> BaseRoute:
    """The built page, and nothing outside its folder; a message if it is not built."""
    try:
        built(static)
    except ValueError as error:
        said = f"{error}\nThe answers under /api/ work without it.\n"

        async def missing(request: Request) -> Response:
            return PlainTextResponse(said, 503)

        return Route("/{path:path}", missing)
    return Mount("/", StaticFiles(directory=static, html=True))


async def computed(request: Request, work: Callable[[Callable[[], None]], Answer]) -> Response:
    """Compute an answer in a thread, which is told to stop when nobody waits for it any more."""
    left = Event()

    def check() -> None:
        if left.is_set():
            raise StoppedError

    async def listen() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left.set()

    listening = asyncio.create_task(listen())
    try:
        return response(await run_in_threadpool(work, check))
    except StoppedError:
        return Response(status_code=499)
    except asyncio.CancelledError:  # Ctrl-C: the server waits no longer
        left.set()
        return Response(status_code=503)
    finally:
        listening.cancel()


def response(given: Answer) -> Response:
    """An HTTP response; never cached, since the next server may show another model."""
    headers = {"Cache-Control": "no-store", **given.headers}
    return Response(given.body, given.status, headers, given.media)


def _sent(media: str, body: bytes) -> str | bytes | None:
    """The text or the image of a request's body; None if it has neither."""
    media = media.partition(";")[0].strip()
    if media in IMAGES:
        return body
    if media != "application/json":
        hint = say('send an object with "text" as application/json')
        raise Refusal(415, say("a body of type {media!r} can't be read", media=media[:60]), hint)
    try:
        text = json.loads(body)["text"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def listening(port: int = 0) -> socket.socket:
    """A listening socket on the loopback address; port 0 takes any free one."""
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
        bound.listen()  # a browser that is faster than the server has to wait, and is not refused
    except OSError as error:
        bound.close()
        raise ValueError(
            f"port {port} is not available ({error.strerror}); omit --port to take a free one"
        ) from error
    return bound


def address(bound: socket.socket) -> str:
    """The page's address."""
    return f"http://127.0.0.1:{bound.getsockname()[1]}/"


def serve(app: Starlette, bound: socket.socket) -> None:
    """Answer until Ctrl-C."""
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[bound])
