"""Every part of an effect map is that part of the matrix that removing each edge gives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.maps import lazy_map
from tests.maps.test_attention_map import edges, index, small_tiles
from tests.oracle import answer
from tests.problems import Call, Recipe, every_pair, recipes, small_blocks
from tests.rounding import Units, close, tiny, weight_error

problems = recipes(longest=16, dropout="none")
blocks = st.sampled_from((nullcontext, small_blocks))


def gradient(call: Call) -> Tensor:
    """A gradient of the output, of its dtype, (B, Hq, N, Dv)."""
    sizes = call.sizes
    shape = sizes.batch, sizes.heads, sizes.queries, call.v.shape[-1]
    numbers = torch.Generator().manual_seed(call.seed + 7)
    return torch.randn(shape, generator=numbers, dtype=torch.float64).to(call.v)


def map_of(call: Call, grad: Tensor, **more: Tensor) -> hw.EffectMap:
    return hw.effect_map(call.q, call.k, call.v, grad, **more, **call.options())


class Removed:
    """Attention without some keys, in float64: how much of a scalar it gains by its gradient."""

    def __init__(self, call: Call, grad: Tensor) -> None:
        found, units = answer(call), Units.of(call.q.dtype).sums
        group = call.sizes.heads // call.sizes.key_heads
        self.s, self.sinks, self.p = found.s.detach(), call.sinks, found.p.detach()
        self.products = grad.double() @ call.v.detach().double().repeat_interleave(group, 1).mT
        sizes = grad.double().abs() @ call.v.detach().double().repeat_interleave(group, 1).abs().mT
        scale = sizes.masked_fill(~found.seen, 0).amax(-1)
        error = 8 * weight_error(call, found) + (call.v.shape[-1] + 16) * 2 * units
        self.off = (scale * error + tiny(call.q.dtype))[..., None].expand_as(self.s)
        self.out = self.product_of(self.s)

    def product_of(self, s: Tensor) -> Tensor:
        """grad · out of attention with these logits, (B, Hq, N)."""
        columns = s
        if self.sinks is not None:
            sink = self.sinks.detach().double()[None, :, None, None].expand(*s.shape[:3], 1)
            columns = torch.cat([s, sink], -1)
        weights = columns.softmax(-1).nan_to_num(nan=0)[..., : s.shape[-1]]  # rows without keys
        return (weights * self.products).sum(-1)

    def without(self, first: int, last: int) -> Tensor:
        """What removing the keys [first, last) adds, (B, Hq, N)."""
        s = self.s.clone()
        s[..., first:last] = -torch.inf
        return self.product_of(s) - self.out

    def edges(self) -> Tensor:
        """What removing each edge adds, (B, Hq, N, M)."""
        return torch.stack([self.without(j, j + 1) for j in range(self.s.shape[-1])], -1)


@given(problems, blocks, st.data())
def test_a_slice_is_what_removing_each_edge_adds(
    recipe: Recipe, blocks: Callable, data: st.DataObject
) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    expected = truth.edges()
    with blocks():
        emap = map_of(call, grad)
        part = tuple(data.draw(index(n)) for n in emap.shape)
        found = emap[part]
        assert found.dtype == emap.dtype == torch.promote_types(call.q.dtype, torch.float32)
        assert not close(found, expected[part], truth.off[part]), f"{part} of {recipe}"
        assert not close(emap.to_tensor(), expected, truth.off), str(recipe)


@pytest.mark.parametrize("recipe", every_pair(dtype=("float64",), dropout=("none",)), ids=str)
def test_float64_agrees_with_removal_to_a_billionth(recipe: Recipe) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    scale = truth.products.abs().amax().item()
    found = map_of(call, grad).to_tensor()
    torch.testing.assert_close(found, truth.edges(), rtol=1e-9, atol=1e-9 * max(1.0, scale))


@given(problems, blocks, st.integers(1, 20), st.sampled_from(("sum", "max")))
def test_a_pool_is_the_sum_or_the_furthest_from_zero(
    recipe: Recipe, blocks: Callable, size: int, how: str
) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    every = truth.edges()
    with blocks():
        emap = map_of(call, grad)
        found, columns = emap.pool(size, how), emap.received()
    rows, keys = edges(call.sizes.queries, size), edges(call.sizes.keys, size)
    for a in range(len(rows) - 1):
        for c in range(len(keys) - 1):
            part = (..., slice(rows[a], rows[a + 1]), slice(keys[c], keys[c + 1]))
            cell, off = every[part], truth.off[part]
            if how == "sum":
                assert not close(found[..., a, c], cell.sum((-1, -2)), 2 * off.sum((-1, -2)))
                continue
            size_of, most = cell.abs().amax((-1, -2)), off.amax((-1, -2))
            assert not close(found[..., a, c].abs(), size_of, most), str(recipe)
            near = (found[..., a, c, None, None] - cell).abs().amin((-1, -2))  # it is one of them
            assert not close(near, torch.zeros_like(near), most), str(recipe)
    assert not close(columns, every.sum(-2), 2 * truth.off.sum(-2)), str(recipe)


@given(problems, blocks, st.integers(1, 20))
def test_top_names_the_largest_effects_of_each_row_with_their_signs(
    recipe: Recipe, blocks: Callable, k: int
) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    every, seen = truth.edges(), truth.s != -torch.inf
    with blocks():
        effects, keys = map_of(call, grad).top(k)
    assert effects.shape == keys.shape == (*every.shape[:3], k)
    assert torch.equal((keys >= 0).sum(-1), seen.sum(-1).clamp_max(k))
    at = keys.clamp_min(0)
    named = every.gather(-1, at).masked_fill(keys < 0, 0)
    off = truth.off[..., :1].expand_as(named)
    assert not close(effects, named, off), str(recipe)
    some = min(k, call.sizes.keys)
    best = every.abs().masked_fill(~seen, 0).topk(some).values
    assert not close(effects.abs()[..., :some], best, off[..., :some]), str(recipe)


@given(problems, st.integers(1, 30))
def test_largest_names_the_largest_effects_of_the_whole_map(recipe: Recipe, count: int) -> None:
    call = recipe.call()
    grad = gradient(call)
    emap = map_of(call, grad)
    every = emap.to_tensor()
    effects, places = emap.largest(count)
    some = every.abs().flatten().topk(min(count, every.numel())).values
    torch.testing.assert_close(effects.abs(), some[some > 0])  # products of other sizes round apart
    torch.testing.assert_close(every[tuple(places.T)], effects)
    assert len({tuple(place) for place in places.tolist()}) == len(places)


@given(problems, blocks, st.data())
def test_a_span_is_what_removing_all_of_its_keys_adds(
    recipe: Recipe, blocks: Callable, data: st.DataObject
) -> None:
    call = recipe.call()
    grad = gradient(call)
    truth = Removed(call, grad)
    first = data.draw(st.integers(0, call.sizes.keys))
    last = data.draw(st.integers(first, call.sizes.keys))
    with blocks():
        found = map_of(call, grad).span(first, last)
    off = truth.off[..., 0]
    assert not close(found.effect, truth.without(first, last), off), str(recipe)
    mass = truth.p[..., first:last].sum(-1)
    error = weight_error(call, answer(call)) + 64 * Units.of(call.q.dtype).sums
    assert not close(found.mass, mass, error.clamp_max(1)), str(recipe)
    numerator, same = found
    assert same is found.mass
    assert not close(numerator, found.effect * (1 - found.mass), off)


def test_the_sums_of_disjoint_spans_add_up() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8, dtype=torch.float64).unbind()
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal(2))
    one, two, both = emap.span(0, 2), emap.span(2, 5), emap.span(0, 5)
    torch.testing.assert_close(one.numerator + two.numerator, both.numerator)
    torch.testing.assert_close(one.mass + two.mass, both.mass)


@given(problems, st.data())
def test_a_head_of_a_map_and_its_tiles_are_parts_of_it(recipe: Recipe, data: st.DataObject) -> None:
    call = recipe.call()
    grad = gradient(call)
    emap = map_of(call, grad)
    b, h = (data.draw(st.integers(0, n - 1)) for n in emap.shape[:2])
    one, every = emap.head(b, h), emap[b, h]
    torch.testing.assert_close(one[0, 0], every)
    with small_tiles(4):
        last = one.levels - 1
        columns, lines = one.grid(last)
        rows = [[one.tile(last, x, y) for x in range(columns)] for y in range(lines)]
        torch.testing.assert_close(torch.cat([torch.cat(row, 1) for row in rows]), every)
        assert one.tile(0, 0, 0, how="max").abs().amax() == every.abs().amax()
    assert lazy_map.TILE == 256


def test_a_row_that_sees_one_key_loses_its_output() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 5, 8, dtype=torch.float64).unbind()
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.window(0))
    out = hw.attention(q, k, v, mask=hw.mask.window(0))
    lost = -(grad * out).sum(-1)
    torch.testing.assert_close(emap.to_tensor(), torch.diag_embed(lost), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(emap.span(0, 5).effect, lost, rtol=1e-12, atol=1e-12)
    sinks = torch.zeros(2, dtype=torch.float64)
    beside = hw.effect_map(q, k, v, grad, mask=hw.mask.window(0), sinks=sinks)
    out = hw.attention(q, k, v, mask=hw.mask.window(0), sinks=sinks)
    torch.testing.assert_close(beside.to_tensor(), torch.diag_embed(-(grad * out).sum(-1)))


@pytest.mark.parametrize("above", [1.0, 20.0, 35.0, 60.0, 1000.0])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_a_weight_near_one_is_as_exact_as_any(
    above: float, dtype: torch.dtype, near: float
) -> None:
    """The plain formula has no digits left once 1 - p falls below the dtype's precision."""
    numbers = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, 1, 6, 4, generator=numbers, dtype=torch.float64).to(dtype) for _ in range(4)
    )
    bias = torch.zeros(6, 6, dtype=dtype)
    bias[:, 2] = above
    found = hw.effect_map(q, k, v, grad, bias=bias).to_tensor()
    call = replace(Recipe(lengths="square").call(), softcap=None)  # only the shape of the oracle
    assert call.softcap is None
    s = (q.double() @ k.double().mT / 2 + bias.double())[0, 0]
    products = (grad.double() @ v.double().mT)[0, 0]
    out = (s.softmax(-1) * products).sum(-1)
    for j in range(6):
        left = s.clone()
        left[:, j] = -torch.inf
        expected = (left.softmax(-1) * products).sum(-1) - out
        torch.testing.assert_close(
            found[0, 0, :, j].double(),
            expected,
            rtol=near,
            atol=near * products.abs().amax().item(),
        )


