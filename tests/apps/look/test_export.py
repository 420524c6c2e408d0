"""The page as one file: self-contained, bounded, and safe from what the text says."""

import base64
import errno
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headwise.apps.look.atlas import Atlas
from headwise.apps.look.readers.reader import too_long
from headwise.apps.look.serving import page_file as export
from headwise.apps.look.serving.answers import answer
from headwise.apps.look.session import Progress, Session
from tests.apps.look.sessions import session_on

EVIL = "</script><script>alert(1)</script> <!-- <img src=x onerror=alert(2)> -->"
LONG = "to be or not to be, that is the question " * 27


@pytest.fixture(scope="module")
def long() -> Session:
    return session_on(LONG)


@pytest.fixture
def static(tmp_path: Path) -> Path:
    """A page whose own code and style would end their elements."""
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text(
        '<!doctype html><html><head><title>x</title><script type="module" src="headwise.js?v=1">'
        '</script><link rel="stylesheet" href="headwise.css?v=2" /></head><body>'
        "<div data-headwise-page></div></body></html>"
    )
    (folder / "headwise.js").write_text("const end = '</script>', comment = `<!--`;")
    (folder / "headwise.css").write_text("p::before { content: '</style>' }")
    return folder


def written(
    session: Session, path: Path, static: Path, *heads: str, limit: int = 20_000_000
) -> Any:
    """The data of a file, read as the browser reads it."""
    size, _ = export.write(session, path, heads, limit, static)
    content = path.read_bytes()
    assert len(content) == size <= limit
    pattern = rb'<script type="application/json" id="headwise-data">(.*?)</script>'
    return json.loads(re.findall(pattern, content, re.DOTALL)[0])


def test_a_file_has_its_notes_in_both_languages(long: Session) -> None:
    (note,) = too_long(5000, 4096)
    session = Session(reader=long.reader, progress=Progress("ready", None))
    session.atlases["0"] = Atlas(replace(long.atlases["0"].input, notes=(note,)))
    state = export.Recorded(session, 1000).content([])["answers"]["/api/state"]["json"]
    assert state["inputs"][0]["notes"] == [note]
    assert state["zh"] == {note: "5,000 个词元；模型训练时一次只读 4,096 个"}


def test_a_page_that_can_t_be_written_leaves_the_old_one(
    long: Session, tmp_path: Path, static: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    target, link = tmp_path / "page.html", tmp_path / "link.html"
    target.write_text("the old page")
    link.symlink_to(target)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            export.write(long, link, (), 20_000_000, static)
    assert target.read_text() == "the old page"
    assert {path.name for path in tmp_path.iterdir()} == {"page.html", "link.html", "static"}
    size, _ = export.write(long, link, (), 20_000_000, static)
    assert link.is_symlink()
    assert target.stat().st_size == size


def test_a_text_can_not_break_out_of_the_file(tmp_path: Path, static: Path) -> None:
    session = session_on(EVIL)
    path = tmp_path / "file.html"
    data = written(session, path, static)
    html = path.read_text()
    assert html.count("<script") == html.count("</script>") == 2  # the data's and the page's own
    assert html.count("<style") == html.count("</style>") == 1
    assert "<!--" not in html
    assert "<img" not in html
    (tokens,) = (x["json"] for at, x in data["answers"].items() if "axis=rows" in at)
    assert "".join(tokens["tokens"][1:]) == EVIL


def test_a_file_asks_nobody(tmp_path: Path, static: Path) -> None:
    path = tmp_path / "file.html"
    written(session_on("hello"), path, static)
    html = path.read_text()
    assert "default-src 'none'" in html
    assert not re.search(r"""(src|href)=["']?(?!data:)""", html)


def test_a_short_text_is_in_the_file_with_every_map(tmp_path: Path, static: Path) -> None:
    session = session_on("to be or not to be")
    data = written(session, tmp_path / "file.html", static)
    state = data["answers"]["/api/state"]["json"]
    assert state["pages"] == {
        "heads": True,
        "cost": False,
        "lab": False,
        "sparse": False,
        "why": False,
        "watch": False,
    }
    assert len(state["static"]["heads"]) == 48
    asked = "/api/inputs/0/map/self/4/6/tile/0/0/0?how=max&drop=0"
    kept, given = data["answers"][asked], answer(session, asked)
    assert gzip.decompress(base64.b64decode(kept["gzip"])) == given.body
    assert kept["headers"]["X-Rows"] == given.headers["X-Rows"]


def test_of_a_long_text_the_chosen_heads_are_inside(
    long: Session, tmp_path: Path, static: Path
) -> None:
    data = written(long, tmp_path / "file.html", static, "4.6", "self:5.1", limit=4_000_000)
    inside = data["answers"]["/api/state"]["json"]["static"]["heads"]
    assert [(x["layer"], x["head"]) for x in inside] == [(4, 6), (5, 1)]
    maps = {at.split("/tile/")[0] for at in data["answers"] if "/map/" in at and "/tile/" in at}
    assert maps == {"/api/inputs/0/map/self/4/6", "/api/inputs/0/map/self/5/1"}
    leaves = [at for at in data["answers"] if "self/4/6/tile/1/" in at]
    assert "/api/inputs/0/map/self/4/6/tile/1/1/0?how=mean&drop=0" not in leaves  # empty: causal
    assert len(leaves) == 2 * 3


def test_what_fits_is_inside_and_nothing_is_above_the_limit(
    long: Session, tmp_path: Path, static: Path
) -> None:
    path = tmp_path / "file.html"
    whole, _ = export.write(long, path, ["4.6"], 20_000_000, static)
    small = written(long, path, static, "4.6", limit=whole - 50_000)
    (inside,) = small["answers"]["/api/state"]["json"]["static"]["heads"]
    assert (inside["levels"], inside["of"]) == (1, 2)
    with pytest.raises(ValueError, match="a larger --limit"):
        export.write(long, path, (), 100_000, static)


def test_a_page_that_is_not_built_is_told_so(long: Session, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pip install -e"):
        export.write(long, tmp_path / "file.html", (), 10**7, tmp_path / "nowhere")


def test_a_file_opens_every_head_and_fills_its_limit_from_the_leading_ones(
    long: Session, tmp_path: Path, static: Path
) -> None:
    group, limit = long.atlases["0"].input.main, 9_000_000
    path = tmp_path / "file.html"
    inside = written(long, path, static, limit=limit)["answers"]["/api/state"]["json"]["static"]
    levels = {f"{x['layer']}.{x['head']}": (x["levels"], x["of"]) for x in inside["heads"]}
    assert set(levels) == {head.name for head in group.heads}
    assert all(levels[head.name] == (2, 2) for head, _ in group.leaders())
    assert (1, 2) in levels.values()
    assert path.stat().st_size > 0.9 * limit


def test_a_small_file_opens_the_leading_heads_first(
    long: Session, tmp_path: Path, static: Path
) -> None:
    group = long.atlases["0"].input.main
    data = written(long, tmp_path / "file.html", static, limit=4_000_000)
    inside = data["answers"]["/api/state"]["json"]["static"]["heads"]
    names = [f"{x['layer']}.{x['head']}" for x in inside]
    leading = [head.name for head, _ in group.leaders()]
    assert names[: len(leading)] == leading
    assert len(leading) < len(names) < len(group.heads)
