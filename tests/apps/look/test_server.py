"""The server: who may ask, what may be sent, what is served."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.request import urlopen

import pytest
import uvicorn
from starlette.testclient import TestClient

from headwise.apps.interface.background import StoppedError
from headwise.apps.look.readers.reader import MOST_TOKENS
from headwise.apps.look.serving import server
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.serving.guard import MOST_BYTES
from headwise.apps.look.serving.server import application, listening
from headwise.apps.look.session import Session
from tests.apps.look.sessions import session_on

ADDRESS = "http://127.0.0.1:8470"


@pytest.fixture(scope="module")
def session() -> Session:
    return session_on("<script>alert(1)</script>")


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built page, with a secret beside it and links that lead out."""
    above = tmp_path_factory.mktemp("above")
    folder = above / "static"
    folder.mkdir()
    (above / "secret.txt").write_text("secret")
    (folder / "index.html").write_text("<!doctype html><title>the page</title>")
    (folder / "headwise.js").write_text("export default {}")
    (folder / "headwise.css").write_text("body {}")
    (folder / "link.txt").symlink_to(above / "secret.txt")
    (folder / "out").symlink_to(above)
    return folder


@pytest.fixture(scope="module")
def port(session: Session, static: Path) -> Iterator[int]:
    """The port of a real server."""
    bound = listening()
    config = uvicorn.Config(application(session, static), log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    yield bound.getsockname()[1]
    running.should_exit = True
    thread.join(10)


@pytest.fixture
def client(session: Session, static: Path) -> Iterator[TestClient]:
    with TestClient(application(session, static), base_url=ADDRESS) as client:
        yield client


def test_the_page_and_its_answers_are_served(client: TestClient) -> None:
    assert "the page" in client.get("/").text
    assert client.get("/headwise.js").status_code == 200
    state = client.get("/api/state")
    assert state.headers["content-type"] == "application/json"
    assert state.json()["state"] == "ready"
    tile = client.get("/api/inputs/0/map/self/0/0/tile/0/0/0?how=max&drop=0")
    assert tile.headers["content-type"] == "application/octet-stream"
    assert len(tile.content) == 2 * int(tile.headers["x-rows"]) * int(tile.headers["x-columns"])


def test_every_answer_forbids_sniffing_framing_and_foreign_code(client: TestClient) -> None:
    for path in ("/", "/api/state", "/api/nowhere", "/nowhere"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert "access-control-allow-origin" not in headers


def test_answers_are_never_kept_by_a_browser(client: TestClient) -> None:
    assert client.get("/api/inputs/0/heads").headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8470",
        "127.0.0.1",
        "127.0.0.1:8471",
        "127.0.0.1.evil.example:8470",
        "localhost.evil.example:8470",
        "127.0.0.1:8470@evil.example",
        "0.0.0.0:8470",
        "",
    ],
)
def test_a_name_that_was_rebound_to_this_machine_is_refused(client: TestClient, host: str) -> None:
    refused = client.get("/api/state", headers={"host": host})
    assert refused.status_code == 421
    assert "http://127.0.0.1:8470/" in refused.json()["hint"]
    assert client.get("/", headers={"host": host}).status_code == 421


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8470", "localhost:8470", "LOCALHOST:8470", "[::1]:8470"]
)
def test_this_machine_s_own_names_are_let_in(client: TestClient, host: str) -> None:
    assert client.get("/api/state", headers={"host": host}).status_code == 200


def test_on_port_80_the_names_come_without_a_port(session: Session, static: Path) -> None:
    with TestClient(application(session, static), base_url="http://127.0.0.1:80") as client:
        for host in ("127.0.0.1", "localhost", "[::1]", "127.0.0.1:80"):
            own = {"host": host, "origin": f"http://{host}"}
            assert client.get("/api/state", headers=own).status_code == 200
        for host in ("evil.example", "127.0.0.1.evil.example", "127.0.0.1:8470"):
            assert client.get("/api/state", headers={"host": host}).status_code == 421
            other = {"host": "127.0.0.1", "origin": f"http://{host}"}
            assert client.get("/api/state", headers=other).status_code == 403


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://127.0.0.1:8470", "http://127.0.0.1:3000", "null", "file://"],
)
def test_pages_from_elsewhere_are_refused(client: TestClient, origin: str) -> None:
    assert client.get("/api/state", headers={"origin": origin}).status_code == 403
    sent = client.post("/api/inputs", json={"text": "hello"}, headers={"origin": origin})
    assert sent.status_code == 403


