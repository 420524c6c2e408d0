"""Deterministic mode: every engine runs in it, and repeats every bit, forward and backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from tests.problems import Call, Recipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CALLS = {
    "plain": Recipe(dtype="float32", longest=20),
    "causal, sinks, grouped": Recipe(
        mask="causal", sinks="sinks", heads="grouped", dtype="float32", longest=20
    ),
    "documents, a bias": Recipe(mask="documents", bias="tensor", dtype="float32", longest=20),
    "two intervals, buckets": Recipe(
        mask="sinks and window", bias="buckets", dtype="float32", longest=20
    ),
    "dense, alibi, dropout": Recipe(
        mask="dense", bias="alibi", dropout="dropout", dtype="float32", longest=20
    ),
    "additive, a cap": Recipe(score="additive", softcap="cap", dtype="float32", longest=20),
}

INTERPRETED = ("plain", "causal, sinks, grouped", "documents, a bias")  # the others take seconds


@pytest.fixture(params=[False, True], ids=["errors", "warnings"])
def deterministic(request: pytest.FixtureRequest) -> Iterator[None]:
    """PyTorch's mode, in which a kernel without a fixed order raises an error, or warns."""
    torch.use_deterministic_algorithms(True, warn_only=request.param)
    yield
    torch.use_deterministic_algorithms(False)


def everything(call: Call, engine: str) -> list[Tensor]:
    """The results of a call and the gradients of all that learns."""
    made = call.copy(device=DEVICE)
    if engine == "sdpa":
        results = [made.attention(engine)]
    else:
        out, seen = made.observe(engine)
        results = [out, *(getattr(seen, name) for name in hw.STATISTICS)]
    total = sum(x.nan_to_num(0, 0, 0).square().sum() for x in results if x.requires_grad)
    learns = [x for x in made.learnable().values() if x.requires_grad]
    return [*results, *torch.autograd.grad(total, learns, allow_unused=True)]


@pytest.mark.parametrize(
    ("case", "engine"),
    [
        *itertools.product(CALLS, ("auto", "streaming", "reference")),
        *itertools.product(INTERPRETED if DEVICE == "cpu" else CALLS, ("triton",)),
        ("plain", "sdpa"),
    ],
)
@pytest.mark.usefixtures("deterministic")
def test_a_repeated_call_repeats_every_bit(case: str, engine: str) -> None:
    if engine == "triton":
        pytest.importorskip("triton", reason="the kernels are written in Triton")
    recipe = CALLS[case]
    if engine == "triton" and DEVICE == "cpu":
        recipe = replace(recipe, longest=4)
    call = recipe.call()
    for a, b in zip(everything(call, engine), everything(call, engine), strict=True):
        assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize("case", [x for x in CALLS if "dropout" not in x])
@pytest.mark.usefixtures("deterministic")
def test_maps_repeat_every_bit(case: str) -> None:
    call = CALLS[case].call().copy(device=DEVICE)
    options = {name: x for name, x in call.options().items() if name != "dropout"}

    def parts() -> list[Tensor]:
        amap = hw.attention_map(call.q, call.k, call.v, **options)
        return [amap[0, 0], amap.received(), amap.pool(3), *amap.top(2)]

    for a, b in zip(parts(), parts(), strict=True):
        assert torch.equal(a, b)


def test_on_a_cpu_the_plan_is_the_same_in_deterministic_mode() -> None:
    leaves = [x.requires_grad_() for x in torch.randn(3, 1, 2, 5, 8).unbind(0)]
    before = str(hw.explain(*leaves))
    torch.use_deterministic_algorithms(True)
    try:
        assert str(hw.explain(*leaves)) == before
    finally:
        torch.use_deterministic_algorithms(False)