@given(recipes(longest=16, dropout="none", dtype="float64", logits="usual"), st.data())
def test_maps_of_chunks_of_keys_are_parts_of_the_whole_map(
    recipe: Recipe, data: st.DataObject
) -> None:
    call = recipe.call()
    if recipe.mask != "none" or recipe.bias not in ("none",):  # they speak of the call's own keys
        call = replace(call, rule=replace(call.rule, mask=None, sees=lambda *pair: True))
        call = replace(call, bias="none", table=None)
    grad = gradient(call)
    whole = map_of(call, grad)
    out, seen = call.observe("auto", stats=("lse",))
    at = data.draw(st.integers(0, call.sizes.keys))
    parts = []
    for keys in (slice(0, at), slice(at, None)):
        here = call.k[:, :, keys], call.v[:, :, keys]
        if here[0].shape[2]:
            part = hw.effect_map(call.q, *here, grad, out, seen.lse, **call.options())
            parts.append(part.to_tensor())
    torch.testing.assert_close(torch.cat(parts, -1), whole.to_tensor(), rtol=1e-7, atol=1e-7)


def test_out_and_lse_of_the_call_change_nothing() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8).unbind()
    out, seen = hw.observe(q, k, v, mask=hw.mask.causal(), stats=("lse",))
    plain = hw.effect_map(q, k, v, grad, mask=hw.mask.causal()).to_tensor()
    for known in ({"out": out}, {"lse": seen.lse}, {"out": out, "lse": seen.lse}):
        found = hw.effect_map(q, k, v, grad, mask=hw.mask.causal(), **known).to_tensor()
        torch.testing.assert_close(found, plain)
    with pytest.raises(ValueError, match="lse is not that of these keys; give out"):
        hw.effect_map(q, k[:, :, :6], v[:, :, :6], grad, lse=seen.lse).to_tensor()


