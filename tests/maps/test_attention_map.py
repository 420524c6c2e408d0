"""Every part of an attention map is that part of the whole matrix, which is never stored."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.core.row_sums import RowTotals
from headwise.maps import blockwise
from headwise.maps import lazy_map as map_module
from headwise.maps.region import Region
from tests.oracle import answer
from tests.problems import Call, Recipe, recipes, small_blocks
from tests.rounding import Units, close, tiny, weight_error

problems = recipes(longest=24, dropout="none")
blocks = st.sampled_from((nullcontext, small_blocks))  # as large as the problem, or many


def map_of(call: Call, **more: Tensor) -> hw.AttentionMap:
    return hw.attention_map(call.q, call.k, call.v, **call.options(), **more)


class Truth:
    """The whole matrix (B, Hq, N, M) in float64, and how far rounding may carry each weight."""

    def __init__(self, call: Call, weighted: bool = False) -> None:
        found = answer(call)
        units = Units.of(call.q.dtype).sums
        self.visible = found.seen
        self.p, self.lse = found.p, found.lse
        relative = weight_error(call, found)[..., None] + 4 * units
        if weighted:
            group = call.sizes.heads // call.sizes.key_heads
            norms = call.v.double().norm(dim=-1).repeat_interleave(group, 1)[:, :, None]
            self.p, relative = self.p * norms, relative + (call.sizes.value_width + 4) * units
        self.off = self.p * relative + tiny(call.q.dtype)
        # what adding up as many numbers as there are rows and keys may add
        self.sums = self.off + self.p * (call.sizes.queries + call.sizes.keys) * units

    def pooled(self, rows: list[int], keys: list[int], how: str) -> tuple[Tensor, Tensor]:
        """Cells between these edges and how far they may be off."""
        return reduced(self.p, rows, keys, how), reduced(self.sums, rows, keys, how)


def reduced(x: Tensor, rows: list[int], keys: list[int], how: str) -> Tensor:
    """The mean or the largest entry of each cell, cell by cell."""
    out = x.new_zeros(*x.shape[:2], len(rows) - 1, len(keys) - 1)
    for a in range(len(rows) - 1):
        for c in range(len(keys) - 1):
            cell = x[..., rows[a] : rows[a + 1], keys[c] : keys[c + 1]]
            out[..., a, c] = cell.mean((-1, -2)) if how == "mean" else cell.amax((-1, -2))
    return out


def edges(n: int, size: int) -> list[int]:
    size = min(n, size)
    return [c * n // size for c in range(size + 1)]


def index(n: int) -> st.SearchStrategy[int | slice]:
    """An integer or a slice of an axis, with bounds on either side of it and from its end."""
    bound = st.none() | st.integers(-n - 2, n + 2)
    return st.integers(-n, n - 1) | st.builds(slice, bound, bound) | st.just(slice(None))


@contextmanager
def small_tiles(side: int) -> Iterator[None]:
    before, map_module.TILE = map_module.TILE, side
    try:
        yield
    finally:
        map_module.TILE = before


@given(problems, blocks, st.booleans(), st.data())
def test_a_slice_is_that_part_of_the_matrix(
    recipe: Recipe, blocks: Callable, weighted: bool, data: st.DataObject
) -> None:
    call = recipe.call()
    truth = Truth(call, weighted)
    with blocks():
        amap = map_of(call).weighted() if weighted else map_of(call)
        assert amap.shape == tuple(truth.p.shape)
        for _ in range(3):
            part = tuple(data.draw(index(n)) for n in amap.shape[: data.draw(st.integers(1, 4))])
            found = amap[part]
            assert found.dtype == amap.dtype == torch.promote_types(call.q.dtype, torch.float32)
            assert not close(found, truth.p[part], truth.off[part]), f"{part} of {recipe}"
        assert not close(amap.to_tensor(), truth.p, truth.off), str(recipe)


@given(problems, blocks, st.booleans(), st.integers(1, 40), st.sampled_from(("mean", "max")))
def test_a_pool_is_the_mean_or_the_largest_of_each_cell(
    recipe: Recipe, blocks: Callable, weighted: bool, size: int, how: str
) -> None:
    call = recipe.call()
    truth = Truth(call, weighted)
    rows, keys = edges(call.sizes.queries, size), edges(call.sizes.keys, size)
    with blocks():
        amap = map_of(call).weighted() if weighted else map_of(call)
        found = amap.pool(size, how)
    assert not close(found, *truth.pooled(rows, keys, how)), str(recipe)


@given(problems, blocks, st.booleans())
def test_received_is_the_sum_of_each_column(
    recipe: Recipe, blocks: Callable, weighted: bool
) -> None:
    call = recipe.call()
    truth = Truth(call, weighted)
    with blocks():
        amap = map_of(call).weighted() if weighted else map_of(call)
        found = amap.received()
    assert not close(found, truth.p.sum(-2), truth.sums.sum(-2)), str(recipe)


@given(problems, blocks, st.booleans(), st.integers(1, 30))
def test_top_names_the_largest_weights_of_each_row_in_order(
    recipe: Recipe, blocks: Callable, weighted: bool, k: int
) -> None:
    call = recipe.call()
    truth = Truth(call, weighted)
    with blocks():
        amap = map_of(call).weighted() if weighted else map_of(call)
        weights, keys = amap.top(k)
    some = min(k, call.sizes.keys)
    assert weights.shape == keys.shape == (*truth.p.shape[:3], k)
    assert (weights[..., :-1] >= weights[..., 1:]).all()
    best, order = truth.p.sort(-1, descending=True)
    off = truth.off.gather(-1, order)[..., :some]
    off = off + truth.off.amax(-1, keepdim=True)  # neighbours in the order may have changed places
    assert not close(weights[..., :some], best[..., :some], off), str(recipe)
    # each weight is the one of its key, and no key comes twice
    place = keys.clamp_min(0)
    assert not close(
        weights, truth.p.gather(-1, place).masked_fill(keys < 0, 0), truth.off.gather(-1, place)
    ), str(recipe)
    named = torch.zeros_like(truth.p).scatter_add_(-1, place, (keys >= 0).double())
    assert named.max() <= 1
    assert not named.masked_select(~truth.visible).any()
    count = truth.visible.sum(-1, keepdim=True).clamp_max(k)
    assert ((keys >= 0) == (torch.arange(k) < count)).all()
    assert not weights.masked_select(keys < 0).any()


@given(problems, blocks, st.integers(1, 5), st.sampled_from(("mean", "max")), st.data())
def test_a_tile_holds_cells_of_a_power_of_two(
    recipe: Recipe, blocks: Callable, side: int, how: str, data: st.DataObject
) -> None:
    call = recipe.call()
    truth, queries, keys = Truth(call), call.sizes.queries, call.sizes.keys
    with blocks(), small_tiles(side):
        b = data.draw(st.integers(0, call.sizes.batch - 1))
        h = data.draw(st.integers(0, call.sizes.heads - 1))
        amap = map_of(call).head(b, h)
        assert amap.grid(0) == (1, 1)
        level = data.draw(st.integers(0, amap.levels - 1))
        cell = 2 ** (amap.levels - 1 - level)
        row_edges, key_edges = [*range(0, queries, cell), queries], [*range(0, keys, cell), keys]
        whole, off = truth.pooled(row_edges, key_edges, how)
        columns, lines = amap.grid(level)
        assert (columns, lines) == (-(-whole.shape[-1] // side), -(-whole.shape[-2] // side))
        for x in range(columns):
            for y in range(lines):
                part = (b, h, slice(y * side, (y + 1) * side), slice(x * side, (x + 1) * side))
                found = amap.tile(level, x, y, how)
                assert not close(found, whole[part], off[part]), f"{level} {x} {y} of {recipe}"


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_level_pools_the_one_below(how: str) -> None:
    q, k = torch.randn(2, 1, 1, 700, 8, dtype=torch.float64).unbind(0)
    amap = hw.attention_map(q, k, mask=hw.mask.causal() & hw.mask.window(300))

    def picture(level: int) -> Tensor:
        columns, lines = amap.grid(level)
        rows = [[amap.tile(level, x, y, how) for x in range(columns)] for y in range(lines)]
        return torch.cat([torch.cat(row, 1) for row in rows])

    assert amap.levels == 3
    below = picture(2)
    torch.testing.assert_close(below, amap[0, 0])
    for level in (1, 0):
        here = picture(level)
        full = below[: below.shape[0] // 2 * 2, : below.shape[1] // 2 * 2]
        cells = full.unflatten(1, (-1, 2)).unflatten(0, (-1, 2))
        pooled = cells.mean((1, 3)) if how == "mean" else cells.amax((1, 3))
        torch.testing.assert_close(here[: pooled.shape[0], : pooled.shape[1]], pooled)
        below = here


@pytest.mark.parametrize(
    ("n", "levels"), [(1, 1), (256, 1), (257, 2), (512, 2), (513, 3), (100_000, 10)]
)
def test_there_are_as_many_levels_as_doublings_from_one_tile(n: int, levels: int) -> None:
    amap = hw.attention_map(torch.zeros(1, 1, n, 1), torch.zeros(1, 1, 3, 1))
    assert amap.levels == levels
    assert amap.grid(0) == (1, 1)
    assert amap.grid(levels - 1) == (1, -(-n // 256))


@given(problems, st.data())
def test_a_head_is_that_head_of_the_map(recipe: Recipe, data: st.DataObject) -> None:
    call = recipe.call()
    truth = Truth(call)
    b = data.draw(st.integers(-call.sizes.batch, call.sizes.batch - 1))
    h = data.draw(st.integers(-call.sizes.heads, call.sizes.heads - 1))
    one = map_of(call).head(b, h)
    assert one.shape == (1, 1, call.sizes.queries, call.sizes.keys)
    assert not close(one[0, 0], truth.p[b, h], truth.off[b, h]), str(recipe)
    weighted, heavy = one.weighted(), Truth(call, weighted=True)
    assert not close(weighted[0, 0], heavy.p[b, h], heavy.off[b, h]), str(recipe)


# Row sums


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes (batch entries, heads, rows, keys) of every pass that computes lse."""
    passes: list[tuple[int, ...]] = []
    compute = blockwise.row_totals

    def counted(region: Region) -> RowTotals:
        passes.append(region.box.shape)
        return compute(region)

    monkeypatch.setattr(blockwise, "row_totals", counted)
    return passes


