"""The benchmark of watched training measures what it says, on a CPU and in small."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench import watch_gpu, watch_host
from bench.pairs import Way, alternated
from bench.watched_steps import UNWATCHED, UNWATCHED_INSIDE

RESULTS: dict[str, Any] = {
    "observed": {
        "batch 1, 8/8 heads, n 4096, d 256, causal": {"fused": 2.0, "observed": 2.1},
        "batch 1, 8/8 heads, n 4096, d 64, causal": {"fused": 1.92, "observed": 2.0},
    },
    "eager": {
        "ms": {UNWATCHED: 50.0, "rows=64, beside": 51.0, "all rows, five statistics, inside": 54.0},
        "refused": {"rows=64, inside": "it can't"},
        "skipped µs": 20.0,
        "memory": 2**19,
    },
    "compiled": {"ms": {}, "refused": {UNWATCHED: "no time left"}},
}


def test_contenders_alternate_inside_their_contexts() -> None:
    told: list[str] = []

    @contextmanager
    def around() -> Any:
        told.append("(")
        yield
        told.append(")")

    ways = {"a": Way(lambda: told.append("a"), around), "b": Way(lambda: told.append("b"))}
    found = alternated(ways, rounds=2, calls=2)
    assert "".join(told) == "(aaa)bbb" * 2
    assert list(found) == ["a", "b"]


def test_figures_are_ratios_with_their_targets() -> None:
    found = {x.name: (round(x.value, 2), x.met) for x in watch_gpu.figures(RESULTS)}
    assert found == {
        "observed forward and backward, to cuDNN's, batch 1, 8/8 heads, n 4096, d 256, causal": (
            0.95,
            True,
        ),
        "observed forward and backward, to cuDNN's, batch 1, 8/8 heads, n 4096, d 64, causal": (
            0.96,
            False,
        ),
        "step, eager: rows=64, beside": (1.02, True),
        "step, eager: all rows, five statistics, inside": (1.08, False),
        "a step that is passed over": (20.0, True),
        "memory that a watch without maps keeps": (0.5, True),
    }


def test_the_table_lists_refusals_and_the_figures_of_a_cpu() -> None:
    figure = {"name": "training step watched, rows=64 every step, n 512", "value": 1.02}
    figure |= {"unit": "×", "target": "≤ 1.03", "met": True}
    rows = watch_gpu.table(RESULTS, {"figures": [figure, figure | {"name": "something else"}]})
    assert "| step, eager: rows=64, beside | 1.02 × | ≤ 1.03 |" in rows
    assert (
        "| step, eager: all rows, five statistics, inside | 1.08 × | ≤ 1.04, **missed** |" in rows
    )
    assert "| step, eager: rows=64, inside | it can't | |" in rows
    assert "| step, compiled: unwatched | no time left | |" in rows
    assert rows[-1] == "| CPU, one thread: rows=64 every step, n 512 | 1.02 × | ≤ 1.03 |"


def run(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str) -> dict[str, Any]:
    command = ["watch_gpu", "--device", "cpu", "--tiny", "--json", str(file), *options]
    monkeypatch.setattr("sys.argv", command)
    watch_gpu.main()
    return json.loads(file.read_text("utf-8"))


def test_observed_calls_are_measured_in_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"machine": watch_gpu.machine(), "eager": RESULTS["eager"]}))
    found = run(monkeypatch, file, "--only", "observed")
    assert found["eager"] == RESULTS["eager"]  # of a run before
    assert len(found["observed"]) == 2
    for row in found["observed"].values():
        assert row["fused"] > 0
        assert row["observed"] > 0
        assert row["backward"].startswith("PyTorch's CPU kernel")


@pytest.mark.slow
def test_watched_steps_are_measured_in_small(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    found = run(monkeypatch, tmp_path / "results.json", "--only", "eager", "compiled")
    for mode in ("eager", "compiled"):
        measured, refused = found[mode]["ms"], found[mode]["refused"]
        assert {*measured, *refused} == {UNWATCHED, UNWATCHED_INSIDE, *watch_gpu.MOST}
        assert min(measured.values()) > 0
    assert not found["eager"]["refused"]
    assert found["eager"]["memory"] is None


def test_every_call_whose_processor_time_is_measured_runs() -> None:
    calls = watch_host.calls("cpu")
    assert {many for _, many in calls.values()} == {1}
    found = alternated({name: way for name, (way, _) in calls.items()}, 1, clock=time.process_time)
    assert min(found.values()) > 0
