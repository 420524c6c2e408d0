"""A head as a figure."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import headwise as hw
from headwise.apps.look import pictures
from headwise.apps.look.scene import Group, Head, Input


def pair(tokens: list[str]) -> tuple[Group, Head]:
    q = torch.randn(1, 1, len(tokens), 8)
    figures = {"entropy_mean": 1.234, "max_logit_max": 5.0}
    rows = torch.zeros(len(tokens))
    head = Head(2, 3, "attention", figures, hw.attention_map(q, q), rows, rows, "content")
    return Group("self", "self-attention", False, tuple(tokens), tuple(tokens), (head,)), head


def test_an_svg_has_the_tokens_and_figures_as_text(tmp_path: Path) -> None:
    path = tmp_path / "head.svg"
    group, head = pair(["a$b$", "\n", "<i>", "last"])
    pictures.save(path, "model", group, head)
    svg = path.read_text()
    for said in ("a$b$", "⏎", "&lt;i&gt;", "last", "entropy 1.23 nats", "head 2.3"):
        assert said in svg
    again = tmp_path / "again.svg"
    pictures.save(again, "model", group, head)
    assert again.read_text() == svg


@pytest.mark.parametrize("kind", [".png", ".pdf"])
def test_a_long_map_is_pooled_and_says_so(tmp_path: Path, kind: str) -> None:
    group, head = pair(["word"] * 300)
    path = tmp_path / f"head{kind}"
    pictures.save(path, "model", group, head)
    assert path.read_bytes()[:4] in (b"\x89PNG", b"%PDF")
    assert "in at most 256 × 256 cells" in pictures.caption(group, head, pooled=True)


def test_control_characters_leave_the_svg_well_formed(tmp_path: Path) -> None:
    path = tmp_path / "head.svg"
    tokens = ["\x1b[31m", "\x00", "a\x0cb", "\x9b", "\ud800", "\uffff", "\r\n", "last"]
    pictures.save(path, "a\x07 $model$", *pair(tokens))
    said = "".join(ElementTree.parse(path).getroot().itertext())
    for label in ("␛[31m", "␀", "a␌b", "␍⏎", "last", "a␇ $model$"):
        assert label in said


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "boxes"), [(".svg", ""), (".png", "世界")])
def test_letters_without_a_font_are_named_and_not_warned_of(
    tmp_path: Path, kind: str, boxes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "fonts", lambda: ["DejaVu Sans"])
    found = pictures.save(tmp_path / f"head{kind}", "model", *pair(["世界", "a", "世"]))
    assert found == boxes


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.svg, \.pdf, \.png"):
        pictures.save(tmp_path / "head.docx", "model", *pair(["a", "b"]))


def test_a_picture_shows_one_head() -> None:
    group, head = pair(["a", "b"])
    read = Input("x", "text", (group,))
    assert pictures.chosen(read, ["2.3"]) == (group, head)
    assert pictures.chosen(read, []) == (group, head)
    with pytest.raises(ValueError, match="one head, and 2 were named"):
        pictures.chosen(read, ["2.3", "2.3"])