def test_lse_is_computed_for_the_rows_that_are_asked_for_and_once(
    learned: list[tuple[int, ...]],
) -> None:
    q, k = torch.randn(2, 2, 4, 50, 8).unbind(0)
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    assert learned == []
    amap[0, 1, 10:20, :5]
    assert learned == [(1, 1, 10, 50)]
    amap[0, 1, 12:20]
    assert len(learned) == 1
    amap[0, 1, 12:25]
    assert learned[1:] == [(1, 1, 5, 50)]
    one = amap.head(1, 2)
    one.pool(5)
    assert learned[2:] == [(1, 1, 50, 50)]
    amap[1, 2], one.received(), one.top(3), amap.head(1, 2).tile(0, 0, 0)
    assert len(learned) == 3
    amap.received()
    amap.pool()
    assert learned[3:] == [(2, 4, 50, 50)]


def test_a_given_lse_is_taken(learned: list[tuple[int, ...]]) -> None:
    q, k, v = torch.randn(3, 2, 4, 50, 8).unbind(0)
    _, seen = hw.observe(q, k, v, sinks=torch.zeros(4), stats=("lse",))
    amap = hw.attention_map(q, k, sinks=torch.zeros(4), lse=seen.lse)
    weights = amap.to_tensor()
    assert learned == []
    torch.testing.assert_close(weights, hw.attention_map(q, k, sinks=torch.zeros(4)).to_tensor())
    shifted = hw.attention_map(q, k, sinks=torch.zeros(4), lse=seen.lse + 1).to_tensor()
    torch.testing.assert_close(shifted, weights / torch.e)  # rows are never renormalised


