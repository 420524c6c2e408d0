"""The largest keys of each row by Triton's kernels, on its interpreter here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import headwise as hw
from headwise.core.policies import Policy
from headwise.engines import failures, index_call, sparse_call
from headwise.engines.failures import KernelError
from headwise.maps import backends, blockwise
from tests.oracle import answer
from tests.problems import Call, Recipe
from tests.sparsity import attend, kept
from tests.test_index_loss import dense, indexer

pytest.importorskip("triton", reason="the kernels are written in Triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

RECIPES = [
    Recipe(mask="causal", sinks="sinks", heads="grouped", seed=1),
    Recipe(mask="sinks and window", bias="alibi", lengths="more keys", seed=2),
    Recipe(mask="dense", softcap="cap", heads="one", seed=3),
    Recipe(mask="blind rows", bias="hiding", layout="strided", seed=4),
    Recipe(mask="documents", bias="buckets", heads="grouped", seed=5),
    Recipe(mask="causal", bias="tensor", lengths="one query", seed=6),
]


some = [
    pytest.param(recipe, id=str(recipe.seed), marks=pytest.mark.slow if recipe.seed > 1 else ())
    for recipe in RECIPES
]


@pytest.fixture(autouse=True)
def none_fails() -> Iterator[None]:
    """No kernel may be left to PyTorch without a word."""
    failures.forget()
    yield
    assert not failures.failed()
    failures.forget()


def with_ties(recipe: Recipe) -> Call:
    """A call whose logits are multiples of one number, so that many are equal."""
    call = replace(recipe, dtype="float32", longest=24).call()
    return replace(call, q=call.q.round(), k=call.k.round())


@pytest.mark.parametrize("recipe", some)
def test_the_largest_keys_are_attended_to(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_call, "select", None)  # no loop of PyTorch's
    call, wide = with_ties(recipe), with_ties(recipe).copy(torch.float64)
    policy = hw.sparse.TopK(tuple(1 + 3 * head for head in range(call.sizes.heads)))
    found = answer(wide)
    wanted = attend(wide, found, kept(wide, found, policy))
    there = call.copy(device=DEVICE)
    out = hw.sparse.attention(there.q, there.k, there.v, policy, **there.options())
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    leaves, exact = there.learnable(), wide.learnable()
    loss = (out * weight.to(DEVICE)).sum()
    grads = torch.autograd.grad(loss, leaves.values(), allow_unused=True)
    truth = torch.autograd.grad((wanted * weight).sum(), exact.values(), allow_unused=True)
    for name, grad, right in zip(leaves, grads, truth, strict=True):
        if right is None:
            assert grad is None or not grad.any(), name
        else:
            assert grad is not None
            torch.testing.assert_close(
                grad.cpu().double(), right, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("recipe", some)
def test_windows_and_evicted_keys_are_weighed_as_masks(recipe: Recipe) -> None:
    call, wide = with_ties(recipe), with_ties(recipe).copy(torch.float64)
    found = answer(wide)
    there = call.copy(device=DEVICE, learn=False)
    amap = hw.attention_map(there.q, there.k, **there.options())
    assert backends.backend_for(amap._region) is not blockwise
    scores = torch.rand(1, call.sizes.key_heads, call.sizes.keys)
    policies: list[Policy] = [hw.sparse.Window(2, sinks=3), hw.sparse.Window(4)]
    for policy in (*policies, hw.sparse.Evicted(scores, 3)):
        mass = (found.p * kept(wide, found, policy)).sum(-1)
        torch.testing.assert_close(
            amap.kept(policy).cpu().double(), mass, rtol=1e-4, atol=1e-5, msg=str(policy)
        )


@pytest.mark.parametrize("recipe", some)
def test_an_indexers_loss_is_that_of_the_dense_formula(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_call, "IndexLoop", None)  # no loop of PyTorch's
    call = replace(recipe, dtype="float32", longest=40).call()
    wide = call.copy(torch.float64, learn=False)
    index = indexer(wide)
    wanted = dense(wide, index)
    there = call.copy(device=DEVICE, learn=False)
    mine = [x.detach().float().to(DEVICE).requires_grad_() for x in index]
    loss = hw.index_loss(there.q, there.k, *mine, **there.options())
    torch.testing.assert_close(loss.cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    truth = torch.autograd.grad(wanted, index)
    for grad, right in zip(torch.autograd.grad(loss, mine), truth, strict=True):
        torch.testing.assert_close(grad.cpu().double(), right, rtol=1e-3, atol=1e-5)


def test_a_kernel_that_fails_leaves_the_loops_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwise.engines.triton import largest_call

    def broken(*given: object) -> None:
        raise KernelError("no compiler")

    q, k, v = torch.randn(3, 1, 2, 30, 16, device=DEVICE).unbind(0)
    policy = hw.sparse.TopK(4)
    fused = hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())
    monkeypatch.setattr(largest_call, "attend", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        plain = hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())
    torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)
    assert failures.failed()
    failures.forget()
