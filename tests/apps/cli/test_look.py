"""`headwise look` at a terminal: files, pictures, standard input, and what is refused."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import typer

from headwise.apps.look.command import given, number_of_bytes, piped
from headwise.apps.look.serving.page_file import STATIC
from tests import command_line

run, refused = (partial(each, "look") for each in (command_line.run, command_line.refused))


@pytest.mark.skipif(
    not (STATIC / "index.html").is_file(), reason="the page is not built: make page"
)
def test_a_file_and_a_picture_are_written_and_their_size_is_said(tmp_path: Path) -> None:
    page, figure = tmp_path / "page [1].html", tmp_path / "head.svg"
    said = run("--text", "to be or not to be", "--out", str(page), "--picture", str(figure))
    assert f"{page}: {page.stat().st_size / 1e6:.1f} MB, 7 tokens" in said
    assert "all 48 heads as thumbnails, 48 as maps that zoom" in said
    assert f"{figure}: head 4.6" in said  # the first of those that lead in something
    assert figure.read_text().lstrip().startswith("<?xml")


def test_a_head_of_another_group_can_be_named(tmp_path: Path) -> None:
    figure = tmp_path / "head.png"
    said = run(
        "translate", "--text", "Let's see.", "--head", "encoder:1.2", "--picture", str(figure)
    )
    assert "head 1.2" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--text", "a", "--file", __file__), "give one of --text and --file"),
        (("--text", "a", "--image", __file__, "--terminal"), "this model reads text, and an image"),
        (("--image", "no/such.png", "--terminal"), "No such file"),
        (("--text", "a", "--terminal", "--head", "nine"), "no head 'nine'; heads are layer.number"),
        (("--text", "a", "--terminal", "--head", "up:0.0"), "no group 'up'; there are self"),
        (("--text", "a", "--picture", "head.doc"), "use a name that ends in .svg, .pdf, .png"),
        (("--text", "a", "--out", "x.html", "--limit", "big"), "try 20MB"),
        (("--image", __file__, "--terminal"), "this model reads text, and an image was given"),
        (("runs/no/where",), "no model 'runs/no/where'"),
        (("--text", "a", "--out", "no/where/x.html"), "name a file in an existing folder"),
        (("--text", "a", "--out", "."), "name a file in an existing folder"),
        (("--text", "a", "--terminal", "--out", "x.html"), "--out and --picture write"),
        (("--text", "a", "--terminal", "--device", "toaster"), "no device 'toaster' to compute on"),
        (("--text", "a", "--terminal", "--device", "meta"), "no device 'meta' to compute on here"),
        (("--text", "a", "--out", "x.txt"), "x.txt is not a page: use a name that ends in .html"),
        (("--text", "a", "--out", "x.html", "--limit", "9" * 400), "try 20MB"),
    ],
)
def test_what_can_not_be_is_refused_with_what_would(words: tuple[str, ...], said: str) -> None:
    assert said in refused(*words)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    file = tmp_path / "old.txt"
    file.write_bytes("café".encode("latin-1"))
    said = refused("--terminal", "--file", str(file)).replace(" ", "")
    assert f"{file}isnottextinUTF-8" in said


def test_a_folder_that_holds_nothing_to_look_at_is_said_to(tmp_path: Path) -> None:
    assert "holds no model: it has no config.json" in refused(str(tmp_path))


def test_sizes_are_written_as_people_write_them() -> None:
    assert [number_of_bytes(x) for x in ("20MB", "1.5 kb", "7", "1g")] == [
        20_000_000,
        1500,
        7,
        1_000_000_000,
    ]
    with pytest.raises(typer.BadParameter):
        number_of_bytes("20 elephants")


def test_what_another_program_pipes_in_is_read_and_a_silent_pipe_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out, into = os.pipe()
    with os.fdopen(out) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert not piped()
        os.write(into, b"to be")
        os.close(into)
        assert piped()
        assert given(None, None, None) == "to be"