def test_without_a_batch_the_map_has_a_batch_of_one() -> None:
    q, k = torch.randn(2, 4, 30, 8).unbind(0)
    amap = hw.attention_map(q, k)
    assert amap.shape == (1, 4, 30, 30)
    lse = torch.logsumexp(q @ k.mT * 8**-0.5, -1)
    torch.testing.assert_close(hw.attention_map(q, k, lse=lse)[:], amap[:])


# Corners


def test_rows_that_see_nothing_have_no_weight_and_no_top_key() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    for sinks in (None, torch.zeros(2)):
        amap = hw.attention_map(q, k, v, mask=hw.mask.lengths([0]), sinks=sinks)
        for found in (amap, amap.weighted()):
            weights, keys = found.top(2)
            for nothing in (found[:], found.pool(3), found.received(), weights):
                assert not nothing.any()
            assert (keys == -1).all()


def test_keys_that_no_row_sees_may_hold_anything() -> None:
    q, k, v = torch.randn(3, 1, 2, 12, 8).unbind(0)
    mask = hw.mask.causal() & (hw.mask.window(2) | hw.mask.prefix(1)) & hw.mask.lengths([7])
    clean = hw.attention_map(q, k, v, mask=mask).weighted()
    k, v = k.clone(), v.clone()
    k[:, :, 7:], v[:, :, 7:] = torch.nan, torch.inf
    dirty = hw.attention_map(q, k, v, mask=mask).weighted()
    assert torch.equal(dirty[:], clean[:])
    assert torch.equal(dirty.pool(5), clean.pool(5))
    assert torch.equal(dirty.received(), clean.received())
    assert torch.equal(dirty.top(3)[0], clean.top(3)[0])


