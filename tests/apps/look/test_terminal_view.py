"""Heads in a terminal: no figure is cut, and no token controls it."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console

from headwise.apps.look import terminal_view
from headwise.apps.look.readers.opening import opened
from headwise.apps.look.readers.reader import silent


def shown(text: str, width: int) -> str:
    """The output on a terminal of so many columns."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None)
    terminal_view.show(console, opened("gpt", "cpu").read(text, silent))
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 24, 40, 45, 60, 80])
def test_a_narrow_terminal_shows_every_figure(width: int) -> None:
    output = shown("to be or not to be", width)
    figures = output.partition("heads\n")[2].partition("keys is")[0]
    assert "…" not in figures
    columns = {title for title, *_ in terminal_view.COLUMNS} - {"patches"}  # of images
    for title in columns:
        assert re.search(rf"head .*\b{title}\b", figures), title
    assert max(cell_len(line) for line in output.splitlines()) <= width


@pytest.mark.parametrize(
    ("text", "sign"),
    [("\x1b[2J\x1b]0;title\x07", "␛"), ("a \x9b31m", "�"), ("a \u202e b", "�"), ("a\r\nb", "␍")],
)
def test_a_token_can_not_control_the_terminal(text: str, sign: str) -> None:
    output = shown(text, 80)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", output)
    assert sign in output
