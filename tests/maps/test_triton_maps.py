"""Maps by Triton's kernels, on its interpreter here: the cells, sums and keys of the matrix."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import headwise as hw
from headwise.engines import failures
from headwise.maps import backends, blockwise, coverage
from headwise.maps.pooling import Cells
from tests.maps.test_attention_map import Truth, edges, map_of
from tests.problems import Recipe
from tests.rounding import close

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PLAIN = Recipe(dtype="float32", lengths="more keys", longest=20)
RECIPES = [
    PLAIN,
    Recipe(mask="causal", sinks="sinks", heads="grouped", dtype="bfloat16", seed=1, longest=20),
    Recipe(mask="sinks and window", bias="alibi", dtype="float32", seed=2, longest=20),
    Recipe(mask="dense", softcap="cap", dtype="float16", layout="strided", seed=3, longest=20),
    Recipe(mask="blind rows", bias="hiding", dtype="float32", heads="one", seed=4, longest=20),
    Recipe(mask="documents", bias="buckets", logits="huge", dtype="float32", seed=5, longest=20),
]
some = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed > 2 else ())
    for recipe in RECIPES
]


@pytest.fixture(autouse=True)
def none_fails() -> Iterator[None]:
    """No kernel may be left to PyTorch without a word."""
    failures.forget()
    yield
    assert not failures.failed()


@pytest.mark.parametrize("recipe", some)
@pytest.mark.parametrize("weighted", [False, True])
def test_every_part_of_a_map_is_that_of_the_matrix(recipe: Recipe, weighted: bool) -> None:
    call = recipe.call()
    truth = Truth(call, weighted)
    there = call.copy(device=DEVICE, learn=False)
    amap = map_of(there).weighted() if weighted else map_of(there)
    assert backends.backend_for(amap._region) is not blockwise
    size, how = (5, "mean") if weighted else (30, "max")
    rows, keys = edges(call.sizes.queries, size), edges(call.sizes.keys, size)
    assert not close(amap.pool(size, how).cpu(), *truth.pooled(rows, keys, how)), str(recipe)
    found = amap.received().cpu()
    assert not close(found, truth.p.sum(-2), truth.sums.sum(-2)), str(recipe)
    weights, named = (x.cpu() for x in amap.top(3))
    count = min(3, call.sizes.keys)
    best = truth.p.topk(count).values
    off = 2 * truth.off.amax(-1, keepdim=True).expand_as(best)
    assert not close(weights[..., :count], best, off), str(recipe)
    at = named.clamp_min(0)
    assert not close(weights, truth.p.gather(-1, at).masked_fill(named < 0, 0), off[..., :1])


def test_a_tile_of_the_pyramid_and_a_slice_are_the_matrix() -> None:
    call = PLAIN.call()
    truth = Truth(call)
    amap = map_of(call.copy(device=DEVICE, learn=False))
    assert not close(amap.head(0, 1).tile(0, 0, 0).cpu(), truth.p[0, 1], truth.off[0, 1])
    part = (0, slice(1, 3), slice(2, 9), slice(1, 4))
    assert not close(amap[part].cpu(), truth.p[part], truth.off[part])


def test_what_the_kernels_cannot_do_is_left_to_pytorch() -> None:
    q = torch.randn(1, 1, 5, 16, device=DEVICE)
    assert backends.backend_for(hw.attention_map(q.double(), q.double())._region) is blockwise
    score = hw.Additive(torch.ones(16, device=DEVICE))
    assert backends.backend_for(hw.attention_map(q, q, score=score)._region) is blockwise
    weights, keys = hw.attention_map(q, q).top(70)  # more than a kernel keeps
    assert weights.shape == keys.shape == (1, 1, 5, 70)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_maps_agree_with_pytorchs_loops(dtype: torch.dtype) -> None:
    q, k = (torch.randn(1, 4, 3000, 64, device="cuda", dtype=dtype) for _ in range(2))
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    region, fused = amap._region, backends.backend_for(amap._region)
    totals = fused.row_totals(region)
    exact = blockwise.row_totals(region)
    torch.testing.assert_close(totals.lse, exact.lse, rtol=1e-5, atol=1e-5)
    cells = Cells.evenly(3000, 256)
    for how in ("mean", "max"):
        found = fused.pool(region, totals, cells, cells, how)
        torch.testing.assert_close(
            found, blockwise.pool(region, totals, cells, cells, how), rtol=1e-4, atol=1e-6
        )
    torch.testing.assert_close(
        fused.received(region, totals), blockwise.received(region, totals), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(fused.top(region, totals, 8)[0], blockwise.top(region, totals, 8)[0])


CAUSAL = hw.mask.causal()
EMPTIED = {  # a second piece that joins the first, so that most rows have none of their own
    "prefix": CAUSAL | hw.mask.prefix(4),
    "lengths": CAUSAL | hw.mask.lengths([2]),
    "sinks and window": CAUSAL & (hw.mask.window(36) | hw.mask.prefix(4)),
    "the wrong way round": hw.mask.between(torch.tensor(39), torch.tensor(38)),
}


@pytest.mark.parametrize("case", EMPTIED)
def test_a_piece_that_is_empty_for_a_whole_block_of_rows_counts_no_key(case: str) -> None:
    q, k = (torch.randn(1, 2, 90, 16, device=DEVICE) for _ in range(2))
    amap = hw.attention_map(q, k, mask=EMPTIED[case])
    wide = hw.attention_map(q.double(), k.double(), mask=EMPTIED[case])
    assert backends.backend_for(amap._region) is not blockwise
    assert backends.backend_for(wide._region) is blockwise
    torch.testing.assert_close(amap.lse.double(), wide.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(amap.to_tensor().double(), wide.to_tensor(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [3, 4, 12])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_row_of_nan_stays_in_its_cells(size: int, how: str) -> None:
    q, k = (torch.randn(1, 2, 10, 16, device=DEVICE) for _ in range(2))
    q[0, 1, 4] = torch.nan
    amap, wide = hw.attention_map(q, k), hw.attention_map(q.double(), k.double())
    assert torch.equal(amap.pool(size, how).isnan(), wide.pool(size, how).isnan())
    weights, keys = amap.top(3)
    assert torch.equal(weights.isnan(), wide.top(3)[0].isnan())
    assert (keys >= 0).all()


def test_no_heads_give_a_map_of_nothing() -> None:
    q, k = torch.randn(1, 4, 5, 8, device=DEVICE), torch.randn(1, 2, 6, 8, device=DEVICE)
    assert hw.attention_map(q, k)[0, 2:2].shape == (0, 5, 6)
    assert hw.attention_map(q[:, :0], k[:, :1]).to_tensor().shape == (1, 0, 5, 6)


def test_more_batch_entries_than_a_grid_holds_take_other_loops() -> None:
    q = torch.zeros(65536, 1, 1, 8, device=DEVICE)
    assert backends.backend_for(hw.attention_map(q, q)._region) is blockwise


@pytest.mark.parametrize("recipe", some[1:])
def test_the_weight_of_a_rows_largest_keys_is_that_of_the_matrix(recipe: Recipe) -> None:
    call = recipe.call()
    truth = Truth(call)
    amap = map_of(call.copy(device=DEVICE, learn=False))
    assert backends.coverage_for(amap._region) is not coverage
    best = truth.p.sort(dim=-1, descending=True).values
    sums, off = best.cumsum(-1), 2 * truth.sums.sum(-1) + 1e-6
    counts = [1, 7, 40]
    found = amap.kept(counts).cpu()
    for place, count in enumerate(counts):
        wanted = sums[..., min(count, sums.shape[-1]) - 1]
        assert not close(found[..., place], wanted, off), (count, str(recipe))
    for share in (0.9,):
        needed = amap.needed(share).cpu()
        held = torch.cat((torch.zeros_like(best[..., :1]), sums), -1)
        target = share * sums[..., -1]
        enough = held.gather(-1, needed[..., None])[..., 0]
        fewer = held.gather(-1, (needed - 1).clamp_min(0)[..., None])[..., 0]
        assert (enough >= target - off - 2e-6).all(), str(recipe)
        assert ((fewer <= target + off + 2e-6) | (target == 0)).all(), str(recipe)
        assert not needed[target == 0].any()


def test_equal_weights_are_counted_one_by_one() -> None:
    q = torch.zeros(1, 1, 70, 16, device=DEVICE)
    amap = hw.attention_map(q, q, mask=hw.mask.causal())
    assert backends.coverage_for(amap._region) is not coverage
    rows = torch.arange(1, 71)
    wanted = 10 / rows.clamp_min(10)
    torch.testing.assert_close(amap.kept(10)[0, 0].cpu(), wanted)
    assert amap.needed(0.5)[0, 0].cpu().tolist() == [-(-int(n) // 2) for n in rows]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_maps_keep_what_pytorchs_loops_say(dtype: torch.dtype) -> None:
    q, k = (2 * torch.randn(1, 4, 3000, 64, device="cuda", dtype=dtype) for _ in range(2))
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    region = amap._region
    totals = amap._weights()
    found = backends.coverage_for(region).kept(region, totals, [1, 64, 1024])
    torch.testing.assert_close(
        found, coverage.kept(region, totals, [1, 64, 1024]), rtol=1e-4, atol=1e-5
    )
    few, exact = (
        each.needed(region, totals, 0.95) for each in (backends.coverage_for(region), coverage)
    )
    assert ((few - exact).abs() <= 1 + exact // 500).all()  # keys of almost equal weights