def test_effects_are_the_derivative_by_a_factor_on_the_edge_where_weights_are_small() -> None:
    """For p near 0, removing an edge is -1 times the derivative by the log of its factor."""
    q, k, v = torch.randn(3, 1, 1, 400, 8, dtype=torch.float64).unbind()
    factor = torch.zeros(400, 400, dtype=torch.float64, requires_grad=True)
    out = hw.attention(q, k, v, bias=factor, engine="reference")
    grad = torch.randn_like(out)
    out.backward(grad)
    assert factor.grad is not None
    found = hw.effect_map(q, k, v, grad)[0, 0]
    few = hw.attention_map(q, k)[0, 0] < 1e-4
    torch.testing.assert_close(found[few], -factor.grad[few], rtol=2e-4, atol=1e-12)


def test_keys_that_no_row_sees_may_hold_anything() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8).unbind()
    clean = hw.effect_map(q, k, v, grad, mask=hw.mask.lengths(5)).to_tensor()
    k[:, :, 5:], v[:, :, 5:] = torch.nan, torch.inf
    assert torch.equal(hw.effect_map(q, k, v, grad, mask=hw.mask.lengths(5)).to_tensor(), clean)


def test_the_weights_of_the_same_edges_are_at_hand() -> None:
    q, k, v, grad = torch.randn(4, 1, 2, 12, 8).unbind()
    emap = hw.effect_map(q, k, v, grad, mask=hw.mask.causal())
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    torch.testing.assert_close(emap.weights().to_tensor(), amap.to_tensor())
    torch.testing.assert_close(emap.lse, amap.lse)


