"""Attention over the keys that a policy keeps, against brute force over generated calls."""

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
from tests.oracle import answer
from tests.problems import Call, Recipe, recipes, small_blocks
from tests.sparsity import attend, kept, policies

problems = recipes(longest=16, dropout="none", dtype="float64", logits=("usual", "tiny"))
blocks = st.sampled_from((nullcontext, small_blocks))


def of(call: Call, policy: hw.sparse.Policy) -> Tensor:
    return hw.sparse.attention(call.q, call.k, call.v, policy, **call.options())


@given(problems, blocks, st.integers(0, 6))
def test_the_output_and_its_gradients_are_those_of_the_kept_keys(
    recipe: Recipe, blocks: Callable, number: int
) -> None:
    call = recipe.call().copy(torch.float64)
    some = policies(call, random.Random(recipe.seed))
    policy = some[number % len(some)]
    found = answer(call)
    wanted = attend(call, found, kept(call, found, policy))
    with blocks():
        out = of(call, policy)
        torch.testing.assert_close(out, wanted, rtol=1e-9, atol=1e-9, msg=f"{policy} {recipe}")
        weight = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        leaves = call.learnable()
        grads = torch.autograd.grad((out * weight).sum(), leaves.values(), allow_unused=True)
    truth = torch.autograd.grad((wanted * weight).sum(), leaves.values(), allow_unused=True)
    for name, grad, right in zip(leaves, grads, truth, strict=True):
        right = torch.zeros_like(leaves[name]) if right is None else right
        grad = torch.zeros_like(right) if grad is None else grad
        torch.testing.assert_close(
            grad, right, rtol=1e-7, atol=1e-8, msg=f"{name}: {policy} {recipe}"
        )


@pytest.mark.parametrize("k", [1, 3, 8])
def test_of_equal_logits_the_earliest_keys_are_kept(k: int) -> None:
    v = torch.eye(12)[None, None]
    q, keys = torch.zeros(1, 1, 12, 4), torch.zeros(1, 1, 12, 4)
    for blocks in (nullcontext, small_blocks):
        with blocks():
            out = hw.sparse.attention(q, keys, v, hw.sparse.TopK(k), mask=hw.mask.causal())
        rows = torch.arange(12)[:, None]
        wanted = (torch.arange(12) < (rows + 1).clamp_max(k)) / (rows + 1).clamp_max(k)
        torch.testing.assert_close(out[0, 0], wanted)


def test_integer_logits_have_ties_across_blocks() -> None:
    numbers = torch.Generator().manual_seed(0)
    q = torch.randint(-1, 2, (1, 2, 40, 4), generator=numbers).float()
    k = torch.randint(-1, 2, (1, 2, 40, 4), generator=numbers).float()
    v = torch.randn(1, 2, 40, 8, generator=numbers)
    s = (q @ k.mT / 2).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    order = s.sort(dim=-1, descending=True, stable=True).indices
    for count in (1, 5, 17):
        some = torch.zeros_like(s, dtype=torch.bool).scatter_(-1, order[..., :count], True)
        wanted = s.masked_fill(~some, -torch.inf).softmax(-1) @ v
        for blocks in (nullcontext, small_blocks):
            with blocks():
                out = hw.sparse.attention(q, k, v, hw.sparse.TopK(count), mask=hw.mask.causal())
            torch.testing.assert_close(out, wanted)


def test_a_budget_for_everything_is_attention() -> None:
    q, k, v = torch.randn(3, 2, 4, 30, 8).unbind(0)
    whole = hw.attention(q, k, v, mask=hw.mask.causal())
    for policy in (
        hw.sparse.TopK(30), hw.sparse.TopK(500), hw.sparse.Window(30), hw.sparse.Blocks(7, 5),
        hw.sparse.Blocks(64, 1, by="exact"), hw.sparse.Evicted(torch.rand(1, 1, 30), 30),
        hw.sparse.Indices(torch.arange(30).expand(1, 1, 30, 30)),
    ):  # fmt: skip
        out = hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())
        torch.testing.assert_close(out, whole)


def test_decoding_steps_are_rows_of_the_whole() -> None:
    q, k, v = torch.randn(3, 1, 4, 20, 8, dtype=torch.float64).unbind(0)
    mask = hw.mask.causal()
    for policy in (
        hw.sparse.TopK(3), hw.sparse.Window(4, sinks=2), hw.sparse.Blocks(4, 2, by="max"),
        hw.sparse.Evicted(torch.rand(1, 4, 12), 5),
    ):  # fmt: skip
        whole = hw.sparse.attention(q, k, v, policy, mask=mask)
        for n in (12, 15, 20):
            step = hw.sparse.attention(
                q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], policy, mask=mask
            )
            if (
                not isinstance(policy, hw.sparse.Blocks) or n % 4 == 0
            ):  # else a block has later keys
                torch.testing.assert_close(step, whole[:, :, n - 1 : n])


