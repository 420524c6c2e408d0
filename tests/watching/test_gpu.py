"""Watching on a GPU: nothing waits, little is kept, and the figures are those of the CPU."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching.rules import LogitGrowth

pytestmark = pytest.mark.gpu

WIDTH, HEADS, N = 256, 4, 512


class Layer(nn.Module):
    """Attention by PyTorch's function, or by ours."""

    def __init__(self, ours: bool = False) -> None:
        super().__init__()
        self.qkv, self.ours = nn.Linear(WIDTH, 3 * WIDTH), ours

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if self.ours:
            out = hw.attention(*parts.unbind(0), mask=hw.mask.causal())
        else:
            out = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


def stack(ours: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(ours) for _ in range(4)))


@contextmanager
def nothing_waits() -> Iterator[None]:
    with sync_debug_mode("error"):
        yield


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of(run: Callable[[], object]) -> list[str]:
    """The places in the code that wait for the GPU in a run, as PyTorch warns of them."""
    torch.cuda.synchronize()
    with sync_debug_mode("warn"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    said = [x for x in found if "synchronizing CUDA operation" in str(x.message)]
    return sorted(f"{x.filename}:{x.lineno}" for x in said)


def step(model: nn.Module, optimiser: torch.optim.Optimizer, x: Tensor) -> None:
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.mark.parametrize("rows", [64, None])
@pytest.mark.parametrize("ours", [False, True])
def test_a_watched_training_step_waits_for_nothing(ours: bool, rows: int | None) -> None:
    model, x = stack(ours).cuda(), torch.randn(2, N, WIDTH, device="cuda")
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    watch = hw.watch(model, rows=rows, maps=False, alarms=[LogitGrowth()])
    with watch:
        step(model, optimiser, x)  # kernels are compiled, the board is made
        torch.cuda.synchronize()
        with nothing_waits():
            step(model, optimiser, x)
        torch.cuda.synchronize()
        with nothing_waits():
            step(model, optimiser, x)
        assert watch.last_step == 2
    assert [entry.step for entry in watch.series] == [0, 1, 2]
    assert watch.unread == []


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_model_of_transformers_waits_for_nothing(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=HEADS, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=512, vocab_size=99, attn_implementation=implementation,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).cuda()
    ids = torch.randint(0, 99, (2, N), device="cuda")
    places = torch.arange(N, device="cuda")[None]

    def run() -> None:
        model(ids, position_ids=places, use_cache=False).logits.sum().backward()

    run()
    alone = waits_of(run)  # transformers itself waits where it makes the mask
    with hw.watch(model, maps=False) as seen:

        def watched() -> None:
            run()
            seen.step()

        watched()
        together = waits_of(watched)
    if implementation == "sdpa":  # the mask of eager attention is a tensor, which is read
        assert len(together) <= len(alone), together
    assert len(seen.series) == 2
    assert seen.unread == []


def test_a_watch_without_maps_keeps_less_than_a_mebibyte() -> None:
    model, x = stack().cuda(), torch.randn(2, N, WIDTH, device="cuda")
    optimiser = torch.optim.SGD(model.parameters(), 1e-3)
    step(model, optimiser, x)
    with hw.watch(model, maps=False) as seen:
        step(model, optimiser, x)
    del seen
    gc.collect()
    before = torch.cuda.memory_allocated()
    watch = hw.watch(model, maps=False).attach()
    for _ in range(3):
        step(model, optimiser, x)
    gc.collect()
    kept = torch.cuda.memory_allocated() - before
    watch.detach()
    assert 0 < kept <= 1 << 20


@pytest.mark.parametrize("ours", [False, True])
def test_figures_are_those_of_the_cpu(ours: bool) -> None:
    model = stack(ours)
    other, x = copy.deepcopy(model).cuda(), torch.randn(2, N, WIDTH)
    with torch.no_grad(), hw.watch(model) as here:
        model(x)
    with torch.no_grad(), hw.watch(other) as there:
        other(x.cuda())
    for mine, theirs in zip(here.heads(), there.heads(), strict=True):
        for name, value in mine.items():
            assert theirs[name] == pytest.approx(value, rel=2e-2, abs=2e-2), name


def test_a_layer_that_was_misread_is_found_late_and_leaves_the_tables() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            out = (2 * (q @ q.mT / q.shape[-1] ** 0.5).softmax(-1)) @ q
            return x + out.transpose(1, 2).flatten(2)

    model = nn.Sequential(Layer(), Twice()).cuda()
    watch = hw.watch(model, maps=False).attach()
    model(torch.randn(2, 64, WIDTH, device="cuda"))

    def end() -> None:
        watch.step()
        watch.detach()

    with pytest.warns(UserWarning, match="1: its output is not softmax"):
        end()
    assert watch.unread == ["1"]
    assert set(watch.series[0].table["name"]) == {"0"}


def test_clipping_waits_for_nothing() -> None:
    model = hw.nn.MultiHeadAttention(WIDTH, HEADS).cuda()
    x = torch.randn(2, 128, WIDTH, device="cuda")
    nn.init.normal_(model.query.weight, std=3)
    with hw.watch(model, maps=False) as seen, torch.no_grad():
        for _ in range(2):
            nn.init.normal_(model.query.weight, std=3)
            model(x)
            seen.step()
            hw.qk_clip(model, seen, 50)
        model(x)
        torch.cuda.synchronize()
        with nothing_waits():
            seen.step()
            clipped = hw.qk_clip(model, seen, 20)
        model(x)
    assert clipped
    assert max(seen.heads()["max_logit_max"]) == pytest.approx(20, rel=2e-2)
