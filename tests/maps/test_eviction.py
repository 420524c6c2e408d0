"""Scores for evicting keys against the formulas of H2O and SnapKV on written-out weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw


def weights(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """The matrix by plain eager attention, (B, Hq, N, M)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~seen, -torch.inf)
    return s.softmax(-1)


def heads(batch: int = 2, n: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    q, k = torch.randn(batch, 4, n, 8), torch.randn(batch, 2, n, 8)
    return q, k, torch.ones(n, n, dtype=torch.bool).tril()


def test_accumulated_attention_is_h2o_s() -> None:
    q, k, seen = heads()
    counted = torch.arange(40, 0, -1)  # the rows that see each key
    wanted = (weights(q, k, seen).sum(2) / counted).unflatten(1, (2, 2)).mean(2)
    found = hw.attention_map(q, k, mask=hw.mask.causal()).eviction_scores()
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("recent", "smooth"), [(8, 5), (1, 1), (40, 3)])
def test_recent_attention_is_snapkv_s(recent: int, smooth: int) -> None:
    q, k, seen = heads()
    mean = weights(q, k, seen)[:, :, -recent:, : 40 - recent].mean(2)
    if mean.numel():
        mean = F.avg_pool1d(mean, smooth, stride=1, padding=smooth // 2)
    wanted = mean.reshape(2, 2, 2, -1).mean(2)
    amap = hw.attention_map(q, k, mask=hw.mask.causal())
    found = amap.eviction_scores(recent, smooth)
    torch.testing.assert_close(found[..., : 40 - recent], wanted)
    assert (found[..., 40 - recent :] == torch.inf).all()


def test_a_mask_of_any_kind_counts_the_rows_that_see_a_key() -> None:
    q, k, _ = heads()
    seen = (torch.rand(2, 1, 40, 40) < 0.4) | torch.eye(40, dtype=torch.bool)
    wanted = weights(q, k, seen).sum(2) / seen.sum(2)
    found = hw.attention_map(q, k, mask=hw.mask.dense(seen)).eviction_scores()
    torch.testing.assert_close(found, wanted.unflatten(1, (2, 2)).mean(2))
    padded = hw.attention_map(q, k, mask=hw.mask.causal() & hw.mask.lengths([40, 25]))
    assert not padded.eviction_scores()[1, :, 25:].any()


def test_the_scores_of_a_watched_layer_are_those_of_its_map() -> None:
    attn = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal())
    with hw.watch(attn) as seen:
        attn(torch.randn(1, 20, 32))
    scores = seen.layer(0).map().eviction_scores(recent=4, smooth=3)
    assert scores.shape == (1, 2, 20)
    assert scores.topk(8).indices.ge(16).sum() == 2 * 4  # the recent keys are always kept


@pytest.mark.parametrize("options", [{"recent": 0}, {"recent": 41}, {"smooth": 2}, {"smooth": 0}])
def test_what_is_no_window_is_refused(options: dict[str, int]) -> None:
    q, k, _ = heads()
    with pytest.raises(ValueError, match=r"must be .*\n  in <AttentionMap 2 × 4 × 40 × 40>.evict"):
        hw.attention_map(q, k).eviction_scores(**options)
