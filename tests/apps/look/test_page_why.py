"""The experiments of "Why" on the page: what is shown is what the library measures."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page, expect

import headwise as hw
from headwise.apps.lab import record
from headwise.apps.lab import why_page as why
from headwise.apps.lab.runner import find
from tests.apps.look.conftest import Visits


def found(experiment: str, **settings: object) -> dict[str, Any]:
    """The library's measurements at these settings."""
    asked = {name: str(value) for name, value in settings.items()}
    measured: dict[str, Any] = json.loads(why.answer(experiment, asked))["found"]
    return measured


def figure(page: Page, name: str) -> Any:
    """A number of the table, as it is written."""
    return page.locator(f"[data-figure='{name}'] .value")


def written(value: float) -> str:
    """A number from 0.001 to 1000 as the page writes it: three digits, no zeros at the end."""
    assert 1e-3 <= value < 1e3
    return f"{value:.3g}"


def test_a_slider_moved_by_keys_changes_the_numbers_to_the_library_s(visit: Visits) -> None:
    page = visit("#/why/scale?scaling=none")
    expect(figure(page, "variance")).to_have_text(
        written(found("scale", scaling="none")["logit_variance"])
    )
    page.get_by_role("slider", name="Width of a head").press("ArrowRight")
    expect(page).to_have_url(re.compile(r"#/why/scale\?scaling=none&d=128$"))
    wide = found("scale", scaling="none", d=128)
    expect(figure(page, "variance")).to_have_text(written(wide["logit_variance"]))
    expect(figure(page, "entropy")).to_have_text(written(wide["entropy"]))
    expect(figure(page, "top")).to_have_text(written(wide["top_weight"]))


def test_the_scaling_is_chosen_and_drawn_again_from_another_seed(visit: Visits) -> None:
    page = visit("#/why/scale?d=256")
    page.get_by_role("radiogroup", name="Logits are q·k times").get_by_text("1/dₖ").click()
    expect(figure(page, "variance")).to_have_text(
        written(found("scale", d=256, scaling="width")["logit_variance"])
    )
    page.get_by_role("button", name="Draw again").click()
    expect(page.get_by_text("seed 1")).to_be_visible()
    expect(figure(page, "variance")).to_have_text(
        written(found("scale", d=256, scaling="width", seed=1)["logit_variance"])
    )


def test_an_address_leads_to_an_experiment_and_its_settings(visit: Visits) -> None:
    page = visit("#/why/heads?width=128&heads=2&places=3")
    measured = found("heads", width=128, heads=2, places=3)
    expect(figure(page, "rank")).to_have_text(str(measured["rank"]))
    expect(figure(page, "parameters")).to_have_text(f"{measured['layers'][1]['parameters']:,}")
    expect(figure(page, "lost")).to_have_text("33 %")
    expect(page.get_by_role("slider", name="Heads, h")).to_have_attribute("aria-valuetext", "2")


def test_number_keys_go_through_the_experiments_and_back_leads_back(visit: Visits) -> None:
    page = visit("#/why")
    expect(page.get_by_role("table", name="Figures")).to_be_visible()
    for key, name, shown in (
        ("2", "heads", "Parameters"),
        ("3", "scores", "Time per pair"),
        ("4", "sharing", "Separate Q and K"),
        ("1", "scale", "Entropy"),
    ):
        page.keyboard.press(key)
        expect(page.get_by_role("heading", name=shown, exact=True)).to_be_visible()
        expect(page).to_have_url(re.compile(f"#/why/{name}$"))
        expect(page.locator("math").first).to_be_visible()
    page.go_back()
    expect(page).to_have_url(re.compile("#/why/sharing$"))


def test_brackets_are_no_higher_than_what_they_hold(visit: Visits) -> None:
    for name in ("scale", "heads", "scores"):
        page = visit(f"#/why/{name}")
        expect(page.get_by_role("table", name="Figures")).to_be_visible()
        pairs = page.locator("math mo").evaluate_all(
            """all => all.filter(({ textContent }) => textContent === '(').map((open) => {
              const height = (element) => element.getBoundingClientRect().height;
              let most = 0;
              let held = open.nextElementSibling;
              for (; held.textContent !== ')'; held = held.nextElementSibling)
                most = Math.max(most, height(held));
              return [height(open), height(held), most];
            })"""
        )
        assert pairs
        for opened, closed, held in pairs:
            assert opened == closed
            assert opened < 1.4 * held, f"{name}: {opened} around {held}"