def test_a_form_of_another_site_can_send_nothing(client: TestClient, session: Session) -> None:
    plain = {"content-type": "text/plain"}
    assert client.post("/api/inputs", content='{"text": "x"}', headers=plain).status_code == 415
    crossed = {"sec-fetch-site": "cross-site"}
    assert client.post("/api/inputs", json={"text": "x"}, headers=crossed).status_code == 403
    assert client.get("/api/state", headers=crossed).status_code == 403  # nor keep us busy
    deep = {"content-type": "application/json"}
    assert client.post("/api/inputs", content="[" * 200_000, headers=deep).status_code == 400
    assert list(session.atlases) == ["0"]


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/..%2fsecret.txt",
        "/%2e%2e/secret.txt",
        "/%2e%2e%2fsecret.txt",
        "/..%5csecret.txt",
        "//secret.txt",
        "/static/../../secret.txt",
        "/out/secret.txt",
        "/link.txt",
        "/%00",
    ],
)
def test_nothing_outside_the_page_s_folder_is_served(port: int, static: Path, path: str) -> None:
    for each in (path, path.replace("secret.txt", str(static.parent / "secret.txt"))):
        asking = HTTPConnection("127.0.0.1", port, timeout=30)
        asking.request("GET", each)  # as it stands: a browser would tidy it up first
        given = asking.getresponse()
        assert given.status in (400, 404)
        assert b"secret" not in given.read()
        asking.close()


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "no text"),
        (b"[]", 400, "no text"),
        (b'{"text": 5}', 400, "no text"),
        (b'{"text": "' + b"x" * MOST_BYTES + b'"}', 413, "larger than 4 MiB"),
    ],
)
def test_what_is_no_text_or_too_much_is_refused_with_a_reason(
    client: TestClient, body: bytes, status: int, said: str
) -> None:
    sent = client.post("/api/inputs", content=body, headers={"content-type": "application/json"})
    assert sent.status_code == status
    assert said in sent.json()["error"]
    assert sent.json()["hint"]


def test_a_body_that_does_not_say_how_long_it_is_is_counted(client: TestClient) -> None:
    parts = (b"x" * (1 << 20) for _ in range(6))
    sent = client.post("/api/inputs", content=parts, headers={"content-type": "application/json"})
    assert sent.status_code == 413


def test_a_new_text_is_read_and_a_hopeless_one_is_noticed(static: Path) -> None:
    session = session_on("one")
    with TestClient(application(session, static), base_url=ADDRESS) as client:
        sent = client.post("/api/inputs", json={"text": "two"})
        assert (sent.status_code, sent.json()) == (202, {"id": "1"})
        assert session.join(300)
        assert [x["name"] for x in client.get("/api/state").json()["inputs"]] == ["one", "two"]
        client.post("/api/inputs", json={"text": " "})
        assert session.join(300)
        assert "no word" in client.get("/api/state").json()["problem"]["error"]


def test_a_tile_that_was_scrolled_past_is_not_computed(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    monkeypatch.setattr(server, "answer", lambda *given: computed.append(given[1]))
    sent: list[Any] = []

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/api/inputs/0/map/self/0/0/tile/0/0/0",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8470")],
        "server": ("127.0.0.1", 8470),
    }
    with ThreadPoolExecutor(1) as pool:  # a browser of another test may have a loop in this thread
        pool.submit(asyncio.run, application(session)(scope, gone, send)).result()
    assert sent[0]["status"] == 499
    assert not computed


