"""Ratios of interleaved pairs: ours and the peer alternate, so that noise affects both."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headwise.devices import cpu_name

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Figure:
    """One line of a table: a figure, its target, and whether the target is met."""

    name: str
    value: float
    unit: str
    target: str
    met: bool
    detail: str = ""


def ratio(ours: Callable[[], object], peer: Callable[[], object], pairs: int = 30) -> float:
    """The median of ours / peer over interleaved pairs, after one warm-up of each."""
    ours(), peer()
    found = [seconds(ours) / seconds(peer) for _ in range(pairs)]
    return statistics.median(found)


def median_seconds(work: Callable[[], object], times: int = 30) -> float:
    """The median time of a piece of work, after a warm-up."""
    work()
    return statistics.median(seconds(work) for _ in range(times))


@dataclass(frozen=True)
class Way:
    """One way to do some work; `around` is entered outside the timer."""

    step: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def alternated(
    ways: Mapping[str, Way],
    rounds: int,
    calls: int = 1,
    of: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
    warm: int = 1,
) -> dict[str, float]:
    """Milliseconds of each way: the median over rounds in which they alternate."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            with way.around():
                for _ in range(warm):
                    way.step()
                synchronize()
                start = clock()
                for _ in range(calls):
                    way.step()
                if clock is time.perf_counter:  # a processor does not wait for a GPU
                    synchronize()
                times[name].append((clock() - start) / calls * 1e3)
    return {name: of(found) for name, found in times.items()}


def shortest(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The shortest time of each run in milliseconds, taken in turns."""
    return alternated({name: Way(run) for name, run in runs.items()}, rounds, of=min, warm=0)


def at_most(name: str, value: float, target: float, unit: str = "×", detail: str = "") -> Figure:
    """A figure that should not exceed its target."""
    return Figure(name, value, unit, f"≤ {target:g}", value <= target, detail)


def at_least(name: str, value: float, target: float, unit: str = "×", detail: str = "") -> Figure:
    """A figure that should reach its target."""
    return Figure(name, value, unit, f"≥ {target:g}", value >= target, detail)


def report(figures: list[Figure], file: str) -> None:
    """Print the table and write bench/results/<file>."""
    say_figures(figures)
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "figures": [asdict(figure) for figure in figures]}
    text = json.dumps(content, indent=1, ensure_ascii=False)
    (RESULTS / file).write_text(text + "\n", encoding="utf-8")
    print(RESULTS / file)


def say_figures(figures: list[Figure]) -> None:
    """Print each figure, its target and whether it is met."""
    width = max((len(figure.name) for figure in figures), default=0)
    for figure in figures:
        verdict = "met" if figure.met else "MISSED"
        value = f"{figure.value:8.2f} {figure.unit:<3}"
        print(f"{figure.name:<{width}} {value} {figure.target:>8}  {verdict}  {figure.detail}")
    print(f"{sum(figure.met for figure in figures)} of {len(figures)} targets met")


def machine() -> dict[str, object]:
    """The machine of the measurements."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def seconds(work: Callable[[], object]) -> float:
    """The time of a piece of work, with that of a GPU's if there is one."""
    synchronize()
    start = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
