"""Make the moving picture of the README: python -m bench.film

A visit to the built-in GPT in a real browser: all heads, an induction head, a token of the text, a
stripe of the map from near, and keys that are hidden from the head. Written to docs/pictures.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import partial

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from bench import described
from bench.pictures import FOLDER, served
from tests.apps.look.browser import MISSING, chromium

NAME = "look.webp"
SIZE = {"width": 1120, "height": 720}
MOST_BYTES = 700_000
HEAD = "#/head?layer=5&head=1"
ZOOMS = (1.5, 2.2, 3.3, 5, 7.5, 11, 16)
ROW, KEY = 279, 252  # "the Northern C" for the second time, and what followed it the first time

Frame = tuple[bytes, int]
"""A screenshot, and the milliseconds that it is shown for."""


def visit(page: Page, url: str) -> Iterator[Frame]:
    """The frames of a visit, in order."""

    def go(address: str) -> None:
        page.goto(url + address)
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(500)

    def shown(milliseconds: int, act: Callable[[], object] = lambda: None) -> Frame:
        act()
        page.wait_for_timeout(400)
        return page.screenshot(), milliseconds

    go("#/heads?layer=4&head=6")
    yield shown(1800)
    for name in ("4.2", "0.4", "5.1"):
        yield shown(1500, page.locator(f"[data-head='{name}']").hover)
    yield shown(1800, lambda: go(HEAD))
    yield shown(3000, lambda: go(f"{HEAD}&row={ROW}"))
    for zoom in ZOOMS:
        place = f"zoom={zoom}&x={KEY}&y={ROW}"
        yield shown(2000 if zoom == ZOOMS[-1] else 160, partial(go, f"{HEAD}&row={ROW}&{place}"))
    side = f"side=spans&first={KEY}&last={KEY}"
    yield shown(2000, lambda: go(f"{HEAD}&row={ROW}&{place}&{side}"))
    page.locator("button.hide").click()
    page.locator("[data-moved]").scroll_into_view_if_needed()
    yield shown(4000)


def main() -> None:
    """Make the moving picture."""
    described(__doc__).parse_args()
    path = chromium()
    if path is None:
        raise SystemExit(MISSING)
    with sync_playwright() as playwright, served("gpt") as url:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, locale="en-GB", color_scheme="light")
        page.add_init_script("localStorage.setItem('headwise.tour', 'seen')")
        page.goto(url)
        page.wait_for_selector("[data-head]", timeout=60_000)
        frames = list(visit(page, url))
        browser.close()
    images = [Image.open(io.BytesIO(png)).convert("RGB") for png, _ in frames]
    made = io.BytesIO()
    images[0].save(
        made, "WEBP", save_all=True, append_images=images[1:], loop=0, quality=50, method=6,
        duration=[milliseconds for _, milliseconds in frames],
    )  # fmt: skip
    if made.tell() > MOST_BYTES:
        raise ValueError(f"{NAME} has {made.tell():,} bytes; at most {MOST_BYTES:,} are kept")
    (FOLDER / NAME).write_bytes(made.getvalue())
    print(f"{NAME}  {len(frames)} frames, {made.tell() / 1000:.0f} kB")


if __name__ == "__main__":
    main()