def test_a_compiled_call_is_the_same_and_learns_the_same() -> None:
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 1, 2, 20, 8).unbind(0))
    for policy in (
        hw.sparse.TopK((3, 5)), hw.sparse.Window(4, 2), hw.sparse.Blocks(4, 2),
        hw.sparse.Evicted(torch.rand(1, 2, 20), 5),
        hw.sparse.Indices(torch.randint(0, 20, (1, 1, 20, 6))),
    ):  # fmt: skip

        def run(policy: hw.sparse.Policy = policy) -> Tensor:
            return hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())

        compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(), run())
        pair = [torch.autograd.grad(f().square().sum(), (q, k, v)) for f in (compiled, run)]
        torch.testing.assert_close(*pair)


def test_a_row_of_nan_stays_a_row() -> None:
    q, k, v = torch.randn(3, 1, 1, 6, 4).unbind(0)
    q[0, 0, 2] = torch.nan
    for policy in (hw.sparse.TopK(2), hw.sparse.Blocks(2, 1), hw.sparse.Blocks(2, 1, by="exact")):
        out = hw.sparse.attention(q, k, v, policy)
        assert out[0, 0, 2].isnan().all()
        assert out[0, 0, [0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: hw.sparse.TopK(0), r"hw\.sparse\.TopK\(k\) takes a positive integer.*not 0"),
        (lambda: hw.sparse.TopK(2.5), "takes a positive integer, or one per head, not 2.5"),
        (lambda: hw.sparse.TopK(torch.tensor([1.0])), "takes a positive integer"),
        (lambda: hw.sparse.TopK([3, 0]), "takes a positive integer"),
        (lambda: hw.sparse.Window(-1), r"left=-1\) must be an integer, 0 or more"),
        (lambda: hw.sparse.Window(4, sinks=True), "sinks=True"),
        (lambda: hw.sparse.Blocks(0, 1), r"size=0\) must be a positive integer"),
        (lambda: hw.sparse.Blocks(4, 1, by="min"), "by='min'.*must be one of"),
        (lambda: hw.sparse.Indices(torch.zeros(1, 1, 3, 2)), "takes an integer tensor"),
        (lambda: hw.sparse.Indices(torch.zeros(3, 2, dtype=torch.int64)), r"not torch\.int64"),
        (lambda: hw.sparse.Evicted(torch.zeros(1, 3), 2), "takes scores"),
        (lambda: hw.sparse.Evicted(torch.zeros(1, 1, 3), 0), r"Evicted\(budget\) takes a positive"),
    ],
)
def test_a_policy_that_can_not_be_is_refused_in_words(make: Callable, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (4, "a policy is one of hw.sparse.TopK"),
        (hw.sparse.TopK((1, 2, 3)), "has 3 numbers, and this call 2 heads"),
        (hw.sparse.Blocks(4, (1, 2, 3)), "has 3 numbers, and this call 2 heads"),
        (hw.sparse.Indices(torch.zeros(1, 1, 7, 2, dtype=torch.int64)), "this call needs"),
        (hw.sparse.Evicted(torch.zeros(1, 3, 5), 2), "has scores"),
        (hw.sparse.Evicted(torch.zeros(1, 1, 9), 2), "at most 5 keys"),
        (hw.sparse.Evicted(torch.zeros(1, 2, 5), (1, 2, 3)), "has 3 numbers"),
    ],
)
def test_a_policy_of_another_call_is_refused_with_the_call(policy: object, said: str) -> None:
    q = torch.zeros(1, 2, 5, 4)
    with pytest.raises(ValueError, match=rf"(?s){said}.*\n  in hw\.sparse\.attention\(q float32"):
        hw.sparse.attention(q, q, q, policy)


def test_estimates_of_additive_scores_are_refused() -> None:
    q, score = torch.zeros(1, 2, 5, 4), hw.Additive(torch.ones(4))
    with pytest.raises(ValueError, match="use by='exact'"):
        hw.sparse.attention(q, q, q, hw.sparse.Blocks(2, 1), score=score)
    hw.sparse.attention(q, q, q, hw.sparse.Blocks(2, 1, by="exact"), score=score)


def test_a_second_derivative_is_refused() -> None:
    q = torch.randn(1, 1, 5, 4, requires_grad=True)
    out = hw.sparse.attention(q, q, q, hw.sparse.TopK(2)).sum()
    (grad,) = torch.autograd.grad(out, q, create_graph=True)
    with pytest.raises(NotImplementedError, match="sparse engine has no second derivative"):
        torch.autograd.grad(grad.sum(), q)
