"""The page's server as a user sees it: `python -m bench.look`, and `--tokens 100000` on a GPU.

Each figure comes from a real `headwise look` in its own process, queried over HTTP: the time from
the command to the heads of a text, the time of random tiles of random heads over all levels, and
the memory of the server and of a browser that shows the page.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bench.pairs import Figure, at_most, report
from headwise.models.trained import ASSETS, load

TARGETS = {
    2_000: 10.0,
    16_000: 90.0,
    100_000: 60.0,
}  # the most seconds until heads are ready
TILES = 200
BROWSER = "/usr/bin/chromium"


@dataclass
class Asked:
    """A running server, its process and what it printed while it read."""

    connection: HTTPConnection
    process: subprocess.Popen[str]
    seconds: float
    stages: list[tuple[str, float | None]]

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path)
        answer = self.connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {body[:200]!r}")
        return body

    def json(self, path: str) -> Any:
        return json.loads(self.get(path))

    @property
    def url(self) -> str:
        return f"http://{self.connection.host}:{self.connection.port}/"


@contextmanager
def looking(text: str, device: str) -> Iterator[Asked]:
    """Start `headwise look` on a text and wait for its heads, polling as the browser does."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
        file.write(text)
    command = [sys.executable, "-m", "headwise", "look", "--no-open", "--device", device]
    start = time.perf_counter()
    process = subprocess.Popen([*command, "--file", file.name], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        host, port = process.stdout.readline().split()[0].removeprefix("http://").split(":")
        asked = Asked(HTTPConnection(host, int(port.strip("/")), 600), process, 0.0, [])
        while (state := asked.json("/api/state"))["state"] == "loading":
            asked.stages.append((state["stage"], state["done"]))
            time.sleep(0.1)
        if state["problem"] is not None:
            raise RuntimeError(state["problem"])
        asked.seconds = time.perf_counter() - start
        yield asked
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)
        os.unlink(file.name)


def tiles(asked: Asked, seed: int = 0) -> tuple[list[float], dict[int, list[float]]]:
    """Milliseconds of random tiles: of any head, level and visible place."""
    (given,) = asked.json("/api/state")["inputs"]
    group = given["groups"][0]
    heads = [(x["layer"], head) for x in group["layers"] for head in range(x["heads"])]
    choose = random.Random(seed)
    at = f"/api/inputs/0/map/{group['id']}"
    shape = asked.json(f"{at}/0/0")
    times, by_level = [], {level: list[float]() for level in range(shape["levels"])}
    for _ in range(TILES):
        layer, head = choose.choice(heads)
        level = choose.randrange(shape["levels"])
        side = shape["tile"] << (shape["levels"] - 1 - level)
        y = choose.randrange(-(-shape["rows"] // side))
        x = choose.randrange(y + 1)
        how = choose.choice(("mean", "max"))
        begun = time.perf_counter()
        asked.get(f"{at}/{layer}/{head}/tile/{level}/{x}/{y}?how={how}&drop=0")
        times.append(1000 * (time.perf_counter() - begun))
        by_level[level].append(times[-1])
    return times, by_level


def processor_seconds(process: int) -> float:
    """CPU seconds of a process on all cores; unlike the clock, it leaves out other processes."""
    ticks = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def resident(process: int) -> float:
    """Megabytes of private memory of a process."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8")
    kilobytes = [
        int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Private_")
    ]
    return sum(kilobytes) / 1024


def browser_megabytes(url: str) -> float | None:
    """Megabytes of the page's process after a walk through the page; None without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        return None
    if not Path(BROWSER).exists():
        return None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        most = 0.0
        for address in ("#/heads", "#/head?layer=5&head=1", "#/head?layer=2&head=3", "#/heads"):
            page.goto(url + address)
            page.wait_for_load_state("networkidle")
            if address.startswith("#/head?"):
                page.mouse.move(400, 450)
                for _ in range(12):
                    page.mouse.wheel(0, -240)
                    page.wait_for_timeout(150)
            page.wait_for_timeout(500)
            most = max(most, *map(resident, renderers()))
        browser.close()
    return most


def renderers() -> list[int]:
    """The browser processes that render pages for this process."""
    parents, drawing = {}, []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if b"--type=renderer" in (folder / "cmdline").read_bytes():
                drawing.append(folder.name)
        except OSError:  # the process has ended
            continue
    return [int(process) for process in drawing if descends(process, str(os.getpid()), parents)]


def descends(process: str, ancestor: str, parents: dict[str, str]) -> bool:
    """True if a process is a descendant of another."""
    while process in parents and process != ancestor:
        process = parents[process]
    return process == ancestor


def text_of(tokens: int) -> str:
    """A text of about this many tokens of the built-in GPT: an article, repeated."""
    article = json.loads((ASSETS / "gpt" / "sample.json").read_text(encoding="utf-8"))["text"]
    tokeniser = load("gpt").tokeniser
    ids = tokeniser.encode(article)
    return tokeniser.decode((ids * (tokens // len(ids) + 1))[: tokens - 1])


def measured(tokens: int, device: str) -> list[Figure]:
    with looking(text_of(tokens), device) as asked:
        told = len(set(asked.stages))
        burnt = processor_seconds(asked.process.pid)
        times, by_level = tiles(asked)
        server = resident(asked.process.pid)
        browser = browser_megabytes(asked.url)
    levels = ", ".join(f"{x}: {statistics.median(y):.0f}" for x, y in by_level.items() if y)
    ninety = statistics.quantiles(times, n=20)[-1]
    name = f"{tokens:,} tokens on {device}"
    found = [
        at_most(
            f"{name}, from the command to the heads",
            asked.seconds,
            TARGETS.get(tokens, 90.0),
            "s",
            f"{burnt:.1f} s of processor time, progress told {told} times; server {server:.0f} MB",
        ),
        at_most(
            f"{name}, a random tile, median",
            statistics.median(times),
            100,
            "ms",
            f"95 % within {ninety:.0f} ms; by level {levels}",
        ),
    ]
    if browser is not None:
        found.append(at_most(f"{name}, the browser's page", browser, 300, "MB", "Chromium"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[2_000, 16_000])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--file", default="look.json", help="under bench/results")
    chosen = parser.parse_args()
    figures: list[Figure] = []
    for tokens in chosen.tokens:
        figures += measured(tokens, chosen.device)
        print(f"{tokens:,} tokens: {figures[-1].value:.1f} {figures[-1].unit}", flush=True)
    report(figures, chosen.file)


if __name__ == "__main__":
    main()
