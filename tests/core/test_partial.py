"""Attention over parts of the keys merges to attention over all of them, however they were cut."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.engines.plan import choose_partial
from tests.oracle import answer
from tests.problems import Call, Recipe, recipes
from tests.rounding import Grads, bounds, close, gradient_bounds

Cuts = list[tuple[int, int]]

# In a square problem an unstated alignment means the same to attention and to its parts.
squares = recipes(longest=14, lengths="square")
exact_squares = recipes(longest=14, lengths="square", dtype="float64")


def part(call: Call, rows: tuple[int, int], keys: tuple[int, int]) -> hw.Partial:
    """These queries over these keys, with the masks and biases of the whole sequence."""
    (i0, i1), (j0, j1) = rows, keys
    q, k, v = call.q[:, :, i0:i1], call.k[:, :, j0:j1], call.v[:, :, j0:j1]
    return hw.partial(q, k, v, first_query=i0, first_key=j0, **call.options())


def cuts(length: int, data: st.DataObject) -> Cuts:
    """The positions up to length, in consecutive stretches, some of them empty."""
    inner = data.draw(st.lists(st.integers(0, length), max_size=4))
    edges = [0, *sorted(inner), length]
    return list(itertools.pairwise(edges))


def joined(parts: list[hw.Partial], dice: random.Random) -> hw.Partial:
    """Merge neighbours and strangers, in any order, until one is left."""
    parts = list(parts)
    while len(parts) > 1:
        a = parts.pop(dice.randrange(len(parts)))
        b = parts.pop(dice.randrange(len(parts)))
        parts.append(hw.merge(a, b))
    return parts[0]


def row_of_parts(call: Call, rows: tuple[int, int], data: st.DataObject) -> hw.Partial:
    pieces = [part(call, rows, keys) for keys in cuts(call.sizes.keys, data)]
    return joined(pieces, random.Random(data.draw(st.integers(0, 2**32 - 1))))


def rounded(call: Call) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The reference's answer in float64 and what rounding may add, merges included."""
    with torch.no_grad():
        wide = call.copy(torch.float64, learn=False)
        out, seen = wide.observe("reference")
        truth = {"out": out} | seen.values
        allowed = bounds(call, answer(call))
    # each of the few merges rounds once more, where one pass rounded once
    return truth, {name: 4 * bound for name, bound in allowed.items()}


@given(squares, st.data())
def test_keys_may_be_split_anywhere_and_merged_in_any_order(
    recipe: Recipe, data: st.DataObject
) -> None:
    call = recipe.call()
    whole = row_of_parts(call, (0, call.sizes.queries), data)
    truth, allowed = rounded(call)
    assert whole.finish().dtype == call.q.dtype
    weight = whole.weight()
    found = {
        "out": whole.finish(),
        "lse": whole.lse(),
        "entropy": whole.entropy(),
        "max_logit": whole.maximum,
        "logit_mean": whole.moments.mean,
        "logit_var": whole.moments.spread / whole.moments.keys.clamp_min(1),
        "distance": whole.sums["distance"] * weight,
    }
    for name, value in found.items():
        assert not close(value, truth[name], allowed[name]), f"{name} on {recipe}"
    with torch.no_grad():
        assert torch.equal(whole.moments.keys.long(), answer(call).seen.sum(-1))


@given(squares, st.data())
def test_queries_may_be_chunked_too(recipe: Recipe, data: st.DataObject) -> None:
    call = recipe.call()
    chunks = [rows for rows in cuts(call.sizes.queries, data) if rows[0] < rows[1]]
    parts = [row_of_parts(call, rows, data) for rows in chunks]
    truth, allowed = rounded(call)
    out = torch.cat([p.finish() for p in parts], 2)
    entropy = torch.cat([p.entropy() for p in parts], 2)
    assert not close(out, truth["out"], allowed["out"]), str(recipe)
    assert not close(entropy, truth["entropy"], allowed["entropy"]), str(recipe)