def test_without_a_batch_the_map_has_a_batch_of_one() -> None:
    q, k, v, grad = torch.randn(4, 2, 12, 8).unbind()
    found = hw.effect_map(q, k, v, grad)
    assert found.shape == (1, 2, 12, 12)
    batched = hw.effect_map(q[None], k[None], v[None], grad[None])
    assert torch.equal(found.to_tensor(), batched.to_tensor())


WRONG = {
    "grad": ({"grad": torch.zeros(1, 2, 5, 3)}, r"grad is float32 \(1, 2, 5, 3\); give 4 numbers"),
    "out": ({"out": torch.zeros(1, 2, 5)}, r"out is float32 \(1, 2, 5\); give 4 numbers per query"),
    "lse": (
        {"lse": torch.zeros(1, 2, 4)},
        r"lse is float32 \(1, 2, 4\); give one number per query",
    ),
    "none": ({"grad": None}, r"grad is NoneType None; give 4 numbers per query row"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_row_tensors_are_refused_in_words(case: str) -> None:
    given, said = WRONG[case]
    x = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=said):
        hw.effect_map(x, x, x, **({"grad": x} | given))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda m: m.pool(4, how="mean"), "how must be 'sum' or 'max'"),
        (lambda m: m.tile(0, 0, 0, how="mean"), "how must be 'sum' or 'max'"),
        (lambda m: m.top(0), "k must be an integer, at least 1"),
        (lambda m: m.largest(0), "count must be an integer, at least 1"),
        (lambda m: m.span(3, 2), "it needs 0 <= first <= last <= 5"),
    ],
)
def test_wrong_questions_are_answered_in_words(
    ask: Callable[[hw.EffectMap], object], said: str
) -> None:
    x = torch.zeros(1, 1, 5, 4)
    with pytest.raises(ValueError, match=said):
        ask(hw.effect_map(x, x, x, x))


def test_a_map_whose_gradient_was_written_over_says_so() -> None:
    q, k, v, grad = (torch.randn(1, 2, 12, 8) for _ in range(4))
    emap = hw.effect_map(q, k, v, grad)
    grad.mul_(2)
    with pytest.raises(ValueError, match=r"grad, or .* written to"):
        emap.pool(4)