@pytest.mark.parametrize("size", [3, 4, 12])
@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_row_of_nan_stays_in_its_cells(size: int, how: str) -> None:
    q, k = torch.randn(2, 1, 2, 10, 8).unbind(0)
    q[0, 1, 4] = torch.nan
    amap = hw.attention_map(q, k)
    lost = torch.zeros(1, 2, 10, 10, dtype=torch.bool)
    lost[0, 1, 4] = True
    assert torch.equal(amap[:].isnan(), lost)
    cells = torch.zeros(1, 2, min(size, 10), min(size, 10), dtype=torch.bool)
    cells[0, 1, sum(edge <= 4 for edge in edges(10, size)) - 1] = True
    assert torch.equal(amap.pool(size, how).isnan(), cells)
    assert torch.equal(amap.top(3)[0].isnan().any(-1), lost.any(-1))


@pytest.mark.parametrize("shape", [(0, 4, 3), (1, 0, 3), (1, 4, 0), (0, 0, 0)])
def test_an_axis_of_nothing_gives_maps_of_nothing(shape: tuple[int, int, int]) -> None:
    batch, queries, keys = shape
    q, k = torch.zeros(batch, 2, queries, 8), torch.zeros(batch, 2, keys, 8)
    amap = hw.attention_map(q, k, k, mask=hw.mask.causal())
    for found in (amap, amap.weighted()):
        assert found[:].shape == (batch, 2, queries, keys)
        assert found[:, 1:1].shape == (batch, 0, queries, keys)
        assert found.pool(3).shape == (batch, 2, min(3, queries), min(3, keys))
        assert not found.received().any()
        assert found.received().shape == (batch, 2, keys)
        assert (found.top(2)[1] == -1).all()


def test_empty_slices_are_empty() -> None:
    amap = hw.attention_map(torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8))
    assert amap[0, 2:2].shape == (0, 5, 5)
    assert amap[0, 1:4, 3:1].shape == (3, 0, 5)
    assert amap[..., 0].shape == (1, 4, 5)
    assert amap[0, ..., 2:].shape == (4, 5, 3)
    assert amap[torch.tensor(0), 1, 2, 3].shape == ()


