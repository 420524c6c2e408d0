"""Compiled models on a GPU: CUDA graphs are used, and their figures and maps are eager's."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.utils

import headwise as hw
from tests.watching.test_gpu import WIDTH, N, stack

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # PyTorch's first one
]


@pytest.mark.parametrize("maps", [False, True])
@pytest.mark.parametrize("rows", [None, 64])
def test_cuda_graphs_are_not_skipped(maps: bool, rows: int | None) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, x = stack().cuda(), torch.randn(2, N, WIDTH, device="cuda")
    with hw.watch(model, maps=maps, rows=rows) as seen:
        model(x)
    fast = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    watch = hw.watch(fast, maps=maps, rows=rows)
    with watch:
        for _ in range(4):  # the first warms up, the second is captured
            torch.compiler.cudagraph_mark_step_begin()
            fast(x)
            watch.step()
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    expected = seen.heads()
    for entry in watch.series:
        for name in expected.columns[4:]:
            assert entry.table[name] == pytest.approx(expected[name], rel=2e-2, abs=2e-2)
    if maps:
        for mine, other in zip(watch.layers, seen.layers, strict=True):
            torch.testing.assert_close(mine.map()[0, 0], other.map()[0, 0], rtol=2e-2, atol=2e-3)
