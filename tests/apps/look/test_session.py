"""A model that reads in the background: progress, further inputs, errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

import pytest

import headwise as hw
from headwise.apps.interface.background import BusyError
from headwise.apps.look import session as sessions
from headwise.apps.look.readers.builtin import TextReader
from headwise.apps.look.readers.opening import opened
from headwise.apps.look.readers.reader import MOST_TOKENS, Report, check_length
from headwise.apps.look.scene import Input
from headwise.apps.look.session import Progress, Session
from headwise.models import GPT, GPTConfig
from headwise.models.trained import LanguageModel


def reading(what: str, **options: object) -> Session:
    session = Session(**options)  # type: ignore[arg-type]
    session.start(lambda: opened("gpt", "cpu"), what)
    return session


def test_progress_is_told_stage_by_stage() -> None:
    heard: list[Progress] = []
    session = reading("to be or not to be", heard=heard.append)
    assert session.join(300)
    stages = list(dict.fromkeys(progress.stage for progress in heard))
    assert stages == ["running the model", "drawing the heads", None]
    shares = [x.done for x in heard if x.stage == "running the model" and x.done is not None]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert heard[-1] == Progress("ready", None)


def test_a_model_that_can_not_be_loaded_is_an_error_with_a_hint() -> None:
    session = Session()

    def broken() -> TextReader:
        raise ValueError("model.safetensors is no checkpoint")

    session.start(broken, None)
    assert session.join(10)
    state = session.state()
    assert state["state"] == "error"
    assert state["problem"]["error"] == "model.safetensors is no checkpoint"
    assert state["problem"]["hint"].endswith("start headwise look again")
    assert state["inputs"] == []


def test_more_can_be_read_while_the_first_stays() -> None:
    session = reading("to be or not to be")
    assert session.join(300)
    with held() as go:
        assert session.add("so it goes") == "1"
        assert session.count("not while it reads") == {"tokens": None, "most": None}
        with pytest.raises(BusyError):
            session.add("too early")
        assert session.state()["state"] == "ready"
        assert [x["name"] for x in session.state()["inputs"]] == ["to be or not to be"]
        go.set()
        assert session.join(300)
    assert [x["id"] for x in session.state()["inputs"]] == ["0", "1"]
    session.add("   ")
    assert session.join(300)
    problem = session.state()["problem"]
    assert "there is no word to look at" in problem["error"]
    assert problem["id"] == "2"
    assert "start" not in problem["hint"]
    assert session.state()["state"] == "ready"
    session.add("and now")
    assert session.join(300)
    assert session.state()["problem"] is None


def test_the_oldest_inputs_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_INPUTS", 2)
    session = reading("a word")
    for _ in range(2):
        assert session.join(300)
        session.add("a word")
    assert session.join(300)
    assert list(session.atlases) == ["1", "2"]


def test_work_that_nobody_waits_for_ends_at_the_next_block() -> None:
    with held() as go:
        session = reading("to be or not to be")
        assert not session.stop(0.1)
        go.set()
        assert session.stop(300)
    assert not session.atlases
    assert session.progress.state == "loading"


def test_texts_beyond_the_context_are_read_and_said_to_be() -> None:
    tokeniser = hw.load("gpt").tokeniser
    small = GPT(GPTConfig(vocabulary=4096, context=8, d_model=16, layers=1, heads=2))
    reader = TextReader("small", LanguageModel(small, tokeniser, ""))
    assert reader.read("one two").notes == ()
    (note,) = reader.read("one two three four five six seven eight nine").notes
    assert note.endswith("tokens; the model was trained on 8 at a time")


def test_texts_beyond_the_limit_are_refused_before_they_are_read() -> None:
    reader = opened("gpt", "cpu")
    assert isinstance(reader, TextReader)
    check_length(MOST_TOKENS["cpu"], "cpu")
    with pytest.raises(ValueError, match=r"32,769 tokens are too many.*at most 32,768; a GPU"):
        check_length(MOST_TOKENS["cpu"] + 1, "cpu")
    with pytest.raises(ValueError, match="too many"):
        reader.read("word " * (MOST_TOKENS["cpu"] + 1))


@contextmanager
def held() -> Iterator[Event]:
    """Reading waits until the event is set."""
    go, read = Event(), TextReader.read

    def waiting(self: TextReader, what: str | bytes, report: Report) -> Input:
        assert go.wait(300)
        return read(self, what, report)

    with pytest.MonkeyPatch.context() as patch:  # of its own: undone, it leaves the others alone
        patch.setattr(TextReader, "read", waiting)
        yield go


def test_tokens_are_counted_before_a_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    session = reading("to be or not to be")
    assert session.join(300)
    assert session.count("to be or not to be") == {"tokens": 7, "most": MOST_TOKENS["cpu"]}
    monkeypatch.setitem(MOST_TOKENS, "cpu", 6)
    with pytest.raises(ValueError, match="7 tokens are too many to look at on cpu: at most 6"):
        session.add("to be or not to be")
    assert session.progress == Progress("ready", None)


def test_readers_count_the_tokens_that_they_read() -> None:
    for model, text in (("gpt", "to be or not to be"), ("translate", "The cat is black.")):
        reader = opened(model, "cpu")
        assert reader.count(text) == len(reader.read(text, lambda *_: None).groups[0].rows)