@given(exact_squares, st.data())
def test_gradients_flow_through_a_merge(recipe: Recipe, data: st.DataObject) -> None:
    call, twin = recipe.call().copy(), recipe.call().copy()
    whole = row_of_parts(call, (0, call.sizes.queries), data)
    grad = torch.randn_like(whole.finish())
    with torch.no_grad():
        exact = answer(call)
    blind = exact.lse == -torch.inf
    grad_lse = torch.randn_like(whole.total).masked_fill(blind, 0)
    grad_entropy = torch.randn_like(whole.total)
    out, seen = twin.observe("reference")
    for made, lse, entropy in (
        (whole.finish(), whole.lse(), whole.entropy()),
        (out, seen.lse, seen.entropy),
    ):
        loss = (made * grad).sum() + (entropy * grad_entropy).sum()
        (loss + (lse.masked_fill(blind, 0) * grad_lse).sum()).backward()
    allowed = gradient_bounds(call, exact, Grads(grad, grad_lse, grad_entropy))
    for name, x in call.learnable().items():
        found = torch.zeros_like(x) if x.grad is None else x.grad
        wanted = twin.learnable()[name].grad
        wanted = torch.zeros_like(x) if wanted is None else wanted
        assert not close(found, wanted, 8 * allowed[name]), f"{name} on {recipe}"


