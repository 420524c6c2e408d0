"""Maps and rows of compiled models: kept with maps=True, as eager keeps them."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils
from torch import nn

import headwise as hw
from tests.watching.test_compiled import Ours, Stack, graphs, llama


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)


def assert_same_maps(found: hw.Watch, expected: hw.Watch) -> None:
    assert len(found.layers) == len(expected.layers) > 0
    for mine, other in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.map().to_tensor(), other.map().to_tensor())
        for name, value in other.observation.values.items():
            torch.testing.assert_close(mine.observation.values[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [None, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_maps_and_rows_are_eagers(checkpointed: bool, rows: int | None) -> None:
    model, x = Stack(checkpointed), torch.randn(2, 17, 32)
    with hw.watch(model, rows=rows) as seen:
        model(x).sum().backward()
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast, rows=rows) as watch:
        for given in (torch.randn(2, 17, 32), x):
            fast(given).sum().backward()
    assert_same_maps(watch, seen)
    assert graphs() == 1


@pytest.mark.slow
def test_a_mask_is_kept_with_its_map() -> None:
    model, ids = llama("sdpa")()
    shown = torch.ones(2, 12, dtype=torch.long)
    shown[0, :3] = 0
    with hw.watch(model) as seen:
        model(ids, attention_mask=shown)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast) as watch:
        fast(ids, attention_mask=shown)
    for mine, other in zip(watch.layers, seen.layers, strict=True):
        torch.testing.assert_close(mine.map()[1], other.map()[1])
        torch.testing.assert_close(mine.map()[0, :, 3:], other.map()[0, :, 3:])
        assert mine.padding is not None
        assert torch.equal(mine.padding, ~shown.bool())


def test_equal_layers_that_share_a_graph_keep_their_own() -> None:
    model, x = Stack(), torch.randn(2, 17, 32)
    with hw.watch(model) as seen:
        model(x)
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    x.requires_grad_()
    with hw.watch(model) as watch:
        model(x)
    assert_same_maps(watch, seen)
    assert graphs() == 1


def test_a_map_is_of_the_last_pass_compiled_or_not() -> None:
    model, x, y = Stack(), torch.randn(1, 9, 32), torch.randn(1, 9, 32)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    for last in (x, y):
        with hw.watch(model) as seen:
            model(last)
        with hw.watch(model) as watch:
            (model(y), fast(x)) if last is x else (fast(x), model(y))
        assert_same_maps(watch, seen)


def test_what_is_not_kept_is_said() -> None:
    model, x = Stack(), torch.randn(1, 9, 32)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast, maps=False) as watch:
        fast(x)
    with pytest.raises(ValueError, match=r"no map of layers\.0 was kept: hw.watch\(..., maps=True"):
        watch.map(0, 0)
    with pytest.raises(ValueError, match=r"nothing of layers\.0 is kept row by row"):
        _ = watch.layers[0].observation


def test_a_compiled_model_is_clipped() -> None:
    model, x = Ours(), torch.randn(2, 9, 32)
    nn.init.normal_(model.inner.query.weight, std=10)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    with hw.watch(fast, maps=False) as before:
        fast(x)
    assert hw.qk_clip(model, before, limit=5)
    with hw.watch(fast, maps=False) as after:
        fast(x)
    assert max(before.heads()["max_logit_max"]) > 10
    assert max(after.heads()["max_logit_max"]) == pytest.approx(5, abs=0.01)
