"""Odd command lines: every one is answered or refused in a sentence, never with a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from headwise.apps.cli import main
from headwise.apps.cli.main import app
from headwise.apps.lab import handbook
from headwise.apps.train.data import packages
from headwise.apps.train.trainer import Trainer

VALUES = [
    "", " ", "-", "--", "0", "-1", "1", "2.5", "nan", "inf", "1e400", "9" * 30, "0x10", "٣",
    "中文🐈", "a" * 3000, "[b]", "[/b]", "{}", "%s", "*", "~", ".", "/", "/dev/null",
    "/proc/self/mem", "no/such/folder", "cpu", "cuda:99", "meta", "tiny", "gpt", "translate", "5.1",
    "cross:0.3", "entropy_mean", "1GB", "x.svg", "x.html", "--json", "--help", "-x",
    "9" * 12, "9" * 400, "1e308", "nope", "LOOP", "LOOP.html",
    "FOLDER", "BINARY", "EMPTY", "BROKEN_RUN", "LIST_RUN", "STRANGE_RUN", "BROKEN_WATCH",
]  # fmt: skip
"""Values for any option; those in capitals are replaced by a path."""


EXTREME = ["9" * 400, "9" * 12, "-1", "1e308", "nan", "nope", "", "LOOP", "LOOP.html"]
"""Values that every option of every command is given, one at a time."""


BASES = {
    ("cost",): ["--layers", "2", "--width", "64", "--heads", "4"],
    ("lab", "piece"): ["nope"],
    ("lab", "show"): ["scale-variance"],
    ("lab", "run"): ["nope"],
    ("look",): ["--text", "to be", "--json"],
    ("sparse",): ["--text", "to be or not to be, that is the question. " * 2],
    ("watch",): ["BROKEN_WATCH"],
    ("train", "translate"): ["--out", "run", "--data", "PAIRS"],
    ("train", "language"): ["--out", "run", "--data", "TEXT"],
    ("train", "vision"): ["--out", "run"],
    ("train", "score"): ["STRANGE_RUN"],
    ("train", "export"): ["STRANGE_RUN", "--out", "copy"],
}
"""Words with which a command gets as far as its work."""


def commands(
    command: click.Command, path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], list[click.Parameter]]:
    """The options of every command, by its words."""
    found = {path: [option for option in command.params if option.opts[0].startswith("--")]}
    for name, inner in getattr(command, "commands", {}).items():
        found |= commands(inner if path else main.loaded(name), (*path, name))
    return found


COMMANDS = commands(typer.main.get_command(app))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders and files of every wrong kind."""
    home = tmp_path_factory.mktemp("odd")
    configs = {
        "BROKEN_RUN": "{",
        "LIST_RUN": "[1, 2]",
        "STRANGE_RUN": '{"task": "language", "model": {"x": 1}, "setup": {"task": "language"}}',
    }
    for name, config in configs.items():
        (home / name).mkdir()
        (home / name / "config.json").write_text(config)
    for name, content in (("BINARY", bytes(range(256)) * 9), ("EMPTY", b"")):
        (home / name).write_bytes(content)
    (home / "TEXT").write_text("the cat sat on the mat, and the dog did not. " * 300)
    (home / "PAIRS").write_text("".join(f"Go {n}.\tVa {n} !\n" for n in range(500)))
    (home / "FOLDER").mkdir()
    for name in ("LOOP", "LOOP.html"):
        (home / name).symlink_to(home / name)
    (home / "BROKEN_WATCH").mkdir()
    (home / "BROKEN_WATCH" / "manifest.json").write_text('{"format": "x"}')
    return {path.name: str(path) for path in home.iterdir()}


@st.composite
def lines(draw: st.DrawFn) -> list[str]:
    """A command with words that it can work with, or none, and a few odd options."""
    command = draw(st.sampled_from(sorted(COMMANDS)))
    words = [*command, *(BASES.get(command, []) if draw(st.integers(0, 3)) else [])]
    for _ in range(draw(st.integers(0, 3))):
        option = draw(st.sampled_from([None, *COMMANDS[command]]))
        words += [] if option is None else [option.opts[0]]
        if option is None or not getattr(option, "is_flag", False) or not draw(st.integers(0, 9)):
            words.append(draw(st.sampled_from(VALUES)))
    return words


