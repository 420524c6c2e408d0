"""Predicted against measured time of attention layers.

    python -m bench.cost                  this CPU; close everything else first
    python -m bench.cost --busy           the same with one thread by processor time
    python -m bench.cost --device cuda    this GPU
    python -m bench.cost --docs           write the results that are kept into docs/cost-time.md

The time model is calibrated on this machine first, as `headwise cost --measure` does, on attention
calls and matrix products of other shapes than those here. Then layers of several widths, head
counts and lengths are timed, reading a prompt and decoding, and compared with `hw.cost(…).time`.
Cells below one millisecond are left out. Takes about two minutes on a CPU, one on a GPU.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import headwise as hw
from bench import described
from bench.pairs import RESULTS, at_least, at_most, machine, say_figures
from headwise.costs.machines import hardware, measure
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.this_machine import hardware_name

PAGES = [RESULTS.parent.parent / "docs" / name for name in ("cost-time.md", "cost-time.zh.md")]
LEAST = 1e-3  # seconds
TOGETHER = 6  # cells that are timed in turns


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

    def run(self, where: torch.device, dtype: torch.dtype) -> measure.Run:
        layer = self.layer().to(where, dtype)
        tokens = 1 if self.decode else self.length
        x = torch.randn(self.batch, tokens, self.width, device=where).to(dtype)
        if not self.decode:
            return lambda: layer(x)
        cache = hw.nn.GrowingCache()
        kept = (self.batch, self.kv_heads, self.length - 1, self.width // self.heads)
        cache.append(*torch.randn(2, *kept, device=where, dtype=dtype).unbind())

        def step() -> None:
            layer(x, cache=cache)
            cache.rollback(1)

        return step


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
            for length in (6000, 20000) if cuda else (2500, 9000):
                rows = (128, 48) if cuda else (16, 8)
                batch = rows[0] if length < 9000 else rows[1]
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
    device = measure.measure(
        where, (dtype,), lambda stage, done: print(f"{done:4.0%} {stage}", flush=True), now=now
    )
    sheet = hardware.named(hardware_name(where)) if cuda else None
    rows = list(compared(list(cells(cuda)), device, sheet, where, dtype, now))
    kept = [row for row in rows if row["measured"] >= LEAST]
    errors = [abs(row["error"]) for row in kept]
    print(table(kept))
    figures = [
        at_most("median error", 100 * statistics.median(errors), 15, "%"),
        at_most("worst error", 100 * max(errors), 40, "%"),
        at_least("cells above 1 ms", len(kept), 25, ""),
    ]
    say_figures(figures)
    about = {**machine(), "device": device.name, "dtype": dtype, "processor_time": asked.busy}
    content = {
        "machine": about,
        "figures": [asdict(each) for each in figures],
        "cells": kept,
        "calibration": asdict(device),
    }
    path = RESULTS / f"cost_{asked.device}.json"
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(path)


def compared(
    grid: list[Cell],
    device: Device,
    sheet: Device | None,
    where: torch.device,
    dtype: str,
    now: Callable[[], float],
) -> Iterator[dict[str, Any]]:
    """The measured and the predicted time of each cell; with `sheet` also by the data sheet."""
    clock = measure.Clock(where, 9, 0.03, now)
    for first in range(0, len(grid), TOGETHER):
        some = grid[first : first + TOGETHER]
        with torch.no_grad():
            runs = [cell.run(where, measure.DTYPES[dtype]) for cell in some]
            times = clock.seconds(runs)
        for cell, took in zip(some, times, strict=True):
            predicted = cell.predicted(device, dtype)
            row = {**asdict(cell), "shape": cell.shape, "measured": took, "predicted": predicted}
            row["error"] = predicted / took - 1
            if sheet is not None:
                row["data_sheet"] = cell.predicted(sheet, dtype)
            yield row


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
    lines = [f"{about['device']}, {about['dtype']}, torch {about['torch']}{how}:", ""]
    lines += ["| figure | value | target | |", "|---|---|---|---|"]
    for each in kept["figures"]:
        judged = "met" if each["met"] else "**missed**"
        value = f"{each['value']:.2f} {each['unit']}"
        lines.append(f"| {each['name']} | {value} | {each['target']} | {judged} |")
    return "\n".join([*lines, "", table(kept["cells"])])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: a line per cell."""
    sheet = any("data_sheet" in row for row in rows)
    head = "| layer | batch | tokens | measured | predicted | error |"
    lines = [head + (" by data sheet |" if sheet else ""), "|---|---|---|---|---|---|"]
    lines[1] += "---|" if sheet else ""
    for row in rows:
        took, predicted, error = row["measured"], row["predicted"], row["error"]
        line = f"| {row['shape']} | {row['batch']} | {row['length']:,} | {1e3 * took:.2f} ms "
        line += f"| {1e3 * predicted:.2f} ms | {100 * error:+.0f} % |"
        by_sheet = row.get("data_sheet")
        lines.append(line + (f" {1e3 * by_sheet:.2f} ms |" if isinstance(by_sheet, float) else ""))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
