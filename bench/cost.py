"""Predicted against measured time of attention layers.

    python -m bench.cost                  this CPU; close everything else first
    python -m bench.cost --busy           the same with one thread by processor time
    python -m bench.cost --device cuda    this GPU
    python -m bench.cost --docs           write the results that are kept into docs/cost-time.md

The time model is calibrated on this machine first, as `headwise cost --measure` does, on attention
calls and matrix products of other shapes than those here. Then layers of several widths, head
counts and lengths are timed, reading a prompt and decoding, and compared with `hw.cost(…).time`.
Cells below one millisecond are left out. Takes about two minutes on a CPU, one on a GPU. Results
are written as they come, so a run that is stopped keeps what it measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headwise as hw
from bench import described
from bench.pairs import RESULTS, Figure, at_least, at_most, machine, say_figures
from headwise.costs.machines import hardware, measure
from headwise.costs.machines.clock import Clock, Run
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.this_machine import hardware_name
from headwise.files import write_whole

PAGES = [RESULTS.parent.parent / "docs" / name for name in ("cost-time.md", "cost-time.zh.md")]
LEAST = 1e-3  # seconds
TOGETHER = {"cpu": 6, "cuda": 1}  # cells timed in turns against noise; a GPU holds one at a time


@dataclass(frozen=True)
class Cell:
    """A layer and its input: a prompt of `length` tokens, or one token after so many."""

    width: int
    heads: int
    kv_heads: int
    batch: int
    length: int
    causal: bool
    decode: bool = False

    @property
    def shape(self) -> str:
        kind = "decode" if self.decode else "causal" if self.causal else "full"
        return f"{kind}, width {self.width}, {self.heads}/{self.kv_heads} heads"

    def layer(self) -> hw.nn.MultiHeadAttention:
        mask = hw.mask.causal() if self.causal else None
        return hw.nn.MultiHeadAttention(
            self.width, self.heads, kv_heads=self.kv_heads, bias=False, mask=mask
        )

    def predicted(self, device: Device, dtype: str) -> float:
        with torch.device("meta"):
            layer = self.layer()
        return hw.cost(
            layer,
            batch=self.batch,
            queries=1 if self.decode else self.length,
            keys=self.length,
            dtype=dtype,
            device="cpu" if device.cpu else "cuda",
        ).time(device)

    def prepared(self, where: torch.device, dtype: torch.dtype) -> Ready:
        """The cell with its tensors."""
        layer = self.layer().to(where, dtype)
        tokens = 1 if self.decode else self.length
        x = torch.randn(self.batch, tokens, self.width, device=where).to(dtype)
        if not self.decode:
            return Ready(lambda: layer(x), _engine(layer, x))
        cache = hw.nn.GrowingCache()
        kept = (self.batch, self.kv_heads, self.length, self.width // self.heads)
        cache.append(*torch.randn(2, *kept, device=where, dtype=dtype).unbind())
        cache.rollback(1)  # room for the token of the step

        def step() -> None:
            layer(x, cache=cache)
            cache.rollback(1)

        engine = _engine(layer, x, cache)
        cache.rollback(1)
        return Ready(step, engine)


class Ready(NamedTuple):
    """A cell that can be timed."""

    run: Run
    engine: str  # that attention chooses for it


def _engine(layer: hw.nn.MultiHeadAttention, x: Tensor, cache: Any = None) -> str:
    call = layer.prepare(x, cache=cache)
    return hw.explain(call.q, call.k, call.v, **call.options()).engine


def cells(cuda: bool) -> Iterator[Cell]:
    """The grid: heads of 48 to 128 entries, with their own keys and with shared ones."""
    widths = ((2048, 16), (4096, 32), (2048, 32)) if cuda else ((512, 8), (768, 6), (480, 10))
    for width, heads in widths:
        for length in (4096, 10240, 20480) if cuda else (448, 896, 1792):
            for causal in (False, True):
                batch = max(1, 20480 // length) if cuda else max(1, 896 // length)
                yield Cell(width, heads, heads, batch, length, causal)
        yield Cell(width, heads, heads // 2, 2, 8192 if cuda else 640, True)
        for kv_heads in (heads, heads // 2):
            for length, batch in ((6000, 256), (20000, 96)) if cuda else ((2500, 16), (9000, 8)):
                yield Cell(width, heads, kv_heads, batch, length, True, decode=True)


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--busy", action="store_true", help="one thread, processor time")
    parser.add_argument("--docs", action="store_true", help="write the kept results into docs")
    parser.add_argument("--dtype", help="fp32 on a CPU and bf16 on a GPU by default")
    asked = parser.parse_args()
    if asked.docs:
        for page in PAGES:
            page.write_text(documented(page.read_text(encoding="utf-8")), encoding="utf-8")
        return
    if asked.busy:
        torch.set_num_threads(1)
    now = time.thread_time if asked.busy else time.perf_counter
    where, cuda = torch.device(asked.device), asked.device == "cuda"
    dtype = asked.dtype or ("bf16" if cuda else "fp32")
    torch.manual_seed(0)
    device = measure.measure_device(
        where, (dtype,), lambda stage, done: print(f"{done:4.0%} {stage}", flush=True), now=now
    )
    sheet = hardware.named(hardware_name(where)) if cuda else None
    about = {**machine(), "device": device.name, "dtype": dtype, "processor_time": asked.busy}
    grid, rows = list(cells(cuda)), []
    for row in compared(grid, device, sheet, where, dtype, now):
        rows.append(row)
        print(f"{len(rows):3} of {len(grid)}  {said(row)}", flush=True)
        keep(RESULTS / f"cost_{asked.device}.json", rows, len(grid), about, device)
    print(table([row for row in rows if row["measured"] >= LEAST]))
    say_figures(judged(rows))
    print(RESULTS / f"cost_{asked.device}.json")


def compared(
    grid: list[Cell],
    device: Device,
    sheet: Device | None,
    where: torch.device,
    dtype: str,
    now: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """The measured and the predicted time of each cell; with `sheet` also by the data sheet."""
    clock, together = Clock(where, 9, 0.03, now), TOGETHER[where.type]
    for first in range(0, len(grid), together):
        some = grid[first : first + together]
        try:
            with torch.no_grad():
                ready = [cell.prepared(where, measure.DTYPES[dtype]) for cell in some]
                times = clock.seconds([each.run for each in ready])
        except torch.OutOfMemoryError:
            print(f"left out, more than this GPU holds: {some}", flush=True)
            continue
        engines = [each.engine for each in ready]
        del ready  # the tensors of these cells, before those of the next
        for cell, took, engine in zip(some, times, engines, strict=True):
            predicted = cell.predicted(device, dtype)
            row = {**asdict(cell), "shape": cell.shape, "engine": engine, "measured": took}
            row |= {"predicted": predicted, "error": predicted / took - 1}
            if sheet is not None:
                row["data_sheet"] = cell.predicted(sheet, dtype)
            yield row


def judged(rows: list[dict[str, Any]]) -> list[Figure]:
    """The figures with targets, of the cells above a millisecond."""
    errors = [100 * abs(row["error"]) for row in rows if row["measured"] >= LEAST]
    if not errors:
        return [at_least("cells above 1 ms", 0, 25, "")]
    return [
        at_most("median error", statistics.median(errors), 15, "%"),
        at_most("worst error", max(errors), 40, "%"),
        at_least("cells above 1 ms", len(errors), 25, ""),
    ]


def keep(
    path: Path, rows: list[dict[str, Any]], planned: int, about: dict[str, Any], device: Device
) -> None:
    """Write the cells that were timed so far, of so many that were planned."""
    content = {
        "machine": about,
        "timed": len(rows),
        "planned": planned,
        "figures": [asdict(each) for each in judged(rows)],
        "cells": [row for row in rows if row["measured"] >= LEAST],
        "calibration": asdict(device),
    }
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def documented(page: str) -> str:
    """A page of the documentation with the kept results in the places that are marked for them."""
    for device in ("cpu", "cuda"):
        path = RESULTS / f"cost_{device}.json"
        if path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            marks = f"<!-- bench.cost {device} -->", f"<!-- end of {device} -->"
            before, rest = page.split(marks[0])
            page = f"{before}{marks[0]}\n{section(kept)}\n{marks[1]}{rest.split(marks[1])[1]}"
    return page


def section(kept: dict[str, Any]) -> str:
    """The judged figures of a device, and the table of its cells, in Markdown."""
    about = kept["machine"]
    how = ", processor time" if about["processor_time"] else ""
    stopped = f", stopped after {kept['timed']} of {kept['planned']} cells"
    how += stopped if kept["timed"] < kept["planned"] else ""
    lines = [f"{about['device']}, {about['dtype']}, torch {about['torch']}{how}:", ""]
    lines += ["| figure | value | target | |", "|---|---|---|---|"]
    for each in kept["figures"]:
        judged = "met" if each["met"] else "**missed**"
        value = f"{each['value']:.2f} {each['unit']}"
        lines.append(f"| {each['name']} | {value} | {each['target']} | {judged} |")
    by_sheet = [
        100 * abs(row["data_sheet"] / row["measured"] - 1)
        for row in kept["cells"]
        if "data_sheet" in row
    ]
    if by_sheet:
        median, worst = statistics.median(by_sheet), max(by_sheet)
        lines += ["", f"By the data sheet alone: median error {median:.1f} %, worst {worst:.1f} %."]
    return "\n".join([*lines, "", table(kept["cells"])])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per cell."""
    sheet = any("data_sheet" in row for row in rows)
    heads = ["layer", "batch", "tokens", "engine", "measured", "predicted", "error"]
    heads += ["by data sheet"] if sheet else []
    lines = ["| " + " | ".join(heads) + " |", "|" + len(heads) * "---|"]
    return "\n".join([*lines, *(said(row) for row in rows)])


def said(row: dict[str, Any]) -> str:
    """The line of a cell."""
    figures = [row["shape"], row["batch"], f"{row['length']:,}", row["engine"]]
    figures += [f"{1e3 * row[time]:.2f} ms" for time in ("measured", "predicted")]
    figures += [f"{100 * row['error']:+.0f} %"]
    figures += [f"{1e3 * row['data_sheet']:.2f} ms"] if "data_sheet" in row else []
    return "| " + " | ".join(map(str, figures)) + " |"


if __name__ == "__main__":
    main()
