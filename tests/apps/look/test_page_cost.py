"""The page's "Cost": what is shown is what `hw.cost` counts."""

import re
from typing import Any

from playwright.sync_api import Page, expect

from headwise.costs.calculate import read_architecture
from headwise.costs.machines.hardware import device
from headwise.costs.uses.scenario import Scenario
from headwise.costs.uses.sketch import Sketch
from tests.apps.look.conftest import Visits

HELD = "NVIDIA H100 SXM"


def figure(page: Page, name: str) -> Any:
    return page.locator(f"[data-figure='{name}'] .value")


def billions(value: float, unit: str = "") -> str:
    """A number in G as the page writes it."""
    assert 1e9 <= value < 1e12
    return f"{float(f'{value / 1e9:.3g}'):g} G{unit}"


def test_a_described_decoder_is_counted_and_follows_its_sliders(visit: Visits) -> None:
    page = visit("#/cost?layers=16&length=4096&phase=decode")
    small = read_architecture(Sketch(16, 4096, 32, 8, vocabulary=32768).config())
    use = Scenario("decode", 4096, device=device("h100"))
    found = use.figures(small)
    assert found["params"]
    assert found["memory"]
    expect(figure(page, "params")).to_have_text(billions(found["params"]))
    expect(figure(page, "memory")).to_have_text(billions(found["memory"], "B"))
    expect(figure(page, "longest")).to_have_text(f"{use.longest(small, 80e9):,}")
    page.get_by_role("slider", name="Layers").press("ArrowRight")
    expect(page).to_have_url(re.compile("layers=17"))
    more = use.figures(read_architecture(Sketch(17, 4096, 32, 8, vocabulary=32768).config()))
    assert more["params"]
    expect(figure(page, "params")).to_have_text(billions(more["params"]))


def test_the_charts_are_over_the_length_and_name_the_device(visit: Visits) -> None:
    page = visit("#/cost")
    for name in ("FLOPs", "Memory", f"Time on {HELD}", "Where the FLOPs go"):
        expect(page.get_by_role("img", name=name, exact=True)).to_be_visible()
    page.get_by_label("Device").select_option("mi300x")
    expect(page.get_by_role("img", name="Time on AMD Instinct MI300X")).to_be_visible()
    page.get_by_role("img", name="FLOPs", exact=True).click(position={"x": 60, "y": 60})
    expect(page).to_have_url(re.compile("length=128"))


def test_the_opened_model_can_be_costed_and_its_shape_is_not_asked(visit: Visits) -> None:
    page = visit("#/cost")
    expect(figure(page, "params")).to_have_text("5.57 M")
    expect(page.get_by_role("slider", name="Layers")).to_have_count(0)
    page.get_by_role("radiogroup", name="Model").get_by_text("described here").click()
    expect(page.get_by_role("slider", name="Layers")).to_be_visible()
    page.get_by_role("radiogroup", name="Model").get_by_text("the opened one").click()
    expect(page.locator("[data-part='blocks/attention/scores and values']")).to_be_visible()


def test_a_device_without_the_rate_says_so_and_leads_back(visit: Visits) -> None:
    page = visit("#/cost?device=t4", allowed="400")
    expect(page.get_by_text("NVIDIA T4 has no matrix rate for bf16")).to_be_visible()
    page.get_by_role("button", name="Back to the defaults").click()
    expect(page.get_by_role("img", name=f"Time on {HELD}")).to_be_visible()


def test_the_view_speaks_chinese(visit: Visits) -> None:
    page = visit("#/cost?model=sketch")
    page.keyboard.press("Shift+L")
    expect(page.get_by_role("slider", name="层数")).to_be_visible()
    expect(page.get_by_role("img", name=f"在 {HELD} 上的时间")).to_be_visible()
