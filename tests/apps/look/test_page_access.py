"""What axe-core finds on every view: nothing that keeps a person out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from headwise.apps.look.session import Progress, Session
from headwise.apps.look.watched_folder import WatchedFolder
from tests.apps.look.conftest import Served, Visits
from tests.apps.look.test_watch_api import Training

AXE = Path(__file__).parents[3] / "page" / "node_modules" / "axe-core" / "axe.min.js"
"""Installed by `make page`, as page/package-lock.json says."""

FINDINGS = """async () => {
  const { violations } = await axe.run(document, { resultTypes: ['violations'] });
  return violations
    .filter(({ impact }) => impact === 'serious' || impact === 'critical')
    .flatMap(({ id, nodes }) => nodes.map(({ target, html }) => `${id}: ${target} ${html}`));
}"""

VIEWS = {
    "#/heads?layer=5&head=1": "[data-head='5.7']",
    "#/head?layer=5&head=1&row=368&column=100": "output.reading[data-exact]",
    "#/head?layer=5&head=1&row=368&side=lines": "aside path",
    "#/reasons?row=20": "[data-heads] li",
    "#/compare?layer=4&head=6": "tbody td",
    "#/cost": ".pictures figure",
    "#/lab": "article details",
    "#/why/scale": ".pictures figure",
    "#/watch": "[data-headline]",
}
"""The views, and what is there when a view is complete."""


def findings(page: Page) -> list[str]:
    """What axe finds on a page, as it is now, that is serious or critical."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found: list[str] = page.evaluate(FINDINGS)
    return found


@pytest.fixture
def run(tmp_path: Path, serve: Callable[..., Served]) -> str:
    """The address of a run whose alarms fired."""
    training = Training(tmp_path / "a-run")
    training.go_on(2)
    training.sharpen(layer=1, head=2)
    training.go_on(2)
    training.close()
    session = Session(run=WatchedFolder(training.writer.folder), progress=Progress("ready", None))
    return serve(session).url


def test_axe_finds_a_button_without_a_name(visit: Visits) -> None:
    page = visit("#/cost")
    expect(page.locator(".pictures figure").first).to_be_visible()
    page.evaluate("document.querySelector('main').append(document.createElement('button'))")
    assert [each for each in findings(page) if each.startswith("button-name")]


@pytest.mark.parametrize("address", VIEWS)
def test_nothing_serious_on_a_view(
    visit: Visits, request: pytest.FixtureRequest, address: str
) -> None:
    base = request.getfixturevalue("run") if address == "#/watch" else None
    page = visit(address, base=base)
    complete = page.locator(VIEWS[address]).first
    expect(complete).to_be_visible()
    assert findings(page) == []
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    page.set_viewport_size({"width": 390, "height": 844})
    page.emulate_media(color_scheme="dark")
    page.get_by_role("button", name="中文").click()
    expect(page.locator("html")).to_have_attribute("lang", "zh-Hans")
    expect(complete).to_be_visible()
    assert findings(page) == []
