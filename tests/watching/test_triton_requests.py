"""A step of continuous batching that is watched by kernels: a CUDA graph can repeat it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves

import headwise as hw
from headwise.engines.triton.engine import TRITON
from headwise.watching.recorder.paged_record import WARM_UP

pytest.importorskip("triton", reason="the kernel is written in Triton")
pytest.importorskip("transformers", minversion="5.22", reason="whose paged cache is read")

from tests.watching.test_continuous_batching import (
    built,
    check,
    padded,
    quick,
    served,
)

__all__ = ["padded", "quick"]  # fixtures

WAITS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")


class Graph(TorchDispatchMode):
    """What CUDA would capture: operations and kernels, to be repeated on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.work: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITS:
            raise AssertionError(f"{func} reads a tensor: a GPU would have to be waited for")
        options = kwargs or {}
        out = func(*args, **options)

        def again() -> None:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **options)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.work.append(again)
        return out

    def replay(self) -> None:
        for again in self.work:
            again()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch, padded: None) -> list[Graph]:
    """Steps run as graphs that the processor repeats; these are those that were captured."""
    from transformers.generation.continuous_batching.model_runner import ModelRunner
    from triton.runtime.interpreter import GridExecutor

    monkeypatch.setattr(TRITON, "devices", ("cuda", "cpu"))
    known: dict[Any, Graph] = {}
    running: list[Graph] = []
    forward, execute = ModelRunner._forward_process_and_sample, GridExecutor.__call__

    def run(self: Any, *given: Any) -> None:
        key = self.inputs_and_outputs._get_graph_key()
        tables = [x.block_table for x in self.cache.cache_allocators.values()]
        if any(name.startswith(WARM_UP) for table in tables for name in table):
            return forward(self, *given)  # CUDA captures after such a step, which runs nothing
        if key in known:
            return known[key].replay()
        known[key] = graph = Graph()
        running.append(graph)
        try:
            with graph:
                forward(self, *given)
        finally:
            running.pop()

    def launch(self: Any, *given: Any, **options: Any) -> None:
        if running and _get_current_dispatch_mode() is running[-1]:  # not inside an operator
            running[-1].work.append(lambda: execute(self, *given, **options))
        with _disable_current_modes():
            execute(self, *given, **options)

    monkeypatch.setattr(ModelRunner, "_forward_process_and_sample", run)
    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return known.values()  # type: ignore[return-value]


def test_a_graph_can_repeat_a_step(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = built("Gemma2", torch.float32, sliding_window=6, layer_types=kinds)
    model.set_attn_implementation("headwise")
    with hw.watch(model) as seen:
        tokens = served(model, max_batch_tokens=16, num_blocks=12)
        counted = int(seen.layer(0).counted()[0])
    assert len(graphs) == 1
    assert counted == sum(map(len, seen.requests.values()))
    monkeypatch.setattr(TRITON, "devices", ("cuda",))
    check(model, seen, tokens)
