"""Spans of keys and knocked-out heads, as the page and the command line ask for them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headwise as hw
from headwise.apps.cli.main import app
from headwise.apps.look.atlas import Atlas
from headwise.apps.look.readers.builtin import TextReader
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.session import Progress, Session

TEXT = "to be or not to be, that is the question"


@pytest.fixture(scope="module")
def session() -> Session:
    made = Session(reader=TextReader("gpt", hw.load("gpt")), progress=Progress("ready", None))
    made.atlases["0"] = Atlas(made.reader.read(TEXT))
    return made


def ask(session: Session, path: str, status: int = 200) -> Any:
    found = answer(session, path)
    assert found.status == status, found.body
    return json.loads(found.body)


def test_a_span_is_weighed_for_every_head(session: Session) -> None:
    found = ask(session, "/api/inputs/0/span?group=self&first=1&last=4&row=6")
    group = session.atlases["0"].input.main
    assert len(found["heads"]) == 48
    for shares in found["heads"][::7]:
        weights = group.head(f"{shares['layer']}.{shares['head']}").map[0, 0, :, 1:4].sum(-1)
        assert shares["mean"] == pytest.approx(float(weights.mean()), abs=1e-6)
        assert shares["row"] == pytest.approx(float(weights[6]), abs=1e-6)


def test_a_knocked_out_head_changes_the_prediction(session: Session) -> None:
    found = ask(session, "/api/inputs/0/map/self/5/1/without?first=0&last=3&row=6")
    loaded = session.reader.loaded
    ids = loaded.encode(TEXT)
    with torch.no_grad():
        before = loaded.model(ids)[0, 6].double().softmax(-1)
        with hw.knock_out(loaded.model, (5, 1, (0, 3))):
            after = loaded.model(ids)[0, 6].double().softmax(-1)
    assert found["moved"] == pytest.approx(float((before - after).abs().sum() / 2), abs=1e-5)
    assert found["moved"] > 0
    first = found["outcomes"][0]
    token = next(i for i in range(len(before)) if loaded.tokeniser.pieces([i])[0] == first["name"])
    assert first["before"] == pytest.approx(float(before[token]), abs=1e-5)
    assert first["after"] == pytest.approx(float(after[token]), abs=1e-5)


@pytest.mark.parametrize(
    "path",
    ["span?first=3&last=3", "span?first=0&last=99", "span?row=99", "map/self/0/0/without?first=99"],
)
def test_a_span_that_is_not_there_is_refused(session: Session, path: str) -> None:
    assert "is not a number from" in ask(session, f"/api/inputs/0/{path}", 400)["error"]


def test_an_input_without_predictions_and_a_busy_model_say_so(session: Session) -> None:
    path = "/api/inputs/0/map/self/0/0/without?first=0&last=1"
    session.progress = Progress("ready", "running the model")
    assert "busy" in ask(session, path, 409)["error"]
    session.progress = Progress("ready", None)
    with hw.watch(session.reader.model) as seen:
        session.reader.model(session.reader.loaded.encode("to be"))
    from headwise.apps.look.show import session_of

    refused = ask(session_of(seen), path, 404)
    assert refused["zh"][refused["error"]] == "这个输入没有可比较的预测"


def test_the_command_line_names_spans() -> None:
    line = ["look", "--json", "--text", TEXT, "--span", "start=0:3", "--head", "5.1"]
    found = CliRunner().invoke(app, line)
    (head,) = json.loads(found.stdout)["heads"]
    read = TextReader("gpt", hw.load("gpt")).read(TEXT)
    wanted = read.main.head("5.1").map[0, 0, :, :3].sum(-1).mean()
    assert head["statistics"]["span_start_mean"] == pytest.approx(float(wanted), abs=1e-6)
    shown = CliRunner().invoke(app, ["look", "--terminal", "--text", TEXT, "--span", "start=0:3"])
    assert "looks most at start" in shown.stdout
    for wrong in ("start", "a=3:1", "a=0:99"):
        assert (
            CliRunner().invoke(app, ["look", "--json", "--text", TEXT, "--span", wrong]).exit_code
        )
