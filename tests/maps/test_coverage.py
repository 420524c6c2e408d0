"""The weight that some keys hold, the keys that a share needs, and recall, against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.maps import coverage
from tests.oracle import answer
from tests.problems import Call, Recipe, recipes, small_blocks
from tests.sparsity import kept, policies

problems = recipes(longest=16, dropout="none", dtype="float64", logits=("usual", "tiny"))
blocks = st.sampled_from((nullcontext, small_blocks))


def map_of(call: Call) -> hw.AttentionMap:
    return hw.attention_map(call.q, call.k, call.v, **call.options())


def same(found: Tensor, wanted: Tensor, said: object) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9, msg=lambda m: f"{m} {said}")


@given(problems, blocks, st.lists(st.integers(1, 30), min_size=1, max_size=3))
def test_kept_is_the_sum_of_a_rows_largest_weights(
    recipe: Recipe, blocks: Callable, counts: list[int]
) -> None:
    call = recipe.call()
    best = answer(call).p.sort(dim=-1, descending=True).values
    wanted = torch.stack([best[..., :count].sum(-1) for count in counts], -1)
    with blocks():
        amap = map_of(call)
        same(amap.kept(counts), wanted, recipe)
        same(amap.kept(counts[0]), wanted[..., 0], recipe)
        same(amap.kept(hw.sparse.TopK(counts[0])), wanted[..., 0], recipe)


@given(problems, blocks, st.integers(0, 6))
def test_kept_by_a_policy_and_recall_are_sums_over_its_keys(
    recipe: Recipe, blocks: Callable, number: int
) -> None:
    call = recipe.call()
    found, some = answer(call), policies(call, random.Random(recipe.seed))
    policy = some[number % len(some)]
    mine = kept(call, found, policy)
    mass, count = (found.p * mine).sum(-1), mine.sum(-1)
    order = found.s.sort(dim=-1, descending=True, stable=True).indices
    rank = torch.zeros_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1]).expand_as(order)
    )
    largest = rank < count[..., None]
    with blocks():
        amap = map_of(call)
        same(amap.kept(policy), mass, (policy, recipe))
        recall = amap.recall(policy)
    assert torch.equal(recall.keys, count), (policy, recipe)
    assert torch.equal(recall.found, (mine & largest).sum(-1)), (policy, recipe)
    same(recall.mass, mass, (policy, recipe))
    same(recall.best, (found.p * largest).sum(-1), (policy, recipe))
    assert (recall.of_mass <= 1 + 1e-9).all()
    assert (recall.of_keys <= 1).all()


@given(problems, blocks, st.sampled_from((0.1, 0.5, 0.9, 0.95, 1.0)))
def test_needed_is_the_fewest_keys_that_hold_the_share(
    recipe: Recipe, blocks: Callable, share: float
) -> None:
    call = recipe.call()
    best = answer(call).p.sort(dim=-1, descending=True).values
    total = best.sum(-1)
    with blocks():
        found = map_of(call).needed(share)
    assert found.dtype == torch.int64
    held = torch.cat((torch.zeros_like(total)[..., None], best.cumsum(-1)), -1)
    target = share * total
    assert (held.gather(-1, found[..., None])[..., 0] >= target * (1 - 1e-9)).all(), recipe
    fewer = held.gather(-1, (found - 1).clamp_min(0)[..., None])[..., 0]
    assert ((fewer < target * (1 + 1e-9)) | (total == 0)).all(), recipe
    assert not found[total == 0].any()


def test_a_row_that_needs_many_keys_is_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "FIRST", 2)
    q = torch.zeros(1, 1, 50, 4)
    needed = hw.attention_map(q, q, mask=hw.mask.causal()).needed(0.9)
    assert needed[0, 0, [0, 9, 19, 49]].tolist() == [1, 9, 18, 45]


def test_budgets_per_head_are_those_of_each_head() -> None:
    q, k = torch.randn(2, 2, 4, 20, 8).unbind(0)
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    found = amap.kept(hw.sparse.TopK((1, 2, 5, 30)))
    each = torch.stack([amap.kept(k)[:, h] for h, k in enumerate((1, 2, 5, 30))], 1)
    torch.testing.assert_close(found, each)


def test_a_weighted_map_keeps_weights_times_lengths_of_values() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64).unbind(0)
    amap = hw.attention_map(q, k, v, mask=hw.mask.causal()).weighted()
    p, near = amap[:], torch.ones(20, 20, dtype=torch.bool).tril().triu(-3)
    torch.testing.assert_close(amap.kept(hw.sparse.Window(3)), (p * near).sum(-1))
    torch.testing.assert_close(amap.recall(hw.sparse.Window(3)).mass, (p * near).sum(-1))
    largest = p.sort(dim=-1, descending=True).values
    torch.testing.assert_close(amap.kept((1, 4))[..., 1], largest[..., :4].sum(-1))
    fewest = (largest.cumsum(-1) < 0.9 * p.sum(-1, keepdim=True)).sum(-1) + 1
    assert torch.equal(amap.needed(0.9), fewest)


def test_no_choice_of_blocks_keeps_more_than_the_exact_one() -> None:
    q, k = torch.randn(2, 1, 4, 64, 8).unbind(0)
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    exact, mean, most = (
        amap.kept(hw.sparse.Blocks(8, 3, by=by)) for by in ("exact", "mean", "max")
    )
    assert (exact >= mean - 1e-6).all()
    assert (exact >= most - 1e-6).all()
    assert (amap.kept(24) >= exact - 1e-6).all()


def test_float32_and_half_precision_agree_with_float64() -> None:
    q, k = torch.randn(2, 1, 4, 200, 16).unbind(0)
    wide = hw.attention_map(q.bfloat16().double(), k.bfloat16().double(), mask=hw.mask.causal())
    half = hw.attention_map(q.bfloat16(), k.bfloat16(), mask=hw.mask.causal())
    torch.testing.assert_close(
        half.kept((3, 40)).double(), wide.kept((3, 40)), rtol=1e-5, atol=1e-6
    )
    assert (half.needed(0.9) - wide.needed(0.9)).abs().max() <= 1


def test_a_map_of_nothing_keeps_nothing() -> None:
    q = torch.zeros(1, 2, 0, 4)
    assert hw.attention_map(q, torch.zeros(1, 2, 5, 4)).kept(3).shape == (1, 2, 0)
    blind = hw.attention_map(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4))
    assert not blind.kept((1, 2)).any()
    assert not blind.needed(0.5).any()
    for policy in (hw.sparse.Window(3), hw.sparse.Blocks(2, 1), hw.sparse.TopK(1)):
        assert not blind.kept(policy).any()


@pytest.mark.parametrize("given", [0, (), (3, 0), 1.5, "8", True])
def test_what_is_no_number_of_keys_is_refused(given: object) -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(
        ValueError, match=r"a number of keys.*\n  in <AttentionMap 1 × 1 × 4 × 4>.kept"
    ):
        hw.attention_map(q, q).kept(given)


@pytest.mark.parametrize("given", [0, 1.1, "0.5", True, float("nan")])
def test_what_is_no_share_is_refused(given: object) -> None:
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(
        ValueError, match=r"share must be .*\n  in <AttentionMap 1 × 1 × 4 × 4>.needed"
    ):
        hw.attention_map(q, q).needed(given)


def test_a_policy_of_another_call_is_refused_with_the_map() -> None:
    q = torch.zeros(1, 2, 4, 4)
    amap = hw.attention_map(q, q)
    for policy in (hw.sparse.TopK((1, 2, 3)), hw.sparse.Evicted(torch.zeros(1, 3, 4), 2)):
        with pytest.raises(ValueError, match=r"(?s)this call.*\n  in <AttentionMap 1 × 2 × 4 × 4>"):
            amap.kept(policy)
    with pytest.raises(ValueError, match="a policy is one of"):
        amap.recall(3)
