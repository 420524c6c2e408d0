"""Weights are exact at any magnitude of the logits: a large lse has no fraction, its parts have."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.core.observation import STATISTICS
from tests.many import SHARES, lift, mapped
from tests.problems import Recipe, recipes, small_blocks

ENGINES = ("auto", "streaming", "reference")
LEVELS = (-1e9, 1e9, -1e7, 3e30, -3e38, torch.finfo(torch.float32).min)
STEPS = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0])


def three(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 7, 8, generator=numbers).to(dtype).unbind(0)
    return q, k, v


def level(height: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A bias that lifts all of the first row to a height; the other rows are as they were."""
    bias = torch.zeros(7, 7, dtype=dtype)
    bias[0] = height
    return bias


def weights(q: Tensor, k: Tensor, **options: object) -> Tensor:
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return hw.attention(q, k, eye, engine="reference", **options)


def maps(q: Tensor, k: Tensor, v: Tensor, **options: object) -> dict[str, Tensor]:
    """Every weight as each route of a map gives it."""
    amap = hw.attention_map(q, k, v, **options)
    best, key = amap.top(7)
    return {
        "slice": amap[:, :],
        "pool": amap.pool(7),
        "top": torch.zeros_like(best).scatter(-1, key.clamp_min(0), best),
    }


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("height", LEVELS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_lifted_as_a_whole_keeps_its_weights(
    engine: str, height: float, blocks: bool
) -> None:
    q, k, v = three()
    bias = level(height)
    with small_blocks(rows=4, keys=2) if blocks else torch.no_grad():
        out, seen = hw.observe(q, k, v, bias=bias, engine=engine, stats=STATISTICS)
        found = maps(q, k, v, bias=bias)
    wanted, truth = hw.observe(q, k, v, bias=bias, engine="reference")
    torch.testing.assert_close(out, wanted)
    for name in ("lse", "max_logit", "top_prob", "entropy", "self_mass", "previous_mass"):
        torch.testing.assert_close(getattr(seen, name), getattr(truth, name), msg=name)
    torch.testing.assert_close(seen.sink_mass, truth.sink_mass)
    torch.testing.assert_close(seen.distance, truth.distance)
    for name, p in found.items():
        torch.testing.assert_close(p, weights(q, k, bias=bias), msg=name)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("height", [1e7, -1e7])
def test_biases_that_float32_holds_are_used_to_the_last_digit(engine: str, height: float) -> None:
    q, k, v = (torch.zeros_like(x) for x in three())
    bias = (height + STEPS).expand(7, 7)
    wanted = torch.softmax(STEPS, 0)
    _, seen = hw.observe(q, k, v, bias=bias, engine=engine)
    torch.testing.assert_close(seen.self_mass[0, 0], wanted)
    torch.testing.assert_close(seen.sink_mass[0, 0], wanted[:1].expand(7))
    torch.testing.assert_close(seen.top_prob[0, 0], wanted.amax().expand(7))
    entropy = -(wanted * wanted.log()).sum()
    torch.testing.assert_close(seen.entropy[0, 0], entropy.expand(7))
    for name, p in maps(q, k, v, bias=bias).items():
        torch.testing.assert_close(p[0, 0], wanted.expand(7, 7), msg=name)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e7, 1e8, 1e12])
def test_the_rows_of_a_map_sum_to_what_the_sinks_leave(size: float, sinks: bool) -> None:
    q, k, v = three()
    options = {"sinks": torch.tensor([-1.0, size])} if sinks else {}
    amap = hw.attention_map(q * size, k, v, **options)
    left = weights(q * size, k, **options).sum(-1)
    torch.testing.assert_close(amap[:, :].sum(-1), left, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(amap.received().sum(-1), left.sum(-1), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("part", ["out", "lse", "entropy"])
@pytest.mark.parametrize("height", LEVELS)
def test_gradients_of_a_lifted_row_are_those_of_the_reference(
    height: float, part: str, sinks: bool
) -> None:
    grads = []
    for engine in ("streaming", "reference"):
        leaves = [x.clone().requires_grad_() for x in (*three(), level(height))]
        q, k, v, bias = leaves
        options = {"sinks": torch.tensor([0.5, -2.0])} if sinks else {}
        out, seen = hw.observe(q, k, v, bias=bias, engine=engine, **options)
        value = out if part == "out" else getattr(seen, part)
        value.backward(torch.linspace(-1, 1, value.numel()).reshape(value.shape))
        grads.append([x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves])
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("height", LEVELS)
def test_parts_of_a_lifted_row_merge_to_the_whole(height: float) -> None:
    q, k, v = three()
    bias = level(height)
    parts = [
        hw.partial(q, k[:, :, a:b], v[:, :, a:b], first_key=a, bias=bias)
        for a, b in ((0, 3), (3, 7))
    ]
    whole = hw.merge(*parts)
    out, seen = hw.observe(q, k, v, bias=bias, engine="reference")
    torch.testing.assert_close(whole.finish(), out)
    torch.testing.assert_close(whole.entropy(), seen.entropy)
    torch.testing.assert_close(whole.lse(), seen.lse)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_lowest_number_on_a_whole_row_hides_none_of_it(engine: str, dtype: torch.dtype) -> None:
    q, k, v = three(dtype)
    bias = level(torch.finfo(dtype).min, dtype)
    wanted, truth = hw.observe(q, k, v, bias=bias, engine="reference")
    assert truth.sees.all()
    unit = torch.finfo(dtype).eps
    out = hw.attention(q, k, v, bias=bias, engine=engine)
    torch.testing.assert_close(out, wanted, rtol=4 * unit, atol=8 * unit)
    looked, seen = hw.observe(q, k, v, bias=bias, engine=engine)
    torch.testing.assert_close(looked, wanted, rtol=4 * unit, atol=8 * unit)
    torch.testing.assert_close(seen.effective_keys, truth.effective_keys)
    torch.testing.assert_close(seen.self_mass, truth.self_mass)


@given(
    recipe=recipes(
        longest=20, dtype=("float32", "float64"), bias="none", softcap="none", sinks="none"
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_rows_of_whole_numbers_keep_their_weights_when_lifted(
    recipe: Recipe, seed: int
) -> None:
    most = 2**20 if recipe.dtype == "float32" else 2**40  # sums with it are exact
    plain, lifted = lift(recipe.call(), random.Random(seed), most)
    with small_blocks(), torch.no_grad():
        seen, high = (x.observe("streaming")[1] for x in (plain, lifted))
        amaps = [hw.attention_map(x.q, x.k, **mapped(x)) for x in (plain, lifted)]
        for name in SHARES:
            torch.testing.assert_close(getattr(high, name), getattr(seen, name), msg=name)
        torch.testing.assert_close(amaps[1].to_tensor(), amaps[0].to_tensor())


def test_a_map_that_was_given_lse_has_its_precision() -> None:
    q, k, _ = three()
    lse = hw.attention_map(q, k, bias=level(-1e9)).lse
    amap = hw.attention_map(q, k, bias=level(-1e9), lse=lse)
    torch.testing.assert_close(amap[:, :, 1:], hw.attention_map(q, k)[:, :, 1:])