def run(words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The end of a command line; nothing is trained, served or downloaded."""

    def offline(*given: object) -> None:
        raise packages.CorpusUnavailableError("there is no connection in this test")

    with monkeypatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HEADWISE_CACHE", str(folder / "cache"))
        patch.setattr(packages, "run", offline)
        patch.setattr(Trainer, "train", lambda trainer: None)
        patch.setattr("uvicorn.Server.run", lambda server, sockets: sockets[0].close())
        patch.setattr("webbrowser.open", lambda address: True)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        return CliRunner().invoke(app, words, input="")


def answered(result: Result) -> bool:
    """True if a command has done its work, or has said why it could not."""
    ended = result.exception is None or isinstance(result.exception, SystemExit)
    return ended and "Traceback" not in result.output


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(words=lines())
def test_no_command_line_ends_in_a_traceback(
    words: list[str], places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run([places.get(word, word) for word in words], tmp_path, monkeypatch)
    assert answered(result), words


OPTIONS = [
    (command, option.opts[0])
    for command, options in COMMANDS.items()
    for option in options
    if not getattr(option, "is_flag", False)
]


@pytest.mark.parametrize(("command", "option"), OPTIONS, ids=lambda x: str(x[-1]))
def test_every_option_takes_or_refuses_an_extreme_value(
    command: tuple[str, ...],
    option: str,
    places: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command == ("look",):  # the input is looked at last: what is refused is refused before
        monkeypatch.setattr("headwise.apps.look.command.Asked.open", refuse_to_open)
    if command == ("lab", "handbook"):  # its chapters and pictures take seconds
        monkeypatch.setattr(handbook, "ORDER", ("formula",))
        monkeypatch.setattr(handbook, "unnamed", handbook.unnamed.__wrapped__)  # nothing is kept
        monkeypatch.setattr(handbook, "available", lambda: False)
    base = [places.get(word, word) for word in BASES.get(command, [])]
    for value in EXTREME:
        words = [*command, *base, option, places.get(value, value)]
        result = run(words, tmp_path, monkeypatch)
        assert answered(result), (words, result.exception)


def refuse_to_open(asked: object) -> None:
    raise ValueError("no model is opened in this test")


@pytest.mark.parametrize(
    "option",
    ["--batch", "--hidden", "--vocabulary", "--head-dim", "--layers", "--width", "--window"],
)
def test_a_size_without_bounds_is_refused_by_its_option(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(["cost", *BASES["cost",], option, "9" * 30], tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


@pytest.mark.parametrize(("option", "value"), [("--steps", "9" * 30), ("--minutes", "1e308")])
def test_a_training_without_end_is_refused_by_its_option(
    option: str, value: str, places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "language", "--out", "run", "--data", places["TEXT"], option, value]
    result = run(words, tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert f"Invalid value for '{option}'" in result.output


def test_an_unknown_form_of_a_piece_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(["lab", "piece", "x", "--form", "nope"], tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert "form='nope'; use tiny, quick, full" in result.output


def test_links_in_a_circle_are_refused_before_a_model_is_loaded(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.apps.look.command.Asked.open", refuse_to_open)
    result = run(["look", "--out", places["LOOP.html"]], tmp_path, monkeypatch)
    assert result.exit_code == 2
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="only POSIX passes bytes as arguments")
@pytest.mark.parametrize("words", [["look"], ["look", "--text"], ["watch"], ["train", "score"]])
def test_bytes_that_are_no_text_are_refused_in_a_sentence(words: list[str]) -> None:
    command = [os.fsencode(word) for word in (sys.executable, "-m", "headwise", *words)]
    terminal = [b"--terminal"] if words[0] == "look" else []
    done = subprocess.run(
        [*command, b"\xff\xfe", *terminal],
        capture_output=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert b"Traceback" not in done.stderr