@given(exact_squares)
def test_merging_is_associative_and_commutative_to_rounding(recipe: Recipe) -> None:
    call = recipe.call()
    n, m = call.sizes.queries, call.sizes.keys
    a, b, c = (part(call, (0, n), keys) for keys in ((0, m // 3), (m // 3, m // 2), (m // 2, m)))
    _, allowed = rounded(call)
    left, right = hw.merge(hw.merge(a, b), c), hw.merge(a, hw.merge(b, c))
    turned = hw.merge(c, hw.merge(b, a))
    for other in (right, turned):
        assert not close(other.finish(), left.finish(), allowed["out"])
        assert not close(other.lse(), left.lse(), allowed["lse"])
        assert not close(other.entropy(), left.entropy(), allowed["entropy"])
        assert not close(other.moments.mean, left.moments.mean, allowed["logit_mean"])


def test_a_part_that_saw_nothing_changes_nothing() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64).unbind(0)
    some = hw.partial(q, k, v)
    nothing = hw.partial(q, k[:, :, :0], v[:, :, :0], first_key=5)
    unseen = hw.partial(q, k, v, first_key=5, mask=hw.mask.causal())
    for other in (nothing, unseen):
        for whole in (hw.merge(some, other), hw.merge(other, some)):
            assert torch.equal(whole.finish(), some.finish())
            assert torch.equal(whole.lse(), some.lse())
            assert torch.equal(whole.entropy(), some.entropy())
    both = hw.merge(nothing, unseen)
    assert (both.finish() == 0).all()
    assert (both.entropy() == 0).all()
    assert (both.lse() == -torch.inf).all()


def test_sinks_join_once_however_many_parts_name_them() -> None:
    q, k, v = torch.randn(3, 2, 2, 6, 8, dtype=torch.float64).unbind(0)
    sinks = torch.tensor([1.0, -2.0], dtype=torch.float64)
    truth = hw.attention(q, k, v, sinks=sinks, engine="reference")
    halves = [(k[:, :, :3], v[:, :, :3], 0), (k[:, :, 3:], v[:, :, 3:], 3)]
    named = [hw.partial(q, a, b, first_key=j, sinks=sinks) for a, b, j in halves]
    plain = [hw.partial(q, a, b, first_key=j) for a, b, j in halves]
    for a, b in ((named[0], named[1]), (named[0], plain[1]), (plain[0], named[1])):
        torch.testing.assert_close(hw.merge(a, b).finish(), truth)
    without = hw.attention(q, k, v, engine="reference")
    torch.testing.assert_close(hw.merge(*plain).finish(), without)


def test_parts_of_different_sinks_do_not_merge() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    one, other = (hw.partial(q, k, v, sinks=torch.full((2,), x)) for x in (0.0, 1.0))
    with pytest.raises(ValueError, match="different sinks; give the same sinks to every part"):
        hw.merge(one, other)


def test_any_number_of_parts_merge_at_once() -> None:
    q, k, v = torch.randn(3, 1, 2, 7, 8, dtype=torch.float64).unbind(0)
    parts = [hw.partial(q, k[:, :, j : j + 1], v[:, :, j : j + 1], first_key=j) for j in range(7)]
    torch.testing.assert_close(hw.merge(*parts).finish(), hw.attention(q, k, v))
    assert torch.equal(hw.merge(parts[0]).finish(), parts[0].finish())


@pytest.mark.parametrize("given", [(), (torch.zeros(1), torch.zeros(1)), (None,)])
def test_what_is_no_part_does_not_merge(given: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"hw\.merge\(.*\): give it parts made by hw\.partial"):
        hw.merge(*given)


def test_a_part_stands_where_it_is_placed() -> None:
    # One new query of a cache: query 7 of the sequence, over keys 4 to 7.
    q, k, v = torch.randn(3, 1, 2, 8, 16, dtype=torch.float64).unbind(0)
    bias = hw.ALiBi(2)
    options = {"mask": hw.mask.causal() & hw.mask.window(5), "bias": bias}
    whole = hw.attention(q, k, v, engine="reference", **options)
    new = q[:, :, 7:]
    late = hw.partial(new, k[:, :, 4:], v[:, :, 4:], first_query=7, first_key=4, **options)
    early = hw.partial(new, k[:, :, :4], v[:, :, :4], first_query=7, **options)
    torch.testing.assert_close(hw.merge(early, late).finish(), whole[:, :, 7:])


def test_unstated_alignment_means_equal_numbers_stand_together() -> None:
    q = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    k, v = torch.randn(2, 1, 1, 7, 8, dtype=torch.float64).unbind(0)
    found = hw.partial(q, k, v, mask=hw.mask.causal()).finish()
    wanted = hw.attention(q, k, v, mask=hw.mask.causal(0), engine="reference")
    torch.testing.assert_close(found, wanted)


def test_parts_drop_the_weights_that_the_whole_drops() -> None:
    q, k, v = torch.randn(3, 2, 2, 9, 8, dtype=torch.float64).unbind(0)
    dropout = hw.Dropout(0.4, seed=5)
    whole = hw.attention(q, k, v, dropout=dropout, engine="reference")
    parts = [
        hw.partial(q, k[:, :, j : j + 3], v[:, :, j : j + 3], first_key=j, dropout=dropout)
        for j in (0, 3, 6)
    ]
    torch.testing.assert_close(hw.merge(hw.merge(*parts[:2]), parts[2]).finish(), whole)


def test_large_logits_lose_nothing_in_a_merge() -> None:
    # One key far above the others: entropy from lse minus the mean logit would be off by hundreds.
    q = 60 * torch.randn(1, 1, 6, 16)
    k, v = 60 * torch.randn(1, 1, 40, 16), torch.randn(1, 1, 40, 16)
    parts = [
        hw.partial(q, k[:, :, j : j + 8], v[:, :, j : j + 8], first_key=j) for j in range(0, 40, 8)
    ]
    _, truth = hw.observe(q.double(), k.double(), v.double(), engine="reference")
    entropy = joined(parts, random.Random(0)).entropy()
    assert (entropy >= 0).all()
    # logits near 10 000 are off by up to 1e-2 in float32, and entropy is steep nowhere here
    torch.testing.assert_close(entropy.double(), truth.entropy, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parts_are_kept_in_float32(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).to(dtype).unbind(0)
    found = hw.partial(q, k, v)
    assert found.total.dtype == found.values.dtype == torch.float32
    assert found.finish().dtype == dtype


def test_a_part_can_be_copied_deeply() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    found = hw.partial(q, k, v)
    assert torch.equal(copy.deepcopy(found).finish(), found.finish())


def test_parts_of_different_rows_do_not_merge() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    with pytest.raises(ValueError, match=r"\(1, 2, 6, 8\).*\(1, 2, 1, 8\)"):
        hw.merge(hw.partial(q, k, v), hw.partial(q[:, :, :1], k, v))


@pytest.mark.gpu
def test_on_a_gpu_the_triton_engine_computes_the_parts() -> None:
    shapes = [(2, heads, 300, 64) for heads in (4, 2, 2)]
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes)
    options = {"mask": hw.mask.causal() & hw.mask.window(99), "sinks": torch.randn(4).cuda()}
    problem = pose("partial", q, k, v, Options(**options))
    assert choose_partial(problem).name == "triton"
    cut = ((0, 130), (130, 300))
    parts = [hw.partial(q, k[:, :, i:j], v[:, :, i:j], first_key=i, **options) for i, j in cut]
    out = hw.merge(*parts).finish()
    truth = hw.attention(q, k, v, engine="reference", **options)
    torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-3)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    for mine, exact in zip(
        found, torch.autograd.grad(truth.square().sum(), (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-2, atol=1e-2)
