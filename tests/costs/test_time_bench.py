"""The benchmark of predicted times: other shapes than the calibration, and results as they come."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from bench import cost
from bench.pairs import RESULTS
from headwise.costs.machines import measure
from headwise.costs.machines.clock import Clock
from headwise.costs.machines.hardware import DEVICES, Device
from headwise.costs.machines.speeds import speeds_from

CPU = torch.device("cpu")
SMALL = [cost.Cell(32, 2, 2, 1, 48, True), cost.Cell(32, 2, 1, 2, 40, True, decode=True)]


def calibrated(sizes: measure.TrialSizes) -> set[tuple[int, int]]:
    """Queries and keys of the attention calls that a calibration times."""
    keys = [sizes.cache // (measure.DECODING * width * sizes.sequences) for width in sizes.widths]
    few = {(1, count // part) for count in keys for part in (1, 2)}
    return few | {(length, length) for length in sizes.lengths}


@pytest.mark.parametrize("cuda", [False, True])
def test_no_cell_has_a_shape_that_was_calibrated(cuda: bool) -> None:
    sizes = measure.CUDA if cuda else measure.CPU
    grid = list(cost.cells(cuda))
    tested = {(1 if cell.decode else cell.length, cell.length) for cell in grid}
    assert len(set(grid)) == len(grid) > 25
    assert not tested & calibrated(sizes)
    products = set()
    for cell in grid:
        rows = cell.batch * (1 if cell.decode else cell.length)
        shared = cell.width * cell.kv_heads // cell.heads
        products |= {(rows, cell.width, cell.width), (rows, shared, cell.width)}
    assert not products & {*sizes.products, (sizes.square,) * 3}


def test_cells_take_more_than_a_millisecond_on_an_h200() -> None:
    found = [cell.predicted(DEVICES["h200"], "bf16") for cell in cost.cells(True)]
    assert 1e-3 < min(found) < max(found) < 40e-3


def test_results_are_written_after_every_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    keep = cost.keep

    def counting(path: Path, rows: list[dict[str, object]], *others: object) -> None:
        keep(path, rows, *others)  # type: ignore[arg-type]
        written.append(json.loads(path.read_text())["timed"])

    quick = Clock(CPU, 1, 0.0)
    monkeypatch.setattr(cost, "RESULTS", tmp_path)
    monkeypatch.setattr(cost, "LEAST", 0.0)
    monkeypatch.setattr(cost, "cells", lambda cuda: iter(SMALL))
    monkeypatch.setattr(cost, "keep", counting)
    monkeypatch.setattr(measure, "measure_device", lambda *_, **__: DEVICES["cpu"])
    monkeypatch.setattr(cost, "Clock", lambda *_: quick)
    monkeypatch.setattr(sys, "argv", ["cost"])
    cost.main()
    assert written == [1, 2]
    kept = json.loads((tmp_path / "cost_cpu.json").read_text())
    assert [row["engine"] for row in kept["cells"]] == ["sdpa", "sdpa"]
    stopped = cost.section({**kept, "timed": 1})
    assert "stopped after 1 of 2 cells" in stopped
    page = "<!-- bench.cost cpu -->\nold\n<!-- end of cpu -->\n"
    assert "| decode, width 32, 2/1 heads | 2 | 40 | sdpa |" in cost.documented(page)


@pytest.mark.gpu
def test_a_gpu_serves_the_cells_by_the_engines_that_are_modelled() -> None:
    where, grid = torch.device("cuda"), list(cost.cells(True))
    some = [grid[1], grid[8]]  # a causal prompt, and decoding
    found = list(cost.compared(some, DEVICES["h200"], None, where, "bf16", time.perf_counter))
    assert found[0]["engine"] in ("hopper", "sdpa")
    assert found[1]["engine"] == "triton"
    assert all(row["measured"] > 0 for row in found)


@pytest.mark.gpu
def test_a_gpu_computes_an_exponential_faster_than_it_moves_one() -> None:
    clock = Clock(torch.device("cuda"), 3, 0.01)
    special, _ = measure.measure_special(clock)
    assert special < 4 / measure.measure_bandwidth(clock, measure.CUDA)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_recorded_predictions_are_those_that_are_made_now(kind: str) -> None:
    """Measured times are kept; what the counts have become must predict them as well."""
    kept = json.loads((RESULTS / f"cost_{kind}.json").read_text(encoding="utf-8"))
    fields = kept["calibration"]
    measured = {dtype: speeds_from(each) for dtype, each in fields["measured"].items()}
    device = Device(**{**fields, "measured": measured})
    names = [each.name for each in dataclasses.fields(cost.Cell)]
    for row in kept["cells"]:
        cell = cost.Cell(**{name: row[name] for name in names})
        found = cell.predicted(device, kept["machine"]["dtype"])
        assert found == pytest.approx(row["predicted"], rel=1e-6), cell
