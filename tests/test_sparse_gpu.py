"""Sparse attention, coverage and the indexer's loss on a GPU, beside the dense way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw

pytestmark = pytest.mark.gpu
CAUSAL = hw.mask.causal()


def heads(n: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q = 2 * torch.randn(1, 8, n, 64, device="cuda", dtype=dtype)
    k, v = torch.randn(2, 1, 2, n, 64, device="cuda", dtype=dtype).unbind(0)
    return q, k, v


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Every weight of causal attention in float64."""
    n = q.shape[2]
    s = q.double() @ k.double().repeat_interleave(4, 1).mT / 8
    return s.masked_fill(torch.ones(n, n, device="cuda").triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_coverage_is_that_of_the_written_out_weights(dtype: torch.dtype) -> None:
    q, k, _ = heads(2000, dtype)
    amap = hw.attention_map(q, k, mask=CAUSAL)
    best = weights(q, k).sort(dim=-1, descending=True).values.cumsum(-1)
    kept = amap.kept((1, 64, 1500))
    wanted = best[..., [0, 63, 1499]]
    torch.testing.assert_close(kept.double(), wanted, rtol=2e-4, atol=2e-5)
    needed = amap.needed(0.95)
    exact = (best < 0.95).sum(-1) + 1
    assert ((needed - exact).abs() <= 1 + exact // 200).all()
    for policy in (hw.sparse.Window(100, sinks=4), hw.sparse.Blocks(64, 4), hw.sparse.TopK(9)):
        mass = amap.kept(policy)
        assert (mass <= 1 + 1e-5).all()
        count = amap.recall(policy).keys.clamp_min(1)
        most = best.gather(-1, count[..., None] - 1)[..., 0]
        assert (mass <= most + 1e-4).all()


def test_sparse_attention_is_that_of_the_kept_keys() -> None:
    q, k, v = heads(1000, torch.float32)
    s = (q.double() @ k.double().repeat_interleave(4, 1).mT / 8).masked_fill(
        torch.ones(1000, 1000, device="cuda").triu(1).bool(), -torch.inf
    )
    least = s.sort(dim=-1, descending=True).values[..., 31:32]
    p = s.masked_fill(s < least, -torch.inf).softmax(-1)
    wanted = p @ v.double().repeat_interleave(4, 1)
    out = hw.sparse.attention(q, k, v, hw.sparse.TopK(32), mask=CAUSAL)
    near = (s - least).abs().masked_fill(s == least, 1).amin(-1) < 1e-4
    torch.testing.assert_close(out.double()[~near], wanted[~near], rtol=1e-3, atol=1e-4)


def test_the_indexers_loss_is_the_dense_formula() -> None:
    q, k, _ = heads(1000)
    index = [
        torch.randn(1, 4, 1000, 32, device="cuda", requires_grad=True),
        torch.randn(1, 1000, 32, device="cuda", requires_grad=True),
        torch.rand(1, 4, 1000, device="cuda", requires_grad=True),
    ]
    loss = hw.index_loss(q, k, *index, mask=CAUSAL)
    target = weights(q, k).mean(1)
    a, b, w = (x.double() for x in index)
    scores = torch.einsum("bhn,bhnm->bnm", w, (a @ b[:, None].mT).relu())
    hidden = torch.ones(1000, 1000, device="cuda").triu(1).bool()
    log_q = scores.masked_fill(hidden, -torch.inf).log_softmax(-1).masked_fill(hidden, 0)
    wanted = (torch.xlogy(target, target) - target * log_q).sum(-1).mean()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-3, atol=1e-4)
    for found, right in zip(
        torch.autograd.grad(loss, index), torch.autograd.grad(wanted, index), strict=True
    ):
        torch.testing.assert_close(found.double(), right.double(), rtol=1e-2, atol=1e-5)


def chosen(n: int) -> list[hw.sparse.Policy]:
    numbers = torch.randint(-1, n, (1, 1, n, 40), device="cuda")
    return [
        hw.sparse.Blocks(64, 3),
        hw.sparse.Blocks(24, (1, 2, 3, 4, 5, 6, 7, 8), by="max"),
        hw.sparse.Blocks(32, 4, by="exact"),
        hw.sparse.Indices(numbers),
        hw.sparse.Indices(numbers.expand(1, 8, n, 40)[..., :9]),
        hw.sparse.Evicted(torch.rand(1, 2, n - 50, device="cuda"), 100),
    ]


@pytest.mark.parametrize("words", [1 << 26, 1 << 16])  # all rows at once, and in parts
@pytest.mark.parametrize("number", range(6))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernels_of_chosen_keys_agree_with_the_loops(
    number: int, words: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.engines import failures, sparse_call
    from headwise.engines.triton.host import marked_rows

    monkeypatch.setattr(marked_rows, "WORDS", words)
    q, k, v = (x.requires_grad_() for x in heads(1000, dtype))
    policy = chosen(1000)[number]
    weight = torch.randn_like(q)
    amap = hw.attention_map(q.detach(), k.detach(), mask=CAUSAL)

    def run() -> list[Tensor]:
        out = hw.sparse.attention(q, k, v, policy, mask=CAUSAL)
        grads = torch.autograd.grad((out * weight).sum(), (q, k, v))
        return [amap.kept(policy), *amap.recall(policy), out, *grads]

    fused = run()
    assert not failures.failed()
    monkeypatch.setattr(sparse_call, "fused", lambda *given: None)
    near = 2e-2 if dtype == torch.bfloat16 else 2e-3
    for mine, loops in zip(fused, run(), strict=True):
        mine, loops = mine.double(), loops.double()
        size = loops.abs().amax().clamp_min(1e-6)
        # of two keys or blocks that rank alike, either may be chosen
        assert ((mine - loops).abs() > near * size).double().mean() < 2e-3


@pytest.mark.parametrize("words", [1 << 26, 1 << 14])
def test_the_indexers_loss_over_selected_keys_agrees_with_the_loops(
    words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwise.engines import failures, index_call
    from headwise.engines.triton.host import marked_rows

    monkeypatch.setattr(marked_rows, "WORDS", words)
    q, k, _ = heads(1000)
    index = [
        torch.randn(1, 4, 1000, 32, device="cuda", requires_grad=True),
        torch.randn(1, 1000, 32, device="cuda", requires_grad=True),
        torch.rand(1, 4, 1000, device="cuda", requires_grad=True),
    ]
    some = torch.randint(-1, 1000, (1, 1000, 50), device="cuda")

    def run() -> list[Tensor]:
        loss = hw.index_loss(q, k, *index, mask=CAUSAL, selected=some)
        return [loss, *torch.autograd.grad(loss, index)]

    fused = run()
    assert not failures.failed()
    monkeypatch.setattr(index_call, "fused", lambda *given: None)
    for mine, loops in zip(fused, run(), strict=True):
        torch.testing.assert_close(mine, loops, rtol=1e-2, atol=1e-5)


def test_memory_is_linear_in_the_length() -> None:
    def peak(n: int) -> float:
        q, k, v = heads(n)
        index = [
            torch.randn(1, 4, n, 32, device="cuda", requires_grad=True),
            torch.randn(1, n, 32, device="cuda", requires_grad=True),
            torch.rand(1, 4, n, device="cuda", requires_grad=True),
        ]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        amap = hw.attention_map(q, k, mask=CAUSAL)
        amap.kept((64, 2048)), amap.needed(0.95), amap.kept(hw.sparse.Blocks(64, 16))
        hw.sparse.attention(q, k, v, hw.sparse.TopK(64), mask=CAUSAL)
        hw.index_loss(q, k, *index, mask=CAUSAL).backward()
        some = torch.randint(0, n, (1, n, 64), device="cuda")
        hw.index_loss(q, k, *index, mask=CAUSAL, selected=some).backward()
        amap.recall(hw.sparse.Indices(some[:, None]))
        return (torch.cuda.max_memory_allocated() - before) / 2**20

    peak(2048)
    assert peak(32768) < 3 * peak(16384) + 64
    assert peak(32768) < 4096  # the weights of one head alone are 4 GiB in float32
