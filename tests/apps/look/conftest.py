"""The page in a real browser: a server with the built-in GPT, and visits that forgive nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from headwise.apps.look.readers.opening import opened
from headwise.apps.look.serving.server import STATIC, application, listening
from headwise.apps.look.session import Session
from tests.apps.look.browser import MISSING, chromium

pytest.importorskip("playwright", reason="the page's tests drive a browser with playwright")
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

PATIENCE = 60
"""Seconds after which a test gives up; a busy machine must not fail a test."""

SEEN = "try { localStorage.setItem('headwise.tour', 'seen') } catch {}"
"""Run before the page: someone who has seen the tour."""

expect.set_options(timeout=1000 * PATIENCE)

ARGUMENTS = ["--headless", "--no-sandbox", "--disable-background-networking", "--disable-gpu"]


@dataclass
class Served:
    """A server that runs in a thread, its session, and its address without a slash at the end."""

    session: Session
    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self) -> None:
        """Stop as Ctrl-C does."""
        self.server.should_exit = True
        self.thread.join(PATIENCE)

    def wait_until_read(self, seconds: float = 10 * PATIENCE) -> Served:
        """Wait until the model has read all it was given."""
        deadline = time.monotonic() + seconds
        while self.session.progress.state == "loading" or self.session.progress.stage:
            assert time.monotonic() < deadline, f"still at {self.session.progress}"
            time.sleep(0.02)
        return self


def eventually(page: Page, holds: Callable[[], bool]) -> None:
    """Wait, while the page goes on, until something holds."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        page.wait_for_timeout(20)


def start(model: str | Session | None = "gpt", text: str | None = None, port: int = 0) -> Served:
    """Serve a model that reads a text, by default the sample, as `headwise look` does.

    A session is served as it is; without a model the server waits for one for ever.
    """
    session = model if isinstance(model, Session) else Session(sample=text is None)
    bound = listening(port)
    config = uvicorn.Config(application(session), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    if isinstance(model, str):
        session.start(lambda: opened(model, "cpu"), text)
    return Served(session, f"http://127.0.0.1:{bound.getsockname()[1]}", server, thread)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Start a server of one's own: `serve("translate", "The cat is black.")`.

    It outlives the pages of `visit`: a page that is open asks its server for the state again and
    again, and one that has stopped would be an error of the page.
    """
    started: list[Served] = []

    def started_here(*given: Any) -> Served:
        started.append(start(*given))
        return started[-1]

    yield started_here
    for served in started:
        served.stop()


@pytest.fixture(scope="session")
def served() -> Iterator[Served]:
    """The built-in GPT, which has read the sample text. Nothing may be added to it."""
    with pytest.MonkeyPatch.context() as patch:
        # This comes before the fixture that keeps triton's interpreter to tests that name it.
        patch.delenv("TRITON_INTERPRET", raising=False)
        served = start().wait_until_read()
    yield served
    served.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of a worker."""
    path = chromium()
    if path is None:
        pytest.skip(MISSING)
    if not (STATIC / "index.html").is_file():
        pytest.skip("the page is not built: make page")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


@dataclass
class Visits:
    """Opens pages; afterwards none may have logged an error or asked anyone but this machine."""

    browser: Browser
    base: str
    contexts: list[BrowserContext] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)

    def __call__(
        self,
        address: str = "",
        *,
        base: str | None = None,
        allowed: str = "",
        newcomer: bool = False,
        **options: Any,
    ) -> Page:
        """Open an address such as `#/head?layer=4`; errors that contain `allowed` are expected.

        A newcomer has not seen the tour. Further options are those of a browser's context:
        `locale="zh-CN"`, `offline=True`.
        """
        defaults: dict[str, Any] = {
            "viewport": {"width": 1280, "height": 800},
            "locale": "en-GB",
            "color_scheme": "light",
        }
        context = self.browser.new_context(**(defaults | options))
        context.set_default_timeout(1000 * PATIENCE)
        self.contexts.append(context)
        page = context.new_page()
        if not newcomer:
            page.add_init_script(SEEN)

        def wrong(what: str) -> None:
            if not allowed or allowed not in what:
                self.wrongs.append(what)

        def asked(url: str) -> None:
            parts = urlsplit(url)
            if parts.scheme in ("http", "https", "ws", "wss") and parts.hostname != "127.0.0.1":
                wrong(f"asked {url}")

        page.on("console", lambda said: wrong(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: wrong(str(error)))
        page.on("request", lambda request: asked(request.url))
        page.goto(address if "://" in address else f"{base or self.base}/{address}")
        return page

    def close(self) -> None:
        """Close all pages and judge them."""
        for context in self.contexts:
            context.close()
        assert not self.wrongs, "\n".join(self.wrongs)


@pytest.fixture
def visit(browser: Browser, served: Served, serve: Callable[..., Served]) -> Iterator[Visits]:
    """Open the page on the built-in GPT: `page = visit("#/heads")`."""
    visits = Visits(browser, served.url)
    yield visits
    visits.close()
