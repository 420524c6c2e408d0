"""The page in a notebook: the kernel answers as the server does."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("anywidget", reason="the notebook's page is made with anywidget")

import headwise as hw
from headwise.apps.look import show as showing
from headwise.apps.look.serving import server
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.serving.widget import LookWidget
from headwise.apps.look.show import session_of

TEXT = "to be or not to be"


@pytest.fixture
def seen() -> Any:
    gpt = hw.load("gpt")
    with hw.watch(gpt.model) as seen:
        gpt.model(gpt.encode(TEXT))
    return seen


class Heard(LookWidget):
    """A widget that keeps what it sends to the page."""

    def send(self, content: Any, buffers: Any = None) -> None:
        self.sent = [*getattr(self, "sent", []), (content, buffers)]


def test_a_recording_becomes_a_session(seen: Any) -> None:
    session = session_of(seen, hw.load("gpt").pieces(TEXT))
    (given,) = session.state()["inputs"]
    assert (given["rows"], given["groups"][0]["causal"]) == (7, True)
    rows = session_of(seen).atlases["0"].input.main.rows
    assert rows == (" 0", " 1", " 2", " 3", " 4", " 5", " 6")
    with pytest.raises(
        ValueError, match=r"3 tokens were given for blocks\.0\.attention, which read 7"
    ):
        session_of(seen, ["a", "b", "c"])


def test_a_translator_s_recording_has_its_three_groups() -> None:
    translator = hw.load("translate")
    source, target = translator.encode("The cat."), translator.encode_target("Le chat.")
    with hw.watch(translator.model) as seen:
        translator.model(source, target)
    groups = session_of(seen).atlases["0"].input.groups
    assert [(x.id, len(x.rows), len(x.columns)) for x in groups] == [
        ("encoder", source.shape[1], source.shape[1]),
        ("decoder", target.shape[1], target.shape[1]),
        ("cross", target.shape[1], source.shape[1]),
    ]


def test_messages_are_answered_as_requests_are(seen: Any) -> None:
    session = session_of(seen)
    widget = Heard(session, height=400)
    widget._asked(widget, {"id": 1, "path": "/api/state", "method": "GET"}, [])
    (content, buffers) = widget.sent[-1]
    assert (content["id"], content["status"], buffers) == (1, 200, None)
    assert content["json"]["state"] == "ready"
    path = "/api/inputs/0/map/self/4/6/tile/0/0/0?how=max&drop=0"
    widget._asked(widget, {"id": 2, "path": path, "method": "GET"}, [])
    content, buffers = widget.sent[-1]
    assert content == {"id": 2, "status": 200, "headers": {"X-Rows": "7", "X-Columns": "7"}}
    assert buffers == [answer(session, path).body]


def test_a_recording_reads_nothing_new(seen: Any) -> None:
    session = session_of(seen)
    widget = Heard(session)
    message = {"id": 3, "path": "/api/inputs", "method": "POST", "body": {"text": "hello"}}
    widget._asked(widget, message, [])
    assert widget.sent[-1][0]["status"] == 202
    assert session.join(10)
    assert "this is a recording" in session.state()["problem"]["error"]
    widget._asked(widget, {**message, "body": {}}, [])
    assert widget.sent[-1][0]["status"] == 400
    widget._asked(widget, {**message, "path": "/api/elsewhere"}, [])
    assert widget.sent[-1][0]["status"] == 404


def test_show_gives_a_notebook_a_widget_and_others_a_page(
    seen: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(server, "serve", lambda app, bound: (served.append(app), bound.close()))
    monkeypatch.setattr(showing, "displayed", lambda: False)
    assert seen.show() is None
    assert len(served) == 1
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")
    notebook = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    assert isinstance(seen.show(), LookWidget)
