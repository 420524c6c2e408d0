"""The page's Lab: claims and verdicts, a run with progress, the keyboard, two languages."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import expect
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.lab import record
from headwise.apps.lab.claims import CLAIMS
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.runner import find, run
from headwise.messages import Sentence
from tests.apps.look.conftest import Visits


def shown(sentence: object) -> str:
    """A sentence as the page has it: d_k is a d with an index."""
    return re.sub(r"\b([A-Za-z])_(\w+)", r"\1\2", str(sentence))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(record, "RECORDED", tmp_path / "recorded")
    return record.own_folder()


def test_an_experiment_runs_here_and_its_verdict_appears(visit: Visits, folder: Path) -> None:
    page = visit("#/lab/scale-overflow")
    expect(page.get_by_role("navigation", name="Claims").get_by_role("link")).to_have_count(
        len(CLAIMS)
    )
    verdict = page.get_by_role("region", name="Verdict")
    expect(verdict).to_contain_text("not run yet")
    page.get_by_role("button", name="Run it here").click()
    expect(verdict).to_contain_text("holds when")
    result = record.read(folder, "scale-overflow", "quick")
    assert result is not None
    for text in (str(result.because), str(result.condition), result.machine, result.date):
        expect(verdict).to_contain_text(shown(text))
    expect(verdict.locator("sub").first).to_have_text("k")
    expect(verdict.get_by_text(str(folder))).to_be_visible()
    expect(page.get_by_role("img", name="Rows without weights, unscaled scores")).to_be_visible()
    expect(page.locator("[data-claim='scale-overflow'] .sign")).to_have_text(
        re.compile("holds when")
    )
    page.get_by_text("As a table").click()
    numbers = page.get_by_role("table", name="Rows without weights, unscaled scores")
    expect(numbers.get_by_role("columnheader", name="as written, fp16")).to_be_visible()
    page.get_by_text("The experiment’s code").click()
    expect(page.get_by_text("def overflows(lab: Lab) -> Figures:")).to_be_visible()


def test_a_running_experiment_can_be_stopped(visit: Visits, folder: Path) -> None:
    page = visit("#/lab/scale-variance")
    page.get_by_role("button", name="Run it here").click()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_text("Stopped before the verdict")).to_be_visible()
    assert record.read(folder, "scale-variance", "quick") is None


def test_the_keyboard_leads_through_the_claims_and_back(visit: Visits) -> None:
    page = visit("#/lab/scale-variance")
    first, second = (page.locator(f"[data-claim='{claim.id}']") for claim in CLAIMS[:2])
    expect(page.get_by_role("heading", name=shown(CLAIMS[0].sentence))).to_be_visible()
    page.keyboard.press("Escape")
    expect(first).to_be_focused()
    page.keyboard.press("ArrowDown")
    expect(second).to_be_focused()
    page.keyboard.press("Enter")
    opened = page.get_by_role("heading", name=shown(CLAIMS[1].sentence))
    expect(opened).to_be_focused()
    expect(page).to_have_url(re.compile(f"#/lab/{CLAIMS[1].id}$"))
    page.keyboard.press("Escape")
    expect(second).to_be_focused()
    page.keyboard.press("End")
    expect(page.locator(f"[data-claim='{CLAIMS[-1].id}']")).to_be_focused()


def test_in_chinese_stale_and_hostile_results_are_told_as_text(visit: Visits, folder: Path) -> None:
    (result,) = run(find(["paper-heads"]), Lab("quick"), folder)
    hostile = '<img src="nowhere" onerror="document.title=1">'
    record.write(folder, replace(result, because=Sentence(hostile), version="0.0.1"))
    page = visit("#/lab/paper-heads?verdict=right", locale="zh-CN", color_scheme="dark")
    verdict = page.get_by_role("region", name="结论")
    expect(verdict).to_contain_text("正确 · 已过时")
    expect(verdict.get_by_text(hostile)).to_be_visible()
    expect(
        page.get_by_role("heading", name=shown(find(["paper-heads"])[0].sentence.zh))
    ).to_be_visible()
    links = page.get_by_role("navigation", name="说法").get_by_role("link")
    expect(links).to_have_count(1)
    assert page.title() != "1"


def test_an_unknown_claim_is_told_beside_the_list(visit: Visits) -> None:
    page = visit("#/lab/scale-varianse", allowed="404")
    expect(page.get_by_text("did you mean scale-variance?")).to_be_visible()
    expect(page.locator("[data-claim='scale-variance']")).to_be_visible()


def test_a_reader_moves_a_size_and_the_verdict_flips(visit: Visits, folder: Path) -> None:
    list(run(find(["scale-saturation"]), Lab("quick"), folder))
    page = visit("#/lab/scale-saturation")
    moves = page.get_by_role("region", name="Move what was fixed")
    expect(moves.get_by_role("status")).to_contain_text("with all figures, as recorded")
    moves.get_by_role("slider", name="d_k").press("Home")
    expect(moves.get_by_role("status")).to_contain_text("does not hold")
    expect(moves.get_by_role("status")).to_contain_text("The verdict flips")
    expect(page).to_have_url(re.compile("at-d_k=1"))
    moves.get_by_role("button", name=re.compile("^holds")).click()
    expect(moves.get_by_role("status")).to_contain_text("the same verdict")
    moves.get_by_role("button", name="All figures").click()
    expect(moves.get_by_role("status")).to_contain_text("as recorded")


def test_a_file_of_the_lab_has_every_claim_and_its_moves(
    visit: Visits, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the results that come with headwise
    assert CliRunner().invoke(app, ["look", "--lab"]).exit_code == 2
    file = tmp_path / "lab.html"
    assert CliRunner().invoke(app, ["look", "--lab", "--out", str(file)]).exit_code == 0
    page = visit(f"{file.as_uri()}#/lab/qk-self?at-spread=0")
    moves = page.get_by_role("region", name="Move what was fixed")
    expect(moves.get_by_role("status")).to_contain_text("The verdict flips")
    expect(page.get_by_role("navigation", name="Claims").get_by_role("link")).to_have_count(
        len(CLAIMS)
    )