def test_a_map_holds_no_gradient_and_heeds_no_autocast() -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).unbind(0)
    plain = hw.attention_map(q, k, v).weighted()
    amap = hw.attention_map(q.requires_grad_(), k.requires_grad_(), v.requires_grad_()).weighted()
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("to_tensor", "pool", "received"):
            found = getattr(amap, name)()
            assert not found.requires_grad
            torch.testing.assert_close(found, getattr(plain, name)())


def test_a_map_is_not_looped_over() -> None:
    amap = hw.attention_map(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1))
    with pytest.raises(TypeError, match="not iterable"):
        list(amap)


def test_numpy_gets_every_weight() -> None:
    q, k = torch.randn(2, 1, 2, 5, 4).unbind(0)
    amap = hw.attention_map(q, k)
    np.testing.assert_array_equal(np.asarray(amap), amap.to_tensor().numpy())
    assert np.asarray(amap, dtype=np.float64).dtype == np.float64


LOOKS: dict[str, Callable[[hw.AttentionMap], object]] = {
    "slice": lambda amap: amap[0, 0],
    "lse": lambda amap: amap.lse,
    "pool": lambda amap: amap.pool(2),
    "received": lambda amap: amap.received(),
    "top": lambda amap: amap.top(2),
    "head": lambda amap: amap.head(0, 0),
    "weighted": lambda amap: amap.weighted(),
    "region": lambda amap: amap.region,
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("name", ["q", "k", "bias"])
def test_a_map_whose_tensors_were_written_over_says_so(look: str, name: str) -> None:
    given = {each: torch.randn(1, 2, 5, 4) for each in ("q", "k", "v")}
    given["bias"] = torch.randn(5, 5)
    amap = hw.attention_map(**given)
    LOOKS[look](amap)
    given[name].mul_(3)
    said = rf"{name}, or .* written to(.|\n)*{name}\.clone\(\)(.|\n)*<AttentionMap"
    with pytest.raises(ValueError, match=said):
        LOOKS[look](amap)


def test_the_map_of_a_head_knows_of_writes_too_and_a_copy_of_a_map_has_none() -> None:
    q, k = torch.randn(2, 1, 2, 5, 4).unbind(0)
    amap = hw.attention_map(q, k)
    head, twin, weights = amap.head(0, 1), copy.deepcopy(amap), amap[0, 1]
    q.add_(1)
    with pytest.raises(ValueError, match=r"q, or .* written to"):
        head[0, 0]
    assert torch.equal(twin[0, 1], weights)
    assert torch.equal(pickle.loads(pickle.dumps(twin))[0, 1], weights)


def test_tensors_of_inference_mode_have_maps() -> None:
    with torch.inference_mode():
        q, k = torch.randn(2, 1, 2, 5, 4).unbind(0)
        sums = hw.attention_map(q, k)[0, 0].sum(-1)
    torch.testing.assert_close(sums, torch.ones(5))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_map_made_in_inference_mode_can_be_read_outside_of_it(mode: Callable[[], object]) -> None:
    with torch.inference_mode():
        q, k, v = torch.randn(3, 1, 2, 5, 4).unbind(0)
        amap = hw.attention_map(q, k, v, mask=hw.mask.causal())
        top = amap[0, 0, :2]
    with mode():
        whole = amap[0, 0]
    torch.testing.assert_close(whole[:2], top)
    torch.testing.assert_close(whole.sum(-1), torch.ones(5))
    torch.testing.assert_close(amap.head(0, 1).pool(5)[0, 0], amap[0, 1])
    torch.testing.assert_close(amap.received().sum(-1), torch.full((1, 2), 5.0))
    assert amap.weighted().top(2)[0].isfinite().all()
    with torch.inference_mode():
        torch.testing.assert_close(amap.lse, hw.attention_map(q, k, mask=hw.mask.causal()).lse)


LARGE = hw.attention_map(torch.zeros(1, 4, 9000, 1), torch.zeros(1, 2, 9000, 1))
K = torch.zeros(1, 1, 9, 4)
SMALL = hw.attention_map(torch.zeros(1, 2, 9, 4), K)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SMALL[0, 0, ::2], r"step.*2.*\n.*1 × 2 × 9 × 9>\[0, 0, ::2\]"),
        (
            lambda: SMALL[0, 0, [1, 2]],
            r"\[1, 2\] is not an integer or a slice.*\n.*\[0, 0, \[1, 2\]\]",
        ),
        (lambda: SMALL[0, torch.tensor([0])], "not an integer or a slice"),
        (lambda: SMALL[True], "not an integer or a slice"),
        (lambda: SMALL[None], "not an integer or a slice"),
        (lambda: SMALL[0, 2], r"index 2 is out of range for an axis of size 2(.|\n)*\[0, 2\]"),
        (lambda: SMALL[0, 0, -10], "index -10 is out of range for an axis of size 9"),
        (lambda: SMALL[0, 0, 0, 0, 0], "5 indices for a map of 4 axes"),
        (lambda: SMALL[..., 0, ...], "3 indices"),
        (lambda: SMALL.head(0, 3), r"index 3 is out of range(.|\n)*\.head\(0, 3\)"),
        (lambda: SMALL.head(0, slice(1)), r"two integers"),
        (
            lambda: LARGE.to_tensor(),
            r"324,000,000 weights; one slice holds at most 67,108,864(.|\n)*to_tensor\(\)",
        ),
        (lambda: LARGE[0, 0], r"81,000,000 weights(.|\n)*pool\(256\)(.|\n)*\[0, 0\]"),
        (lambda: SMALL.weighted(), r"no values(.|\n)*weighted\(\)"),
        (lambda: SMALL.pool(0), r"at least 1(.|\n)*pool\(0"),
        (lambda: SMALL.pool(3, "median"), r"'mean' or 'max'(.|\n)*'median'"),
        (lambda: SMALL.pool("a"), r"an integer(.|\n)*pool\('a'"),
        (lambda: SMALL.pool(2.5), r"an integer(.|\n)*pool\(2.5"),
        (lambda: SMALL.top(0), r"at least 1(.|\n)*top\(0\)"),
        (lambda: SMALL.top(True), r"an integer(.|\n)*top\(True\)"),
        (lambda: SMALL.tile(0, 0, 0), r"\.head\(b, h\)"),
        (lambda: LARGE.head(0, 1).tile(7, 0, 0), r"levels 0 to 6"),
        (lambda: LARGE.head(0, 1).tile(2, 4, 0), r"tiles x < 3, y < 3(.|\n)*tile\(2, 4, 0"),
        (lambda: LARGE.head(0, 1).tile(2, 0, -1), r"tiles x < 3, y < 3"),
        (lambda: LARGE.head(0, 1).tile(2, 0.5, 0), r"tiles x < 3, y < 3"),
        (lambda: LARGE.grid("a"), r"levels 0 to 6"),
        (lambda: np.asarray(LARGE), r"324,000,000 weights; one slice holds at most 67,108,864"),
        (lambda: LARGE.grid(-1), r"levels 0 to 6(.|\n)*grid\(-1\)"),
        (
            lambda: hw.attention_map(torch.zeros(1, 2, 9, 4), K, lse=torch.zeros(1, 2, 8)),
            r"lse is float32 \(1, 2, 8\).*\(1, 2, 9\)(.|\n)*attention_map\(q float32[^v]*$",
        ),
    ],
)
def test_bad_questions_get_an_answer_that_restates_them(
    call: Callable[[], object], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        call()


MEMORY = """
import resource, sys, torch, headwise as hw

def peak():
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

def look(n, mask):
    q, k, v = torch.randn(3, 1, 1, n, 8).unbind(0)
    amap = hw.attention_map(q, k, v, mask=mask).weighted()
    amap.pool(100), amap.pool(100, "max"), amap.received(), amap.top(4), amap.tile(0, 0, 0)

torch.set_num_threads(1)
mask = hw.mask.causal()
look(1500, mask)
before = peak()
look(6000, mask)
print(peak() - before)
"""


def test_a_map_takes_the_memory_of_a_few_tiles() -> None:
    run = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 16 * 2**20  # the matrix takes 137 MiB