def test_no_more_is_lost_than_there_was_to_read(visit: Visits) -> None:
    page = visit("#/why/heads")  # eight heads read four places
    expect(figure(page, "lost")).to_have_text("0 %")
    expect(page.locator("[data-figure='lost'] .beside")).to_have_text("max(0, 1 − h/m)")


def test_additive_scores_are_drawn_with_weights_of_both_sizes(visit: Visits) -> None:
    page = visit("#/why/scores")
    chart = page.get_by_role("img", name="Largest weight among 64 keys")
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 21, box["y"] + 60)  # the right end: the widest head
    curves = found("scores")["curves"]
    readout = page.locator(".readout", has_text="d 256")
    for name, score in (
        ("additive, w within ±1/√d", "additive"),
        ("additive, w of variance 1", "additive_unscaled"),
    ):
        said = readout.locator("p", has_text=name).locator("b")
        expect(said).to_have_text(written(curves[score][-1]["top_weight"]))
    expect(page.get_by_text("with weights of variance 1 it saturates too")).to_be_visible()


def test_shared_logits_are_drawn_symmetric(visit: Visits) -> None:
    page = visit("#/why/sharing?tokens=12")
    shared = page.get_by_role("region", name="Shared by Q and K").locator("canvas").first
    pixels = shared.evaluate(
        "canvas => Array.from(new Uint32Array(canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.buffer))"
    )
    rows = [pixels[start : start + 12] for start in range(0, 144, 12)]
    assert len(set(pixels)) > 20
    assert rows == [list(column) for column in zip(*rows, strict=True)]


def test_a_chart_says_the_number_under_the_pointer(visit: Visits) -> None:
    page = visit("#/why/scale?scaling=none&d=64")
    chart = page.get_by_role("img", name="Entropy")
    box = chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 21, box["y"] + 60)  # the right end: the widest head
    expect(page.get_by_text("dₖ 1,024")).to_be_visible()
    widest = found("scale", scaling="none", d=64)["curves"]["none"][-1]
    assert widest["d"] == 1024
    said = page.locator(".readout", has_text="dₖ 1,024").locator("b").nth(1)
    expect(said).to_have_text(written(widest["entropy"]))


def test_a_bad_address_says_what_works_and_leads_back(visit: Visits) -> None:
    page = visit("#/why/scale?d=48", allowed="400")
    expect(page.get_by_role("alert")).to_contain_text("d=48 is out of bounds")
    expect(page.get_by_role("alert")).to_contain_text("use a power of two from 1 to 1024")
    page.get_by_role("button", name="Back to the defaults").click()
    expect(figure(page, "variance")).to_have_text(written(found("scale")["logit_variance"]))


def test_every_experiment_speaks_chinese(visit: Visits) -> None:
    page = visit("#/why", locale="zh-CN", color_scheme="dark")
    for name in ("为什么除以 √dk", "为什么要多头", "为什么用点积", "为什么 Q 不等于 K"):
        page.get_by_role("link", name=name).click()
        expect(page.get_by_role("table", name="数值")).to_be_visible()
        english = page.locator(".why").evaluate(
            "view => view.innerText.match(/\\b(the|of|and|measured|theory)\\b/g) ?? []"
        )
        assert not english, f"{name}: {english}"


def cells(values: torch.Tensor) -> list[str]:
    """A row of a table with these numbers, three digits each."""
    return [f"{float(f'{x:.3g}'):g}".replace("-", "−") for x in values.tolist()]


