"""Narrow windows: nothing sticks out, panels stand below each other, the map stays a map."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.apps.look.conftest import Visits, eventually
from tests.thinned import thinned

WIDTHS = (360, 420, 640, 768)
LANGUAGES = ("en-GB", "zh-CN")
HEAD = "#/head?layer=5&head=1&row=368&column=100"

STICKING_OUT = """() => {
  const main = document.querySelector('main');
  const found = main.scrollWidth > main.clientWidth ? ['main scrolls sideways'] : [];
  const scrolls = (element) =>
    element.localName !== 'main' && getComputedStyle(element).overflowX !== 'visible';
  for (const element of document.querySelectorAll('.headwise *')) {
    const { left, right, width, height } = element.getBoundingClientRect();
    if (!width || !height || (left >= -0.5 && right <= innerWidth + 0.5)) continue;
    let around = element.parentElement;
    while (!around.matches('.headwise') && !scrolls(around)) around = around.parentElement;
    if (around.matches('.headwise')) found.push(element.outerHTML.slice(0, 120));
  }
  return found;
}"""
"""The elements outside the window, except those that a part of the page scrolls."""


def try_widths(page: Page) -> None:
    """Nothing may stick out of a window of any width."""
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        # charts follow the width in the next frames
        eventually(page, lambda: not page.evaluate(STICKING_OUT))


def box_of(page: Page, selector: str) -> dict[str, float]:
    found = page.locator(selector).first.bounding_box()
    assert found is not None
    return dict(found)


PLACES = [
    ("#/heads?layer=5&head=1", "[data-head='5.7']"),
    (HEAD, "output.reading[data-exact]"),
    (f"{HEAD}&side=lines", "aside path"),
    ("#/compare?layer=4&head=6", "td.bar, tbody td"),
    ("#/cost", ".pictures figure"),
    ("#/lab", "article details"),
    ("#/why/scale", ".pictures figure"),
    ("#/why/heads", ".pictures figure"),
    ("#/why/scores", ".pictures figure"),
    ("#/why/sharing", ".pictures figure"),
]


@pytest.mark.parametrize(("locale", "place"), thinned(LANGUAGES, PLACES), ids=str)
def test_nothing_sticks_out(visit: Visits, locale: str, place: tuple[str, str]) -> None:
    address, there = place
    page = visit(address, locale=locale)
    expect(page.locator(there).first).to_be_visible()
    try_widths(page)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_figures_stand_below_the_heads(visit: Visits, width: int) -> None:
    page = visit("#/heads", viewport={"width": width, "height": 800})
    expect(page.locator("[data-head='5.7']")).to_be_visible()
    first, last, aside = (
        box_of(page, selector) for selector in ("[data-head='0.0']", "[data-head='5.7']", "aside")
    )
    assert last["x"] + last["width"] - first["x"] > 0.7 * width
    assert last["y"] + last["height"] <= aside["y"]
    assert aside["width"] == width


@pytest.mark.parametrize("width", WIDTHS)
def test_the_map_keeps_most_of_the_width_and_its_weight_is_in_sight(
    visit: Visits, width: int
) -> None:
    page = visit(HEAD, viewport={"width": width, "height": 800})
    reading = page.locator("output.reading")
    expect(reading).to_have_attribute("data-exact", re.compile(r"\d"))
    assert box_of(page, "[role=application]")["width"] >= 0.6 * width
    assert box_of(page, "[role=application]")["y"] < box_of(page, "aside")["y"]
    expect(reading.locator("strong")).to_be_in_viewport(ratio=1)
    strong = box_of(page, "output.reading strong")
    assert strong["x"] < 20  # it comes first: whatever has no room, it is not the weight
    expect(reading.locator(".token").last).to_be_in_viewport(ratio=1)


def test_a_narrow_chart_has_more_than_one_number_along_it(visit: Visits) -> None:
    page = visit("#/why/scale", viewport={"width": 360, "height": 800})
    chart = page.get_by_role("img", name="Logits of 256 queries")
    expect(chart).to_be_visible()
    assert chart.locator("line.tick").count() >= 3  # two numbers, and the axis itself
