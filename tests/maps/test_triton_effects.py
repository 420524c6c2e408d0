"""Effect maps by Triton's kernels, on its interpreter here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.maps import backends, blockwise
from headwise.maps.pooling import Cells
from tests.maps.test_effect_map import Removed, gradient, map_of
from tests.problems import Recipe
from tests.rounding import close

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN = Recipe(dtype="float32", lengths="more keys", longest=20)
RECIPES = [
    PLAIN,
    Recipe(mask="causal", sinks="sinks", heads="grouped", dtype="bfloat16", seed=1, longest=20),
    Recipe(mask="sinks and window", widths="wide values", dtype="float32", seed=2, longest=20),
    Recipe(mask="dense", softcap="cap", dtype="float16", layout="strided", seed=3, longest=20),
    Recipe(mask="blind rows", bias="hiding", dtype="float32", heads="one", seed=4, longest=20),
    Recipe(mask="documents", bias="buckets", logits="huge", dtype="float32", seed=5, longest=20),
    Recipe(mask="window", widths="narrow values", lengths="one key", dtype="float32", seed=6),
]
some = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed > 2 else ())
    for recipe in RECIPES
]


def fused(emap: hw.EffectMap) -> bool:
    return backends.backend_for(emap._region) is not blockwise


@pytest.mark.parametrize("recipe", some)
def test_every_part_of_a_map_is_what_removing_edges_adds(recipe: Recipe) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    every, off = truth.edges(), truth.off
    emap = map_of(call.copy(device=DEVICE, learn=False), grad.to(DEVICE))
    assert fused(emap)
    assert not close(emap.to_tensor().cpu(), every, off), str(recipe)
    assert not close(emap.received().cpu(), every.sum(-2), 2 * off.sum(-2)), str(recipe)
    assert not close(emap.pool(1).cpu()[..., 0, 0], every.sum((-1, -2)), 2 * off.sum((-1, -2)))
    found, most = emap.row_largest().cpu(), every.abs().amax(-1)
    assert not close(found.abs(), most, off[..., 0]), str(recipe)
    near = (found[..., None] - every).abs().amin(-1)
    assert not close(near, torch.zeros_like(near), off[..., 0]), str(recipe)
    count = min(3, call.sizes.keys)
    effects, keys = (x.cpu() for x in emap.top(count))
    named = every.gather(-1, keys.clamp_min(0)).masked_fill(keys < 0, 0)
    assert not close(effects, named, off[..., :1].expand_as(named)), str(recipe)
    seen = (truth.s != -torch.inf).sum(-1).clamp_max(count)
    assert torch.equal((keys >= 0).sum(-1), seen)
    best = every.abs().topk(count).values
    assert not close(effects.abs(), best, off[..., :1].expand_as(best)), str(recipe)
    span = emap.span(1, call.sizes.keys).effect.cpu()
    assert not close(span, truth.without(1, call.sizes.keys), off[..., 0]), str(recipe)


def test_a_gradient_of_another_dtype_is_taken_as_it_is() -> None:
    q, k, v = (torch.randn(1, 2, 20, 16, device=DEVICE, dtype=torch.float16) for _ in range(3))
    grad = torch.randn(1, 2, 20, 16, device=DEVICE) * 1e-9  # less than float16 holds
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    wide = hw.effect_map(*(x.double() for x in (q, k, v, grad)), mask=hw.mask.causal())
    assert fused(emap)
    assert not fused(wide)
    torch.testing.assert_close(emap.to_tensor().double(), wide.to_tensor(), rtol=1e-3, atol=1e-14)


def test_all_heads_are_pooled_in_one_pair_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.engines.triton.host import map_call
    from headwise.maps import fused as kernels

    launched = []
    fit = kernels.fit_map
    for module in (kernels, map_call):
        monkeypatch.setattr(module, "fit_map", lambda *given: (launched.append(1), fit(*given)))
    q, k, v, grad = (torch.randn(1, 3, 20, 16, device=DEVICE) for _ in range(4))
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    pooled = emap.pool(4, how="max")
    assert pooled.shape == (1, 3, 4, 4)
    assert len(launched) == 2  # the totals of the rows, and the cells
    wide = hw.effect_map(*(x.double() for x in (q, k, v, grad)), mask=hw.mask.causal())
    torch.testing.assert_close(pooled.double(), wide.pool(4, how="max"), rtol=1e-3, atol=1e-5)


def test_a_row_of_nan_stays_in_its_cells() -> None:
    q, k, v, grad = (torch.randn(1, 2, 10, 16, device=DEVICE) for _ in range(4))
    q[0, 1, 4] = torch.nan
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    lost = torch.zeros(1, 2, 10, dtype=torch.bool, device=DEVICE)
    lost[0, 1, 4] = True
    assert torch.equal(emap.row_largest().isnan(), lost)
    assert torch.equal(emap.received().isnan().any(-1), lost.any(-1))
    assert torch.equal(emap.top(2)[0].isnan().any(-1), lost)


def test_what_the_kernels_cannot_do_is_left_to_pytorch() -> None:
    x = torch.randn(1, 1, 5, 16, device=DEVICE)
    assert not fused(hw.effect_map(x.double(), x.double(), x.double(), x))
    assert not fused(hw.effect_map(x, x, x[..., :0], x[..., :0]))
    score = hw.Additive(torch.ones(16, device=DEVICE))
    assert not fused(hw.effect_map(x, x, x, x, score=score))


def long(count: int, heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, heads, count, 64, device="cuda", dtype=dtype) for _ in range(4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_maps_agree_with_pytorchs_loops(dtype: torch.dtype) -> None:
    emap = hw.effect_map(*long(3000, 4, dtype), mask=hw.mask.causal())
    region = emap._region
    kernels = backends.backend_for(region)
    totals, exact = kernels.row_totals(region), blockwise.row_totals(region)
    for found, expected in zip(totals, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    cells = Cells.evenly(3000, 256)
    for how in ("sum", "furthest"):
        found = kernels.pool(region, exact, cells, cells, how)
        expected = blockwise.pool(region, exact, cells, cells, how)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    found, expected = kernels.received(region, exact), blockwise.received(region, exact)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    best, most = (b.top(region, exact, 8)[0].abs() for b in (kernels, blockwise))
    torch.testing.assert_close(best, most, rtol=1e-3, atol=1e-5)


@pytest.mark.gpu
def test_the_largest_edges_of_a_hundred_thousand_tokens_take_memory_linear_in_them() -> None:
    def most(count: int) -> int:
        emap = hw.effect_map(*long(count, 1, torch.bfloat16), mask=hw.mask.causal())
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        effects, places = emap.largest(100)
        assert effects.shape == (100,)
        assert bool((places[:, 2] >= places[:, 3]).all())
        return torch.cuda.max_memory_allocated() - before

    half, whole = most(50_000), most(100_000)
    assert whole < 2.2 * half
    assert whole < 1 << 29
