"""The handbook says what the results say: it is written from them, and nothing is typed by hand."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import ablations, comparisons, handbook, record
from headwise.apps.lab.claim import TOPICS, both
from headwise.apps.lab.claims import CLAIMS

FOLDER = Path(__file__).parents[3] / "docs/handbook"
CODE = re.compile(r"^```.*?^```|^    .*?$|`[^`]*`", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return handbook.pages()


def test_every_page_is_what_the_recorded_results_give(pages: dict[str, str]) -> None:
    written = pages
    assert {path.name for path in FOLDER.glob("*.md")} == set(written)
    for name, page in written.items():
        assert (FOLDER / name).read_text(encoding="utf-8") == page, (
            f"{name} differs from the results: headwise lab handbook --out docs/handbook"
        )


def test_every_picture_shows_the_recorded_figures(pages: dict[str, str]) -> None:
    shown = {
        target for page in pages.values() for target in re.findall(r"\(pictures/([\w.-]+)\)", page)
    }
    assert shown == {path.name for path in (FOLDER / "pictures").iterdir()}
    for name in shown:
        drawn = (FOLDER / "pictures" / name).read_text(encoding="utf-8")
        told = handbook.picture_digest(name.split(".")[0], [record.RECORDED])
        assert f"<!-- figures {told} -->" in drawn, name


@pytest.mark.parametrize("chapter", handbook.ORDER[1:])
@pytest.mark.parametrize(("chinese", "word"), [(False, "verturn"), (True, "推翻")])
def test_a_chapter_has_at_least_two_pictures_and_a_verdict_to_overturn(
    chapter: str, chinese: bool, word: str
) -> None:
    text = handbook.template(chapter, chinese)
    names = [name for name, _ in handbook.DIRECTIVE.findall(text)]
    assert names.count("picture") + names.count("drawing") >= 2
    assert word in text.rpartition("\n## ")[2]


def test_a_new_claim_stands_in_the_chapter_of_its_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    new = replace(CLAIMS[0], id="mask-new")
    monkeypatch.setattr(handbook, "CLAIMS", (*CLAIMS, new))
    handbook.unnamed.cache_clear()
    try:
        assert handbook.claims_of("masks")[-1] == "mask-new"
        assert "{{claim mask-new}}\n\n## 练习" in handbook.template("masks", chinese=True)
    finally:
        handbook.unnamed.cache_clear()


def test_a_changed_result_changes_its_page(tmp_path: Path, pages: dict[str, str]) -> None:
    (claim,) = [each for each in CLAIMS if each.id == "scale-sigma"]
    result = record.best(claim, [record.RECORDED])
    assert result is not None
    changed = replace(
        result, because=both("it is 12345", "是 12345"), verdict="holds", condition=None
    )
    record.write(tmp_path, changed)
    mine = handbook.pages([tmp_path, record.RECORDED])
    assert {name for name in mine if mine[name] != pages[name]} == {
        *("scale.md", "scale.zh.md"),
        *("index.md", "index.zh.md"),  # the signs beside the notes, and how many hold
    }
    assert "12345" in mine["scale.md"]


@pytest.mark.parametrize("chapter", handbook.ORDER)
@pytest.mark.parametrize("chinese", [False, True], ids=["en", "zh"])
def test_no_number_is_typed_in_the_prose_of_a_chapter(chapter: str, chinese: bool) -> None:
    text = handbook.template(chapter, chinese)
    prose = handbook.DIRECTIVE.sub("", CODE.sub("", text)).replace("2017", "")
    prose = re.sub(r"^\d+\. ", "", prose, flags=re.MULTILINE)  # a numbered list
    assert re.findall(r".*[\d].*", prose) == []


def test_every_claim_is_discussed_in_one_chapter_and_stands_beside_the_notes(
    pages: dict[str, str],
) -> None:
    discussed = [id for chapter in handbook.ORDER for id in handbook.claims_of(chapter)]
    assert sorted(discussed) == sorted(claim.id for claim in CLAIMS)
    beside = " ".join(
        arguments
        for name, arguments in handbook.DIRECTIVE.findall(handbook.template("index", False))
        if name == "verdicts"
    ).split()
    assert set(beside) == {claim.id for claim in CLAIMS if claim.notes != "F"}  # in a note
    for topic in TOPICS.values():
        assert str(topic) in pages["index.md"]


@pytest.mark.parametrize("chapter", handbook.ORDER)
def test_each_page_ends_with_three_exercises(chapter: str) -> None:
    for chinese, heading, numbers in (
        (False, "## Exercises", ["One", "Two", "Three"]),
        (True, "## 练习", ["一", "二", "三"]),
    ):
        _, found, exercises = handbook.template(chapter, chinese).partition(heading)
        assert found
        assert "\n## " not in exercises
        assert re.findall(r"^\*\*(\w+)[.。]\*\*", exercises, re.MULTILINE) == numbers


def test_an_unknown_directive_is_an_error() -> None:
    with pytest.raises(ValueError, match="no directive"):
        handbook.ChapterWriter({}, ablations.Translators([]), chinese=False).fill(
            "{{number scale-sigma}}"
        )


def test_the_command_writes_the_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = handbook.pictures()[:1]  # each takes half a second
    monkeypatch.setattr(handbook, "pictures", lambda: drawn)
    done = CliRunner().invoke(app, ["lab", "handbook", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "index.zh.md").read_text(encoding="utf-8").startswith("# ")
    assert (tmp_path / "pictures" / f"{drawn[0]}.svg").exists()


def run(variant: str, seed: int, bleu: float) -> dict[str, object]:
    return {"variant": variant, "seed": seed, "diverged": False, "bleu": bleu, "test_loss": 1.0}


def test_the_table_of_translators_tells_a_difference_from_chance(tmp_path: Path) -> None:
    runs = [run("base", seed, 30 + 0.1 * seed) for seed in range(4)]
    runs += [run("heads-1", seed, 28 + 0.1 * seed) for seed in range(4)]
    runs += [run("heads-16", seed, 30.1 + 0.1 * seed) for seed in range(4)]
    runs.append({"variant": "unscaled", "seed": 0, "diverged": True})
    (tmp_path / ablations.FILE).write_text(json.dumps({"runs": runs, "sessions": []}))
    read = ablations.recorded([tmp_path], [])
    rows = {str(row[0]): row for row in ablations.table(read).rows}
    assert rows["one head"][1] == 4
    assert str(rows["one head"][6]).startswith("-2.00 (")
    assert float(str(rows["one head"][7])) < 0.001 < 0.05 < float(str(rows["sixteen heads"][7]))
    assert rows["not scaled"][5:] == ("diverged", *(None,) * 3)


def test_the_table_stands_beside_the_paper_and_the_notes() -> None:
    runs = [run("base", seed, 30 + 0.1 * seed) for seed in range(4)]
    runs += [run("heads-1", seed, 29.55 + 0.02 * seed) for seed in range(4)]
    runs += [run("heads-16", seed, 30.01 + 0.1 * seed) for seed in range(4)]
    runs += [run("keys-half", seed, 30.01 + 0.1 * seed) for seed in range(4)]
    runs += [run("shared", seed, 25 + 0.1 * seed) for seed in range(4)]
    paper = {str(row[1]): row[3:] for row in comparisons.beside_the_paper(runs).rows}
    assert paper["1 head"][1] == "yes"  # it loses here and there
    assert paper["16 heads"][1:] == ("yes", "both within half a point")
    assert paper["keys half as wide"][1:] == ("not certain", "chance may explain it")
    assert paper["4 heads"] == (None, None, None)  # not trained
    single = [run("base", 0, 30.0), run("heads-16", 0, 20.0)]
    assert comparisons.beside_the_paper(single).rows[2][4:] == ("not certain", "too few runs")
    notes = {str(row[0]): row[1:] for row in comparisons.beside_the_notes(runs).rows}
    assert notes["many heads gain 1–2 % over one"][1:] == ("yes", "no", "yes")
    assert notes["a shared matrix for Q and K costs 1–2 %"][1:] == ("yes", "no", "no")
    assert notes["dot product beats additive"] == (None,) * 4


def test_the_time_that_the_table_took_is_told() -> None:
    session = {"machine": "a GPU", "date": "2026-01-02", "seconds": 540.0}
    runs = [{**run("base", 0, 30.0), "signature": "nrefs:var"}]
    translators = ablations.Translators(runs, [session, session])
    told = handbook.ChapterWriter({}, translators, chinese=False).fill("{{origins}}")
    assert told == (
        "`nrefs:var` · `headwise lab table` · 2 sessions, 18 minutes on a GPU · 2026-01-02"
    )
