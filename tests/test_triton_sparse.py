"""The largest keys of each row by Triton's kernels, on its interpreter here."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.policies import Policy
from headwise.engines import failures, index_call, sparse_call
from headwise.engines.failures import KernelError
from headwise.maps import backends, blockwise, coverage
from tests.oracle import answer
from tests.problems import Call, Recipe
from tests.sparsity import attend, kept
from tests.test_index_loss import dense, indexer
from tests.thinned import thinned

pytest.importorskip("triton", reason="the kernels are written in Triton")
marked_rows = importlib.import_module("headwise.engines.triton.host.marked_rows")
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
    compare_gradients(out, wanted, there, wide)


def compare_gradients(out: Tensor, wanted: Tensor, there: Call, wide: Call) -> None:
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


KEPT: dict[str, Callable[[Call], Policy]] = {
    "mean": lambda call: hw.sparse.Blocks(3, 2),
    "max": lambda call: hw.sparse.Blocks(4, tuple(1 + h for h in range(call.sizes.heads)), "max"),
    "exact": lambda call: hw.sparse.Blocks(5, 2, "exact"),
    "indices": lambda call: hw.sparse.Indices(
        torch.randint(-2, call.sizes.keys + 2, (1, 1, call.sizes.queries, 5))
    ),
    "indices of heads": lambda call: hw.sparse.Indices(
        torch.randint(0, call.sizes.keys, (*call.q.shape[:3], 4))
    ),
    "evicted": lambda call: hw.sparse.Evicted(
        torch.rand(1, call.sizes.key_heads, call.sizes.keys), 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", thinned(KEPT))
@pytest.mark.parametrize("recipe", some)
def test_chosen_keys_are_attended_to_and_weighed(
    kind: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_call, "select", None)  # no loop of PyTorch's
    monkeypatch.setattr(coverage, "select", None)
    if recipe.seed % 2:  # several parts of the rows
        monkeypatch.setattr(marked_rows, "WORDS", 1)
        monkeypatch.setattr(marked_rows, "ROWS", 8)
    call = replace(recipe, dtype="float32", longest=24).call()
    wide, policy = call.copy(torch.float64), KEPT[kind](call)
    found = answer(wide)
    mine = kept(wide, found, policy)
    wanted = attend(wide, found, mine)
    there = call.copy(device=DEVICE)
    out = hw.sparse.attention(there.q, there.k, there.v, policy, **there.options())
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    compare_gradients(out, wanted, there, wide)
    amap = hw.attention_map(there.q.detach(), there.k.detach(), **there.options())
    recall = amap.recall(policy)
    mass, count = (found.p * mine).sum(-1), mine.sum(-1)
    torch.testing.assert_close(amap.kept(policy).cpu().double(), mass, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(recall.mass.cpu().double(), mass, rtol=1e-4, atol=1e-5)
    assert torch.equal(recall.keys.cpu(), count)
    best = found.p.sort(dim=-1, descending=True).values
    rank = torch.arange(best.shape[-1]) < count[..., None]
    most = (best * rank).sum(-1)
    torch.testing.assert_close(recall.best.cpu().double(), most, rtol=1e-4, atol=1e-5)
    largest = found.s.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    among = (mine & (largest < count[..., None])).sum(-1)
    assert torch.equal(recall.found.cpu(), among)


@pytest.mark.parametrize("most", [1 << 14, 8], ids=["on chip", "sorted"])
def test_of_equal_scores_the_first_runs_are_chosen(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marked_rows, "MOST_RUNS", most)
    scores = torch.randint(-2, 3, (2, 3, 7, 40), device=DEVICE).float()
    scores[0, 0, 0], scores[0, 0, 1, 3], scores[1, 2, 3, 1::2] = -torch.inf, torch.nan, -torch.inf
    scores[0, 1, 2, ::3] = -0.0
    for counts in ([4], [1, 40, 9]):
        found = marked_rows.best_of(scores, torch.tensor(counts, device=DEVICE), max(counts))
        order = scores.sort(dim=-1, descending=True, stable=True).indices[..., : max(counts)]
        per_head = torch.tensor(counts, device=DEVICE).reshape(1, -1, 1, 1)
        late = torch.arange(max(counts), device=DEVICE) >= per_head
        none = late | (scores.gather(-1, order) == -torch.inf)
        wanted = order.masked_fill(none, -1)
        assert torch.equal(found.sort().values.long(), wanted.sort().values)


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
@pytest.mark.parametrize("chosen", ["all", "selected", "parts"])
def test_an_indexers_loss_is_that_of_the_dense_formula(
    recipe: Recipe, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_call, "IndexLoop", None)  # no loop of PyTorch's
    monkeypatch.setattr(marked_rows, "WORDS", 1 if chosen == "parts" else 1 << 20)
    monkeypatch.setattr(marked_rows, "ROWS", 8)
    call = replace(recipe, dtype="float32", longest=40).call()
    wide = call.copy(torch.float64, learn=False)
    index = indexer(wide)
    shape = (recipe.seed % 2 or call.sizes.batch, call.sizes.queries, 6)
    some_keys = torch.randint(-1, call.sizes.keys + 1, shape)
    selected = None if chosen == "all" else some_keys
    wanted = dense(wide, index, selected)
    there = call.copy(device=DEVICE, learn=False)
    selected = None if selected is None else selected.to(DEVICE)
    mine = [x.detach().float().to(DEVICE).requires_grad_() for x in index]
    loss = hw.index_loss(there.q, there.k, *mine, selected=selected, **there.options())
    torch.testing.assert_close(loss.cpu().double(), wanted, rtol=1e-4, atol=1e-5)
    truth = torch.autograd.grad(wanted, index)
    for grad, right in zip(torch.autograd.grad(loss, mine), truth, strict=True):
        torch.testing.assert_close(grad.cpu().double(), right, rtol=1e-3, atol=1e-5)


def test_a_kernel_that_fails_leaves_the_loops_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from headwise.engines.triton import kept_call

    def broken(*given: object) -> None:
        raise KernelError("no compiler")

    q, k, v = torch.randn(3, 1, 2, 30, 16, device=DEVICE).unbind(0)
    policy = hw.sparse.TopK(4)
    fused = hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())
    monkeypatch.setattr(kept_call, "attend", broken)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        plain = hw.sparse.attention(q, k, v, policy, mask=hw.mask.causal())
    torch.testing.assert_close(plain, fused, rtol=1e-4, atol=1e-5)
    assert failures.failed()
    failures.forget()
