"""Pictures among the tokens in a real browser: weights over their grids, and regions of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Locator, Page, expect

from headwise.apps.look.readers.reader import Illustrated
from headwise.apps.look.show import session_of
from tests.apps.look.conftest import Served, Visits, eventually
from tests.apps.look.test_opening import save_llava
from tests.apps.look.test_page_head import picture_of_a_ball
from tests.apps.look.test_recorded_inputs import WORDS, joint
from tests.watching.test_diffusion import TEXT


def share(page: Page) -> float:
    """The part of the weight that the page says is on the pictures."""
    return float(page.locator("[data-share]").get_attribute("data-share") or "nan")


def drag(page: Page, grid: Locator, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag over a picture, between places in parts of its sides."""
    grid.scroll_into_view_if_needed()
    box = grid.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + start[0] * box["width"], box["y"] + start[1] * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + end[0] * box["width"], box["y"] + end[1] * box["height"], steps=3)
    page.mouse.up()


def drawn(grid: Locator) -> str:
    found: str = grid.locator("canvas").evaluate("canvas => canvas.toDataURL()")
    return found


def test_the_text_looks_at_two_pictures(
    serve: Callable[..., Served], visit: Visits, tmp_path: Path
) -> None:
    asked = Illustrated((picture_of_a_ball(), picture_of_a_ball()), "Which is round?")
    read = serve(save_llava(tmp_path), asked).wait_until_read()
    group = read.session.atlases["0"].input.main
    inside = [token for picture in group.pictures for token in picture.cells]
    page = visit("#/head?layer=3&head=0", base=read.url)
    grids = page.get_by_role("application", name="The image, its patches")
    expect(grids).to_have_count(2)
    # What the last token looks at, from which the answer follows.
    weights = group.head("3.0").map[0, 0]
    eventually(page, lambda: share(page) == pytest.approx(float(weights[-1, inside].sum())))
    word = page.get_by_role("option", name="round", exact=True)
    word.click()
    row = next(at for at, token in enumerate(group.rows) if token.strip() == "round")
    expect(page).to_have_url(re.compile(f"row={row}"))
    eventually(page, lambda: share(page) == pytest.approx(float(weights[row, inside].sum())))
    page.get_by_label("Heads").select_option("all")
    mean = torch.stack([head.map[0, 0, row] for head in group.heads]).mean(0)
    eventually(page, lambda: share(page) == pytest.approx(float(mean[inside].sum())))
    # Who looks at a part of the second picture: two rows of three patches.
    plain = drawn(grids.nth(1))
    drag(page, grids.nth(1), (0.1, 0.1), (0.7, 0.4))
    expect(page).to_have_url(re.compile(r"by=column.*region=1\.0\.0\.1\.2"))
    expect(grids.nth(1)).to_have_attribute("data-chosen", "6")
    expect(grids.nth(0)).to_have_attribute("data-chosen", "0")
    expect(word).to_have_attribute("style", re.compile("background: rgb"))
    eventually(page, lambda: drawn(grids.nth(1)) != plain)
    page.get_by_role("radio", name="received").click()
    expect(page).to_have_url(re.compile("by=all"))
    expect(grids.nth(1)).to_have_attribute("data-chosen", "0")
    page.keyboard.press("Escape")
    expect(page).not_to_have_url(re.compile("region"))


def test_the_steps_of_a_recorded_denoiser(serve: Callable[..., Served], visit: Visits) -> None:
    seen = joint()
    session = session_of(seen, source=WORDS, image=torch.rand(3, 8, 8))
    page = visit("#/head?layer=1&head=2", base=serve(session).url)
    grid = page.get_by_role("application", name="The image, its patches")
    plain = drawn(grid)
    page.get_by_role("option", name="ball", exact=True).click()  # who looks at it
    expect(page).to_have_url(re.compile("by=column.*column=2|column=2.*by=column"))
    eventually(page, lambda: drawn(grid) != plain)
    of_last = drawn(grid)
    slider = page.get_by_role("slider", name="Step")
    slider.fill("0")
    expect(page.locator("[data-step]")).to_have_text("step 0")
    eventually(page, lambda: drawn(grid) != of_last)
    # What a region of the picture looks at: two patches by two, from the second row.
    page.get_by_role("radio", name="what it looks at").click()
    drag(page, grid, (0.05, 0.3), (0.4, 0.7))
    expect(grid).to_have_attribute("data-chosen", "4")
    rows = [TEXT + 4, TEXT + 5, TEXT + 8, TEXT + 9]
    weights = seen.kept_steps[0].map(1, 2)[0, 0, :][rows].mean(0)
    eventually(page, lambda: share(page) == pytest.approx(float(weights[TEXT:].sum()), abs=1e-5))
    expect(page.get_by_role("option", name="ball", exact=True)).to_have_attribute(
        "style", re.compile("background: rgb")
    )
    assert page.get_by_role("button", name="New").count() == 0  # a recording reads nothing more
