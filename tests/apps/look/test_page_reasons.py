"""The edges behind a prediction, on the page: they are the library's, and hiding one is real."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import expect

from headwise import Edge, load, watch
from headwise.apps.look.reasons import ReasonEdge
from headwise.apps.look.serving import page_file
from headwise.apps.look.show import session_of
from headwise.watching import runner_up
from tests.apps.look.conftest import Served, Visits
from tests.apps.look.test_page_narrow import try_widths

TEXT = "My dog chased the ball. My d"


@pytest.fixture
def dog(serve: Callable[..., Served]) -> Served:
    return serve("gpt", TEXT).wait_until_read()


def test_the_edges_behind_a_prediction_are_drawn_and_hidden(dog: Served, visit: Visits) -> None:
    page = visit("#/reasons", base=dog.url)
    told = page.locator("[data-answer]")
    expect(told).to_contain_text("After d the model predicts og")
    first = dog.session.reasons("0", 11).edges(1)[0]
    chosen = page.locator("[data-chosen]")
    expect(chosen.get_by_role("heading")).to_have_text(f"{first.layer}.{first.head}: d looks at og")
    expect(page.locator("[data-edge]")).to_have_count(40)
    chosen.get_by_role("button", name="Hide this edge").click()
    hidden = page.locator("[data-hidden]")
    expect(hidden.get_by_role("row", name=re.compile("^og "))).to_be_visible()
    before, after = hidden.get_by_role("row", name=re.compile("^og ")).get_by_role("cell").all()
    assert float(after.inner_text().strip("<%")) < float(before.inner_text().strip("<%"))
    page.keyboard.press("Escape")
    expect(hidden).to_have_count(0)
    head = page.locator("[data-heads] button").first
    head.click()
    expect(page.get_by_role("heading", name="Without 1 head")).to_be_visible()
    expect(head).to_have_attribute("aria-pressed", "true")
    expect(hidden.get_by_role("row", name=re.compile("^og "))).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowLeft")
    expect(page).to_have_url(re.compile("row=10"))
    expect(told).to_contain_text("After My the model predicts")
    try_widths(page)


def test_a_translation_s_edges_cross_from_the_source(
    serve: Callable[..., Served], visit: Visits
) -> None:
    served = serve("translate", "The cat is black.").wait_until_read()
    page = visit("#/reasons?row=1", base=served.url, locale="zh-CN")
    expect(page.locator("[data-answer]")).to_contain_text("在 Le 之后，模型预测 chat")
    kinds = {edge.group for edge in served.session.reasons("0", 1).edges(40)}
    assert kinds == {"encoder", "decoder", "cross"}
    expect(page.locator("[data-edge]")).to_have_count(40)


def test_a_file_holds_the_edges_of_a_short_text(dog: Served, visit: Visits, tmp_path: Path) -> None:
    file = tmp_path / "dog.html"
    page_file.write(dog.session, file, [], 20_000_000)
    page = visit(f"{file.as_uri()}#/reasons?row=10", offline=True)
    told = dog.session.reasons("0", 10)
    expect(page.locator("[data-answer]")).to_contain_text("After My the model predicts")
    hide = page.locator("[data-chosen]").get_by_role("button", name="Hide this edge")
    hide.click()
    hidden = page.locator("[data-hidden]")
    expect(hidden.get_by_role("heading", name="Without 1 edge")).to_be_visible()
    first, head = told.edges(1)[0], told.heads()[0]
    predictor, module = (
        told.read.predictor,
        told.read.main.head(f"{first.layer}.{first.head}").module,
    )
    assert predictor is not None
    edge = Edge(module, first.head, first.key, (first.query, first.query + 1))
    outcome, *_ = predictor.compare(10, [edge])[0]
    row = hidden.get_by_role("row", name=re.compile(f"^{re.escape(outcome.name.strip())} "))
    after = row.get_by_role("cell").last
    assert float(after.inner_text().strip("<%")) == pytest.approx(100 * outcome.after, rel=0.01)
    page.locator("[data-heads] button").first.click()  # a file has each answer alone
    expect(page.get_by_role("heading", name="Without 1 head")).to_be_visible()
    assert (
        page.locator("[data-heads] button")
        .first.inner_text()
        .startswith(f"{head.layer}.{head.head}")
    )
    page.locator("[data-edge='9']").dispatch_event("click")
    expect(hide).to_be_disabled()  # one that is not among the first
    page.locator("[data-edge='0']").dispatch_event("click")
    page.locator("[data-chosen]").get_by_role("link", name="Open the head").click()
    expect(page).to_have_url(re.compile("of=10"))
    expect(page.get_by_role("figure", name=re.compile("effect on the prediction"))).to_be_visible()
    page.get_by_role("radio", name="weight", exact=True).click()
    expect(page).not_to_have_url(re.compile("of="))


def test_a_heads_map_is_coloured_by_effect_down_to_single_edges(dog: Served, visit: Visits) -> None:
    told = dog.session.reasons("0", 11)
    first = told.edges(1)[0]
    page = visit("#/reasons", base=dog.url)
    page.locator("[data-chosen]").get_by_role("link", name="Open the head").click()
    expect(page).to_have_url(re.compile("of=11"))
    legend = page.get_by_role("figure", name=re.compile("effect on the prediction"))
    expect(legend).to_be_visible()
    head = dog.session.atlases["0"].input.group(first.group).head(f"{first.layer}.{first.head}")
    cells, largest = told.tile(head, 0, 0, 0)
    assert cells.shape == (12, 12)
    assert largest == pytest.approx(float(cells.abs().max()))
    assert float(cells[first.query, first.key]) == pytest.approx(first.support, rel=1e-4)
    plot = page.get_by_role("application")
    expect(plot).to_have_attribute("aria-busy", "false")
    box = plot.bounding_box()
    assert box is not None
    side = box["width"] / 12
    plot.hover(position={"x": (first.key + 0.5) * side, "y": (first.query + 0.5) * side})
    effect = page.locator("[data-effect]")
    expect(effect).to_be_visible()
    shown = float(effect.inner_text().split()[-1].replace("−", "-"))
    assert shown == pytest.approx(first.support, rel=0.05)
    page.get_by_role("radio", name="weight").click()
    expect(legend).to_have_count(0)
    expect(page).not_to_have_url(re.compile("of="))


def test_a_recording_shows_what_was_differentiated(
    serve: Callable[..., Served], visit: Visits
) -> None:
    gpt = load("gpt")
    ids = torch.cat([gpt.encode("to be or not to be"), gpt.encode(TEXT)[:, :7]])
    with watch(gpt.model, effects=True) as seen:
        logits = gpt.model(ids)
        (runner_up(logits[:1]) + 0.01 * runner_up(logits[1:])).backward()
    served = serve(session_of(seen, gpt.pieces(TEXT)[:7], batch=1))
    told = served.session.reasons("0", 6)
    edges = [row for row in seen.edges(3000) if row["batch"] == 1]
    assert told.edges(3) == [
        ReasonEdge(
            "self", *(x[n] for n in ("layer", "head", "query", "key", "weight")), -x["effect"]
        )
        for x in edges[:3]
    ]
    page = visit("#/reasons", base=served.url)
    expect(page.locator("[data-answer]")).to_have_text(
        "What was differentiated: the edges behind it"
    )
    expect(page.locator("[data-edge]").first).to_be_visible()
    chosen = page.locator("[data-chosen]")
    expect(chosen.get_by_role("button", name="Hide this edge")).to_be_disabled()
    chosen.get_by_role("link", name="Open the head").click()
    expect(page.get_by_role("link", name="of what was differentiated")).to_be_visible()
    expect(page.get_by_role("figure", name=re.compile("effect on the prediction"))).to_be_visible()