def test_a_body_that_its_sender_gave_up_is_forgotten_without_a_word(
    session: Session, static: Path
) -> None:
    sent: list[Any] = []

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/inputs",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1:8470"), (b"content-length", b"1000")],
        "server": ("127.0.0.1", 8470),
    }
    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, application(session, static)(scope, gone, send)).result()
    assert sent[0]["status"] == 499


class Slow:
    """An answer that goes on until it is told to stop."""

    def __init__(self) -> None:
        self.begun, self.ended = Event(), Event()

    def __call__(self, session: Session, address: str, check: Callable[[], None]) -> None:
        self.begun.set()
        try:
            while not self.ended.wait(0.01):
                check()
        finally:
            self.ended.set()


def test_an_answer_that_nobody_waits_for_is_given_up(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow()
    monkeypatch.setattr(server, "answer", slow)
    asking = HTTPConnection("127.0.0.1", port)
    asking.request("GET", "/api/inputs/0/span")
    assert slow.begun.wait(60)
    assert not slow.ended.is_set()
    asking.close()
    assert slow.ended.wait(60)


def test_a_span_asks_between_heads_whether_anyone_waits(session: Session) -> None:
    asked = []

    def check() -> None:
        asked.append(True)
        if len(asked) == 3:
            raise StoppedError

    with pytest.raises(StoppedError):
        answer(session, "/api/inputs/0/span?first=0&last=2", check)


def test_ctrl_c_during_a_long_answer_prints_no_traceback(
    session: Session,
    static: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    slow = Slow()
    monkeypatch.setattr(server, "answer", slow)
    bound = listening()
    config = uvicorn.Config(
        application(session, static), log_level="warning", lifespan="off",
        timeout_graceful_shutdown=0,
    )  # fmt: skip
    running = uvicorn.Server(config)
    thread = Thread(target=running.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    asking = HTTPConnection("127.0.0.1", bound.getsockname()[1])
    asking.request("GET", "/api/inputs/0/span")
    assert slow.begun.wait(60)
    running.should_exit = True  # as Ctrl-C does
    assert slow.ended.wait(60)
    thread.join(60)
    asking.close()
    assert not thread.is_alive()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_page_that_is_not_built_says_how_to_build_it(session: Session, tmp_path: Path) -> None:
    with TestClient(application(session, tmp_path), base_url=ADDRESS) as client:
        given = client.get("/")
        assert given.status_code == 503
        assert "pip install -e ." in given.text
        assert client.get("/api/state").status_code == 200


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} is not available"):
            listening(port)


def test_the_server_listens_on_the_loopback_address_alone() -> None:
    with listening() as bound:
        assert bound.getsockname()[0] == "127.0.0.1"


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is a signal elsewhere")
def test_headwise_look_serves_until_ctrl_c_and_leaves_cleanly() -> None:
    command = [sys.executable, "-m", "headwise", "look", "--no-open", "--text", "to be"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        address = process.stdout.readline().split()[0]
        deadline = time.monotonic() + 300
        while True:
            assert time.monotonic() < deadline
            try:
                with urlopen(f"{address}api/state") as answered:
                    state = json.load(answered)
            except OSError:
                state = {"state": "loading"}
            if state["state"] != "loading":
                break
            time.sleep(0.1)
        assert (state["state"], state["sample"]) == ("ready", False)
        assert process.stdout.readline() == "3 tokens, 48 heads are ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 0
        assert "Traceback" not in process.stderr.read()


def test_a_text_is_counted_and_one_of_too_many_tokens_is_refused_at_once(
    client: TestClient, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = client.post("/api/tokens", json={"text": "to be or not to be"})
    assert counted.json() == {"tokens": 7, "most": MOST_TOKENS["cpu"]}
    monkeypatch.setitem(MOST_TOKENS, "cpu", 6)
    sent = client.post("/api/inputs", json={"text": "to be or not to be"})
    assert sent.status_code == 413
    assert sent.json()["error"] == "7 tokens are too many to look at on cpu: at most 6"
    assert session.progress.problem is None
    image = client.post("/api/tokens", content=b"x", headers={"content-type": "image/png"})
    assert image.status_code == 400