def test_three_tokens_are_attended_by_hand_as_by_the_library(visit: Visits) -> None:
    page = visit("#/why/tokens")
    worked = page.locator("[data-worked]")
    expect(worked).to_contain_text("= (1.43, 0.86)")  # as in the handbook
    page.get_by_label("X, row 2, column 1").fill("-1.5")
    page.get_by_label("no token sees later ones").check()
    x = torch.tensor([[1.0, 0.0], [-1.5, 1.0], [1.0, 1.0]])
    q, k, v = (
        (x @ torch.tensor(w))[None, None]
        for w in ([[1.0, 0.0], [1.0, 1.0]], [[0.0, 1.0], [1.0, 0.0]], [[2.0, 0.0], [0.0, 1.0]])
    )
    causal = hw.mask.causal()
    out = hw.attention(q, k, v, mask=causal)[0, 0]
    weights = hw.attention_map(q, k, mask=causal)[0, 0]
    expect(page.locator("[data-matrix='output'] tr").last.locator("td")).to_have_text(cells(out[2]))
    expect(page.locator("[data-matrix='softmax'] tr").nth(1).locator("td")).to_have_text(
        cells(weights[1])
    )
    page.locator("[data-matrix='Q'] tr").first.click()
    expect(worked.get_by_role("heading")).to_have_text("Token 1, step by step")
    expect(worked).to_contain_text("later keys are hidden")
    page.get_by_role("button", name="Back to the start").click()
    expect(worked).to_contain_text("= (1.43, 0.86)")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any result of the lab."""
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path))
    monkeypatch.setattr(record, "RECORDED", tmp_path / "recorded")


def recorded(id: str) -> dict[str, Any]:
    """The figures of the recorded result that the page shows."""
    (claim,) = find([id])
    result = record.best(claim, [record.RECORDED])
    assert result is not None
    return dict(result.figures)


def test_a_reader_moves_alpha_width_and_rate_over_the_recorded_atlas(visit: Visits) -> None:
    rows = recorded("scale-atlas")["rows"]
    page = visit("#/why/scale?at-task=recall&at-gain=4")
    atlas = page.get_by_role("region", name="After training: an atlas of the scale")
    atlas.get_by_role("slider", name="Exponent α =").press("End")
    atlas.get_by_role("slider", name="Learning rate").press("Home")
    atlas.get_by_role("slider", name="Width dₖ =").press("Home")
    expect(page).to_have_url(re.compile("at-alpha=1&at-rate=0.001&at-width=16"))
    least = min(row["rate"] for row in rows)
    here = {
        row["way"]: row["loss"]
        for row in rows
        if (row["task"], row["gain"]) == ("recall", 4.0)
        and (row["width"], row["rate"]) == (min(x["width"] for x in rows), least)
        and row["length"] == max(x["length"] for x in rows)
    }
    expect(figure(page, "atlas-loss")).to_have_text(written(here["1.0"]))
    ways = [way for way in here if way not in ("norm", "swapped")]
    best = min(ways, key=here.__getitem__)
    expect(figure(page, "atlas-best")).to_have_text(f"{float(best):g}")
    expect(atlas.get_by_role("img", name="Final loss by α, each start")).to_be_visible()
    expect(page.get_by_role("table", name="Figures").first).to_be_visible()  # of random queries


def test_the_phase_diagram_shows_the_recorded_lead(visit: Visits) -> None:
    rows = recorded("rivals-phase")["rows"]
    page = visit("#/why")
    expect(page.get_by_role("navigation", name="Experiments")).to_be_visible()  # keys are heard
    page.keyboard.press("5")
    most, far, size = (max(row[name] for row in rows) for name in ("pairs", "distance", "budget"))

    def right(kind: str) -> float:
        mine = [
            row["right"]
            for row in rows
            if (row["kind"], row["pairs"], row["distance"], row["budget"])
            == (kind, most, far, size)
        ]
        return sum(mine) / len(mine)

    cell = page.locator(f"[data-place='{most}-{far}']")
    rivals = [right(kind) for kind in ("LSTM", "linear", "convolution")]
    expect(cell).to_have_text(f"+{100 * (right('attention') - max(rivals)):.0f}")
    expect(cell).to_have_class(re.compile("ahead"))
    page.get_by_role("combobox", name="Against").select_option("dilated convolution")
    expect(cell).to_have_text(f"+{100 * (right('attention') - right('convolution')):.0f}")
    expect(page).to_have_url(re.compile("against=convolution"))


@pytest.mark.parametrize("address", ["#/why/scale", "#/lab/scale-atlas"])
def test_a_long_page_scrolls_and_the_window_does_not(visit: Visits, address: str) -> None:
    page = visit(address)
    shown = "After training: an atlas of the scale" if "why" in address else "Verdict"
    expect(page.get_by_role("region", name=shown)).to_be_attached()
    # a document that is longer than the window shows an empty screen below the page
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")


@pytest.mark.usefixtures("empty")
def test_grids_that_are_not_recorded_say_so(visit: Visits) -> None:
    page = visit("#/why/scale")
    note = page.get_by_role("note")
    expect(note).to_contain_text("Nothing is recorded here yet")
    expect(note).to_contain_text("headwise lab run scale-atlas")
    page = visit("#/why/phase", locale="zh-CN")
    expect(page.get_by_role("status")).to_contain_text("headwise lab run rivals-phase")
