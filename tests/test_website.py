"""The site: every public name is in the reference, every page in the menu, every link rewritten."""

import doctest
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import headwise
from website import contents, notebook_pages, reference, results, staging
from website.checking import broken
from website.contents import ROOT, Language, menu, pages
from website.staging import LINK, Stage

PAGES = {module: reference.page(module) for module in reference.modules()}
NAMES = [name for module in reference.modules() for name in reference.public(module)]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_every_public_name_has_an_entry_with_a_docstring(name: reference.PublicName) -> None:
    kind = "class" if inspect.isclass(name.value) else "function"
    kind = kind if kind == "class" or inspect.isroutine(name.value) else "data"
    lines = PAGES[reference.home(name)].splitlines()
    head = f":::::{{py:{kind}}} {name.name}"
    at = [n for n, line in enumerate(lines) if line.split("(")[0] == head]
    assert len(at) == 1, f"{name.path} has no entry"
    assert lines[at[0] + 2].strip(" :"), f"{name.path} has no docstring"


def test_the_reference_knows_every_name_that_headwise_shows() -> None:
    paths = {name.path for name in NAMES} | set(reference.modules())
    assert {f"headwise.{name}" for name in headwise.__all__} <= paths


def test_every_file_of_the_documentation_is_a_page_of_a_menu() -> None:
    found = pages()
    files = {*ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")}
    assert files <= {page.file for page in found}
    for language in ("en", "zh"):
        names = [page.name for page in found if page.language == language]
        listed = [name for some in menu(names).values() for name in some]
        assert sorted(listed) == sorted(name for name in names if name != "index")


def test_a_new_file_appears_by_itself(tmp_path: Path) -> None:
    for name in ("docs/new.md", "docs/zh/new.md", "docs/lab/scale.md", "docs/lab.zh.md"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# Title\n", encoding="utf-8")
    found = {(page.language, page.name) for page in pages(tmp_path)}
    assert {("en", "new"), ("zh", "new"), ("en", "lab/scale"), ("zh", "lab")} <= found


def test_links_lead_to_pages_files_and_the_other_language(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "zh", "zh", pages())
    linked = stage.linked(
        "[`x`](compute.zh.md#a) [y](gpu.md) [z](../LICENSE) [w](lab.md) `a[0](b)` <iframe "
        'src="gallery/gpt.html">',
        ROOT / "docs" / "look.zh.md",
        "look",
    )
    assert linked == (
        '[`x`](compute.md#a) <a href="../gpu.html">y</a> <a href="_files/LICENSE">z</a> '
        '<a href="../lab.html">w</a> `a[0](b)` <iframe src="../gallery/gpt.html">'
    )


def test_a_line_of_chinese_goes_on_without_a_space(tmp_path: Path) -> None:
    text = "# 题\n\n一个头，\n看前面的词元，\n`k` 也看。\n\n- 甲\n- 乙\n"
    linked = Stage(tmp_path / "zh", "zh", pages()).linked(text, ROOT / "docs/look.zh.md", "look")
    assert linked == "# 题\n\n一个头，看前面的词元，\n`k` 也看。\n\n- 甲\n- 乙\n"


def test_a_place_that_html_marks_is_linked_in_html(tmp_path: Path) -> None:
    stage = Stage(tmp_path / "en", "en", pages())
    file = ROOT / "docs" / "handbook" / "index.md"
    linked = stage.linked("[a](heads.md#heads-concat) [b](../lab.md)", file, "handbook/index")
    assert linked == '<a href="heads.html#heads-concat">a</a> [b](../lab.md)'


@pytest.mark.parametrize("language", ["en", "zh"])
def test_every_picture_is_beside_its_page(language: Language, tmp_path: Path) -> None:
    stage = Stage(tmp_path, language, pages())
    stage.copy()
    shown = [
        (tmp_path / name).parent / match["target"]
        for name in stage.names
        for match in LINK.finditer((tmp_path / f"{name}.md").read_text(encoding="utf-8"))
        if match["bang"]
    ]
    assert len(shown) > 10
    assert [path for path in shown if not path.is_file()] == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">b</a><a href="c.html">c</a>')
    (tmp_path / "b.html").write_text('<p id="here"></p>')
    assert broken(tmp_path) == ["a.html: b.html#there", "a.html: c.html"]


def documented() -> None:
    """Add.

    >>> 1 + 1
    2

    And so on.
    """


def test_the_examples_of_a_docstring_become_code() -> None:
    assert reference.markdown(documented).splitlines() == [
        "Add.", "", "```pycon", ">>> 1 + 1", "2", "```", "", "And so on."
    ]  # fmt: skip


def test_a_signature_stands_as_in_the_code() -> None:
    said = reference.signature(headwise.attention)
    assert said.startswith("(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None = None, ")
    assert said.endswith("engine: str = 'auto') -> Tensor")


@pytest.mark.parametrize("module", [contents, notebook_pages, reference, results, staging])
def test_the_examples_of_the_builder_hold(module: ModuleType) -> None:
    assert doctest.testmod(module).failed == 0
