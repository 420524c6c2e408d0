"""A call runs on any GPU: with the tile of the table, or with a smaller one that fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock, current_thread
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.engines import calls

pytest.importorskip("triton", reason="the kernels are written in Triton")

from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import GridExecutor

from headwise.engines.triton import tuning
from headwise.engines.triton.host import backward_call as backward
from headwise.engines.triton.host import decoding_call as decoding
from headwise.engines.triton.host import forward_call as call
from headwise.engines.triton.host import map_call
from headwise.engines.triton.host import tile_shapes as shapes
from headwise.engines.triton.host.cards import INTERPRETING, card
from headwise.engines.triton.host.tile_shapes import Shape
from headwise.engines.triton.kernels.maps import map_lse
from headwise.maps import fused as maps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
interpreted = pytest.mark.skipif(not INTERPRETING, reason="a GPU has its own limits")
CPU = torch.device("cpu")
CAUSAL = hw.mask.causal()


class Crowded:
    """A kernel on a GPU without room for tiles of more keys, rows or stages than these."""

    def __init__(self, kernel: Any, keys: int = 16, rows: int = 64, stages: int = 1) -> None:
        self.kernel, self.refused = kernel, 0
        self.most = {"KEYS": keys, "ROWS": rows, "num_stages": stages}

    def __getitem__(self, grid: Any) -> Any:
        def launch(*given: Any, **options: Any) -> Any:
            for name, most in self.most.items():
                if options[name] > most:
                    self.refused += 1
                    raise OutOfResources(options[name], most, "shared memory")
            return self.kernel[grid](*given, **options)

        return launch


@pytest.fixture(autouse=True)
def unchosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Start without tuned or reduced shapes, and forget those of the test after it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shapes, "_CHOSEN", {})
    large = dict.fromkeys(shapes._INTERPRETED, Shape(32, 64, 4, 3))
    monkeypatch.setattr(shapes, "_INTERPRETED", large)
    calls.forget()


def crowd(patch: pytest.MonkeyPatch, module: Any, name: str, **most: int) -> Crowded:
    crowded = Crowded(getattr(module, name), **most)
    patch.setattr(module, name, crowded)
    return crowded


def three(*shape: int) -> list[Tensor]:
    return [torch.randn(shape or (1, 2, 40, 16), requires_grad=True) for _ in range(3)]


def gradients(given: list[Tensor], engine: str, **options: Any) -> list[Tensor]:
    out, seen = hw.observe(*given, engine=engine, **options)
    return [out, *torch.autograd.grad(out.sum() + seen.entropy.sum(), given)]


def close(found: list[Tensor], truth: list[Tensor]) -> None:
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_stages_go_first_then_keys_then_rows() -> None:
    found = [Shape(32, 64, 8, 3)]
    while (less := shapes.smaller(found[-1])) is not None:
        found.append(less)
    assert [(x.stages, x.keys, x.rows) for x in found] == [
        (3, 64, 32), (2, 64, 32), (1, 64, 32), (1, 32, 32), (1, 16, 32), (1, 16, 16)
    ]  # fmt: skip
    assert {x.warps for x in found} == {8}


@interpreted
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "biased"])
def test_a_call_and_its_gradients_take_smaller_tiles_once(
    monkeypatch: pytest.MonkeyPatch, bias: bool
) -> None:
    most = {"keys": 16, "rows": 16}
    crowded = [crowd(monkeypatch, call, "forward", **most)]
    crowded += [
        crowd(monkeypatch, backward, name, **most) for name in ("grad_queries", "grad_keys")
    ]
    given, mask = three(), CAUSAL & hw.mask.documents(torch.arange(40)[None] // 13)
    options = {"mask": mask, "bias": torch.randn(40, 40) if bias else None}
    close(gradients(given, "triton", **options), gradients(given, "reference", **options))
    assert [x.refused for x in crowded] == [2, 2, 2]
    close(gradients(given, "triton", **options), gradients(given, "reference", **options))
    assert [x.refused for x in crowded] == [2, 2, 2]


@interpreted
def test_moments_know_how_many_rows_the_forward_took(monkeypatch: pytest.MonkeyPatch) -> None:
    crowd(monkeypatch, call, "forward", rows=16)
    q, k, v = three(1, 2, 150, 16)
    _, found = hw.observe(q, k, v, mask=CAUSAL, engine="triton")
    _, truth = hw.observe(q, k, v, mask=CAUSAL, engine="reference")
    close([found.logit_var, found.logit_mean], [truth.logit_var, truth.logit_mean])


@interpreted
@torch.no_grad()
def test_decoding_takes_fewer_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = crowd(monkeypatch, decoding, "split")
    q, k, v = torch.randn(2, 4, 2, 16), torch.randn(2, 2, 300, 16), torch.randn(2, 2, 300, 24)
    for _ in range(2):
        found = hw.attention(q, k, v, mask=CAUSAL, engine="triton")
        close([found], [hw.attention(q, k, v, mask=CAUSAL, engine="reference")])
    assert crowded.refused == 4  # two stages fewer, then half and a quarter of the keys


@interpreted
@torch.no_grad()
def test_a_plain_step_takes_fewer_keys_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = crowd(monkeypatch, decoding, "split_step")
    for length in (300, 300, 301):  # each length is prepared
        q, k, v = torch.randn(2, 4, 1, 64), *torch.randn(2, 2, 2, length, 64).unbind(0)
        found = hw.attention(q, k, v, mask=CAUSAL, engine="triton")
        close([found], [hw.attention(q, k, v, mask=CAUSAL, engine="reference")])
    assert crowded.refused == 4
    assert len(calls._PREPARED) == 2


@interpreted
def test_two_threads_may_find_at_once_that_there_is_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowded, meet, one_kernel = crowd(monkeypatch, decoding, "split"), Barrier(2), Lock()
    refuse, run = Crowded.__getitem__, GridExecutor.__call__

    def together(self: Crowded, grid: Any) -> Any:
        if current_thread().name not in met:
            met.add(current_thread().name)
            meet.wait(60)
        with one_kernel:  # Python 3.11 may fail where two threads parse code at once
            return refuse(self, grid)

    def alone(self: Any, *given: Any, **options: Any) -> Any:
        with one_kernel:  # the interpreter runs one kernel at a time
            return run(self, *given, **options)

    met: set[str] = set()
    monkeypatch.setattr(Crowded, "__getitem__", together)
    monkeypatch.setattr(GridExecutor, "__call__", alone)

    def step(length: int) -> tuple[Tensor, Tensor]:
        q, k, v = (torch.randn(2, 2, n, 16) for n in (2, length, length))
        with torch.no_grad():
            for _ in range(2):  # the second is the prepared one
                found = hw.attention(q, k, v, mask=CAUSAL, engine="triton")
            return found, hw.attention(q, k, v, mask=CAUSAL, engine="reference")

    with ThreadPoolExecutor(2) as threads:
        for found, truth in threads.map(step, (300, 200)):
            close([found], [truth])
    assert len(met) == 2
    assert crowded.refused >= 8  # by each


@interpreted
@pytest.mark.parametrize("loop", ["log_sums", "cells", "largest"])
def test_kernels_of_maps_take_smaller_tiles(monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    module = {"log_sums": map_lse, "cells": map_call, "largest": maps}[loop]
    crowded = crowd(monkeypatch, module, loop, rows=16)
    q, k = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    found, truth = (
        hw.attention_map(q.to(dtype), k.to(dtype), mask=CAUSAL)
        for dtype in (torch.float32, torch.float64)
    )
    close([found.received(), found.pool(7)], [truth.received().float(), truth.pool(7).float()])
    close([found.top(4)[0]], [truth.top(4)[0].float()])
    assert crowded.refused == 5  # two stages, two halvings of the keys and one of the rows


@interpreted
@torch.no_grad()
def test_calls_are_prepared_again_with_the_tile_that_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> None:
        given = three()
        found = hw.attention(*given, mask=CAUSAL, engine="triton")
        close([found], [hw.attention(*given, mask=CAUSAL, engine="reference")])

    for _ in range(2):
        run()
    assert len(calls._PREPARED) == 1
    crowded = crowd(monkeypatch, call, "forward")
    calls.forget()
    run()
    assert crowded.refused == 1
    run()
    assert crowded.refused == 1
    assert len(calls._PREPARED) == 1


@interpreted
def test_a_gpu_without_room_for_any_tile_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crowd(monkeypatch, call, "forward", keys=8)
    with pytest.raises(RuntimeError, match=r"interpreter has no room for the forward kernel") as e:
        hw.attention(*three(), engine="triton")
    assert "streaming" in str(e.value)


def test_shapes_tuned_without_a_bias_do_not_serve_calls_with_one() -> None:
    best = Shape(256, 256, 8, 5)
    here = card(CPU)
    shapes.remember(here, {(kernel, 128, 2): best for kernel in shapes.KERNELS})
    for kernel in ("biased", "biased queries", "biased keys"):
        assert shapes.shape(kernel, 128, 2, here) == shapes.default(kernel, 128, 2, here) != best
    assert shapes.shape("forward", 128, 2, here) == best


def test_tuning_gives_the_time_to_the_shape_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    here = card(CPU)

    def launch(shape: Shape) -> None:
        if shape.rows * shape.keys > 64 * 64 or shape.stages > 2:
            raise OutOfResources(shape.keys, 64, "shared memory")

    def milliseconds(*_: object) -> float:
        return 1 / shapes.fit("forward", 64, 2, here, launch).rows

    monkeypatch.setattr(tuning, "KERNELS", ("forward",))
    monkeypatch.setattr(tuning, "_milliseconds", milliseconds)
    (found,) = tuning.tune(CPU, (64,), 16)
    assert (found.chosen.rows, found.chosen.keys, found.chosen.stages) == (128, 32, 1)
    assert found.best == 1 / 128 <= found.usual < 1
    assert shapes.shape("forward", 64, 2, here) == found.chosen


def room_for(generation: int, *calls: str) -> None:
    """Compile calls as if for another GPU; assert that their first shapes fit its memory."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engines.fits", str(generation), *calls]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert [x[1] for x in found] == [*calls]
    assert [x for x in found if x[2]] == []


HUNGRY = ("both", "bias", "causal", "decode", "decode_biased", "stored", "maps")


@pytest.mark.slow  # for all calls, which take far longer: `python -m tests.engines.fits`
@pytest.mark.parametrize("generation", [80, 86, 90, 100, 120])
def test_the_hungriest_calls_fit_every_gpu(generation: int) -> None:
    calls = [f"{kind} {width} bfloat16" for kind in HUNGRY for width in (128, 256)]
    others = ("decode 256 float32", "maps 256 float32", "moments 64 bfloat16")
    room_for(generation, *calls, *others)
