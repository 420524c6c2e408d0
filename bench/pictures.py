"""Take the screenshots of the documentation: python -m bench.pictures [name ...]

Each view is opened in a real browser on the built-in models, at the size of a laptop's screen, and
written to docs/pictures.
"""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

from bench import described
from bench.watch_divergence import train
from tests.apps.look.browser import MISSING, chromium

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
MOST_BYTES = 300_000
ENGLISH, CHINESE = "en-GB", "zh-CN"


@dataclass(frozen=True)
class Shot:
    """A screenshot: the model to serve, the address of the view, and its appearance."""

    name: str
    address: str
    model: str = "gpt"
    locale: str = ENGLISH
    hover: str | None = None
    height: int = 800
    newcomer: bool = False
    click: str | None = None


DIVERGING = "diverging"
"""The run of bench.watch_divergence, as if it were a model."""

HEAD = "#/head?layer=5&head=1"
NORTHERN = f"{HEAD}&row=279&side=spans&first=252&last=252&zoom=16&x=252&y=279"
"""“the Northern C” for the second time, and what followed it the first time."""

SHOTS = (
    Shot("look-heads", "#/heads?layer=5&head=1", hover="[data-point='5.3']"),
    Shot("look-tour", "#/heads", newcomer=True, click="Next", height=720),
    Shot("look-tour.zh", "#/heads", locale=CHINESE, newcomer=True, click="下一步", height=720),
    Shot("look-heads.zh", "#/heads?by=entropy_mean&order=rising&layer=4&head=6", locale=CHINESE),
    Shot("look-head-whole", f"{HEAD}&row=368"),
    Shot("look-head-whole.zh", f"{HEAD}&row=368", locale=CHINESE),
    Shot("look-head-lines", f"{HEAD}&side=lines&from=115&to=124&zoom=24&x=110&y=116&scale=linear"),
    Shot("look-spans", NORTHERN, click="Hide these keys from head 5.1"),
    Shot("look-spans.zh", NORTHERN, locale=CHINESE, click="让头 5.1 看不到这些键"),
    Shot("look-cost", "#/cost", height=960),
    Shot("look-why-scale", "#/why/scale?d=256&scaling=none", height=840),
    Shot("look-lab", "#/lab/scale-gradient"),
    Shot("look-watch", "#/watch?step=20&heads=0.1,1.2", DIVERGING, height=620),
    Shot("look-head-alignment", "#/head?group=cross&layer=1&head=0", "translate"),
)


@contextmanager
def served(model: str) -> Iterator[str]:
    """The address of a page on a model, as `headwise look` serves it."""
    if model == DIVERGING:
        with TemporaryDirectory() as folder:
            train(folder=Path(folder) / DIVERGING)
            with served(f"{folder}/{DIVERGING}") as url:
                yield url
        return
    command = [sys.executable, "-m", "headwise", "look", model, "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[0]
        finally:
            process.terminate()


def take(browser: Browser, shot: Shot, url: str) -> None:
    """Open the view, wait until it is still, and take the picture."""
    context = browser.new_context(
        viewport={"width": 1280, "height": shot.height},
        locale=shot.locale,
        color_scheme="light",
    )
    page = context.new_page()
    if not shot.newcomer:
        page.add_init_script("localStorage.setItem('headwise.tour', 'seen')")
    page.goto(url)
    page.wait_for_selector("[data-head], main canvas", timeout=60_000)
    page.goto(url + shot.address)
    page.wait_for_load_state("networkidle")
    page.wait_for_timeout(800)
    if shot.click:
        page.get_by_role("button", name=shot.click).click()
        page.wait_for_load_state("networkidle")
        page.wait_for_timeout(1500)
    if shot.hover:
        page.hover(shot.hover, force=True)
    keep(page.screenshot(), shot.name)
    context.close()


def keep(png: bytes, name: str) -> None:
    """Write a picture as small as possible; ValueError if it is too large for the repository."""
    small = io.BytesIO()
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    picture.quantize(palette=palette(picture), dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    if small.tell() > MOST_BYTES:
        raise ValueError(f"{name} has {small.tell():,} bytes; at most {MOST_BYTES:,} are kept")
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.png").write_bytes(small.getvalue())
    print(f"{name}.png  {small.tell() / 1000:.0f} kB")


def palette(picture: Image.Image) -> Image.Image:
    """256 colours: the most frequent exactly, the others so that a single green dot stays green."""
    counted = picture.getcolors(picture.width * picture.height) or []
    frequent = [colour for _, colour in sorted(counted, reverse=True)[:96]]
    spread = picture.quantize(160, Image.Quantize.MAXCOVERAGE).getpalette() or []
    chosen = Image.new("P", (1, 1))
    chosen.putpalette([level for colour in frequent for level in colour] + spread[: 3 * 160])
    return chosen


def main() -> None:
    """Take the pictures with these names, or all."""
    parser = described(__doc__)
    parser.add_argument("name", nargs="*", help=", ".join(shot.name for shot in SHOTS))
    names = parser.parse_args().name
    if unknown := set(names) - {shot.name for shot in SHOTS}:
        parser.error(f"there is no picture {', '.join(sorted(unknown))}")
    wanted = [shot for shot in SHOTS if not names or shot.name in names]
    path = chromium()
    if path is None:
        raise SystemExit(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for model in dict.fromkeys(shot.model for shot in wanted):
            with served(model) as url:
                for shot in wanted:
                    if shot.model == model:
                        take(browser, shot, url)
        browser.close()


if __name__ == "__main__":
    main()
