"""Steered and sparse models on a GPU: the results of the CPU, in memory linear in the length."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import headwise as hw
from tests.watching.stacks import Stack, by_headwise, by_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    # Between two operators that no CUDA graph holds, PyTorch captures a graph of nothing.
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]

STEERS = [(1, 2, (2, 5), 3.0), (0, None, 0, 0.25, (3, 9)), (1, 0, (8, 12), 0), (1, 2, 4, 0.5)]
BLOCKS: dict[str, Callable[[nn.Module], AbstractContextManager[object]]] = {
    "steer": lambda model: hw.steer(model, STEERS),
    "top": lambda model: hw.sparsify(model, hw.sparse.TopK((1, 2, 3, 4))),
    "window": lambda model: hw.sparsify(model, hw.sparse.Window(3, sinks=1)),
    "blocks": lambda model: hw.sparsify(model, hw.sparse.Blocks(3, 2, by="exact")),
    "evicted": lambda model: hw.sparsify(
        model, hw.sparse.Evicted(torch.linspace(0, 1, 10).expand(1, 4, 10).sin(), 4)
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("attend", [by_torch, by_headwise])
def test_the_output_gradients_and_figures_are_those_of_the_cpu(
    name: str, attend: Callable[..., torch.Tensor]
) -> None:
    torch.manual_seed(0)
    model, x = Stack(attend), torch.randn(2, 12, 32)
    found = []
    for device in ("cpu", "cuda"):
        there = model.to(device)
        there.zero_grad()
        with hw.watch(there, sparse=hw.sparse.TopK(2)) as seen, BLOCKS[name](there):
            out = there(x.to(device))
            out.square().sum().backward()
        grads = [p.grad.cpu().clone() for p in there.parameters() if p.grad is not None]
        figures = torch.tensor(
            [seen.heads()[each] for each in ("entropy_mean", "kept_top_2_mean", "self_mass_mean")]
        )
        found.append((out.detach().cpu(), figures, *grads))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-3, rtol=1e-2)


@pytest.mark.parametrize("name", ["steer", "top"])
def test_memory_is_linear_in_the_length(name: str) -> None:
    n = 32768  # booleans of all pairs of one head would be 1 GiB
    attn = hw.nn.MultiHeadAttention(256, 4, mask=hw.mask.causal()).cuda().bfloat16()
    x = torch.randn(1, n, 256, device="cuda", dtype=torch.bfloat16)
    steers = [(0, 1, (2, 5), 3.0), (0, 2, 9, 0), (0, 2, 11, 0), (0, None, 1, 0.5, (100, 9000))]
    block = hw.steer(attn, steers) if name == "steer" else hw.sparsify(attn, hw.sparse.TopK(64))
    with torch.no_grad(), block:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        attn(x)
        assert torch.cuda.max_memory_allocated() - before < 1e9


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_models_record_what_they_would_lose(mode: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(by_torch).cuda(), torch.randn(2, 12, 32, device="cuda")
    with torch.no_grad():
        with hw.watch(model, sparse=hw.sparse.TopK(2), rows=4) as eager:
            for _ in range(3):
                model(x)
        compiled = torch.compile(model, mode=mode)
        with hw.watch(compiled, sparse=hw.sparse.TopK(2), rows=4) as seen:
            for _ in range(3):
                compiled(x)
    assert not seen.unread
    for name in ("kept_top_2_mean", "error_top_2_mean", "needed_95_mean"):
        assert seen.heads()[name] == pytest.approx(eager.heads()[name], rel=1e-3, abs=1e-5)
