"""Attention by hand in more ways: what is read exactly, what is none, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.watching.adapters import torch_calls
from headwise.watching.recorder import layer as layers

B, H, N, D = 2, 4, 4, 8  # as many keys as heads: axes can't be told by their sizes


class Hand(nn.Module):
    """Projections, logits, a softmax, and whatever `weigh` makes of weights and values.

    `turn` computes the logits with the heads before the batch.
    """

    def __init__(
        self,
        weigh: Callable[[Tensor, Tensor], Tensor],
        hide: float = -torch.inf,
        turn: bool = False,
    ) -> None:
        super().__init__()
        self.turn = turn
        self.q, self.k, self.v = (nn.Linear(H * D, H * D) for _ in range(3))
        self.weigh, self.hide, self.hides = weigh, hide, torch.ones(N, N).triu(1).bool()

    def logits(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        return q @ k.mT * D**-0.5

    def forward(self, x: Tensor) -> Tensor:
        logits = self.logits(x).masked_fill(self.hides, self.hide)
        p = (logits.transpose(0, 1) if self.turn else logits).softmax(-1)
        return self.weigh(p, self.v(x).unflatten(-1, (H, D)))  # values (B, N, H, D)


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda p, v: p @ v.transpose(1, 2),
    "bhqk,bhkd->bqhd": lambda p, v: torch.einsum("bhqk,bhkd->bqhd", p, v.transpose(1, 2)),
    "bhqk,bkhd->bqhd": lambda p, v: torch.einsum("bhqk,bkhd->bqhd", p, v),
    "bhqk,bkhd->bhqd": lambda p, v: torch.einsum("bhqk, bkhd -> bhqd", p, v),
    "values first": lambda p, v: torch.einsum("bkhd,bhqk->qbhd", v, p),
    "...": lambda p, v: torch.einsum("...qk,...kd->...qd", p, v.transpose(1, 2)),
    "queries first": lambda p, v: torch.einsum("bqhk,bkhd->bqhd", p.transpose(1, 2), v),
    "turned twice": lambda p, v: p.transpose(1, 2).permute(0, 2, 1, 3) @ v.transpose(1, 2),
    "one head of values": lambda p, v: torch.einsum("bhqk,bkd->bhqd", p, v[:, :, 0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_axis_is_found_where_its_product_says_it_is(way: str) -> None:
    model, x = Hand(WAYS[way]), torch.randn(B, N, H * D)
    before = model(x)
    with hw.watch(model) as seen:
        assert torch.equal(model(x), before)
    p = model.logits(x).masked_fill(model.hides, -torch.inf).softmax(-1)
    v = model.v(x).unflatten(-1, (H, D)).transpose(1, 2)
    v = v[:, :1] if way == "one head of values" else v
    observed = seen.layers[0].observation
    torch.testing.assert_close(observed.output_norm, (p @ v).norm(dim=-1), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(observed.self_mass, p.diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(seen.layers[0].map().to_tensor(), p, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["matmul", "bhqk,bkhd->bqhd", "values first"])
def test_a_head_is_switched_off_wherever_its_axis_is(way: str) -> None:
    model, x = Hand(WAYS[way]), torch.randn(B, N, H * D)
    axis = 1 if way == "matmul" else 2
    whole = model(x)
    off = torch.tensor([1.0, 1.0, 0.0, 1.0]).reshape(-1, *[1] * (3 - axis))
    with hw.watch(model) as seen:
        model(x)
        seen._recorder.interventions.silenced = {"": 2}
        assert torch.equal(model(x), whole * off)


LED_BY_HEADS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda p, v: p @ v.permute(2, 0, 1, 3),
    "hbqk,bkhd->bqhd": lambda p, v: torch.einsum("hbqk,bkhd->bqhd", p, v),
    "one head of values": lambda p, v: p @ v[:, :, 0],
}


@pytest.mark.parametrize("way", LED_BY_HEADS)
@pytest.mark.parametrize("num_heads", [H, None])
def test_heads_before_the_batch_are_known_by_the_module_or_its_input(
    way: str, num_heads: int | None
) -> None:
    model, x = Hand(LED_BY_HEADS[way], turn=True), torch.randn(B, N, H * D)
    if num_heads is not None:
        model.num_heads = num_heads
    whole = model(x)
    with hw.watch(model) as seen:
        assert torch.equal(model(x), whole)
        seen._recorder.interventions.silenced = {"": 2}
        axis = 2 if "bqhd" in way else 0
        off = torch.tensor([1.0, 1.0, 0.0, 1.0]).reshape(-1, *[1] * (3 - axis))
        assert torch.equal(model(x), whole * off)
    p = model.logits(x).masked_fill(model.hides, -torch.inf).softmax(-1)
    assert seen.layers[0].heads == H
    torch.testing.assert_close(seen.layers[0].map().to_tensor(), p, rtol=1e-4, atol=1e-6)


def test_a_batch_that_happens_to_be_as_large_as_heads_are_many_stays_the_batch() -> None:
    model, x = Hand(WAYS["matmul"]), torch.randn(7, N, H * D)
    model.h = 7  # of something else
    with hw.watch(model) as seen:
        model(x)
    assert seen.layers[0].heads == H


@pytest.mark.parametrize("hide", [-1e9, -1e4, -torch.inf, torch.finfo(torch.float32).min / 9])
def test_hidden_keys_are_known_by_whatever_number_hides_them(hide: float) -> None:
    model, x = Hand(WAYS["matmul"], hide), torch.randn(B, N, H * D)
    with hw.watch(model) as seen:
        model(x)
    s = model.logits(x).masked_fill(model.hides, 0)
    wanted = s.sum(-1) / torch.arange(1, N + 1)
    torch.testing.assert_close(seen.layers[0].observation.logit_mean, wanted, rtol=1e-4, atol=1e-6)
    assert repr(seen.layers[0].last.call.mask) == "causal(offset=0)"


@pytest.mark.parametrize("hide", [-1e9, -1e4])
def test_so_they_are_in_masks_for_the_attention_function(hide: float) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.zeros(N, N).masked_fill(torch.ones(N, N).triu(1).bool(), hide)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    with hw.watch(model := Masked()) as seen:
        model(torch.randn(B, H, N, D))
    assert repr(seen.layers[0].last.call.mask) == "causal(offset=0)"
    assert float(seen.layers[0].observation.logit_mean.abs().max()) < 100


def test_a_softmax_over_a_table_is_no_attention() -> None:
    class Soft(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.attend = nn.Embedding(10, 16), hw.nn.MultiHeadAttention(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.attend(x.softmax(-1) @ self.table.weight)
            return out

    with hw.watch(model := Soft()) as seen:
        model(torch.randn(B, N, 10))
    assert [layer.name for layer in seen.layers] == ["attend"]


def test_a_softmax_that_sends_tokens_to_experts_is_no_attention() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.route, self.attend = nn.Linear(16, 6), hw.nn.MultiHeadAttention(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            p = self.route(x).unflatten(-1, (2, 3)).softmax(-1)  # (B, N, experts, slots)
            sent = torch.einsum("bnec,bnd->becd", p, x)
            out: Tensor = self.attend(x) + sent.mean((1, 2))[:, None]
            return out

    with hw.watch(model := Routed()) as seen:
        model(torch.randn(B, N, 16))
    assert [layer.name for layer in seen.layers] == ["attend"]


class Pair(nn.Module):
    """A module that can't be read, and one that can."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, hw.nn.MultiHeadAttention(H * D, H)

    def forward(self, x: Tensor) -> Any:
        return self.first(x), self.second(x)


def summed(p: Tensor, v: Tensor) -> Tensor:
    """Heads that are added up before anyone sees them."""
    return torch.einsum("bhqk,bkhd->bqd", p, v)


def test_only_layers_that_are_asked_for_are_refused() -> None:
    model, x = Pair(Hand(summed)), torch.randn(B, N, H * D)
    before = model(x)
    with (
        pytest.raises(ValueError, match=r"first can't be watched: it writes its attention out"),
        hw.watch(model, strict=True),
    ):
        model(x)
    with hw.watch(model, layers="second") as seen:
        during = model(x)
    assert torch.equal(during[0], before[0])
    assert [layer.name for layer in seen.layers] == ["second"]


@pytest.mark.parametrize("change", [lambda p: p * 3.0, lambda p: F.dropout(p, 0.5, False) ** 2])
def test_weights_that_were_changed_are_not_shown_as_if_they_were_the_softmax(change: Any) -> None:
    model = Hand(lambda p, v: change(p) @ v.transpose(1, 2))
    refused = pytest.raises(ValueError, match="can't be watched: its output is not softmax")
    with refused, hw.watch(model, strict=True):
        model(torch.randn(B, N, H * D))


def test_weights_that_are_dropped_in_any_mode_are_read() -> None:
    x, tables = torch.randn(B, N, H * D), []
    for change in (lambda p: p, lambda p: F.dropout(p, 0.5)):
        torch.manual_seed(0)  # for its weights
        model = Hand(lambda p, v, change=change: change(p) @ v.transpose(1, 2)).eval()
        with hw.watch(model, strict=True) as seen:
            model(x)
        tables.append(seen.heads()["entropy_mean"])
    assert tables[0] == tables[1]


class Flat(nn.Module):
    """Heads and batch in one axis."""

    def forward(self, q: Tensor) -> Tensor:
        q = q.unflatten(-1, (H, D)).transpose(1, 2).flatten(0, 1)
        return (q @ q.mT).softmax(-1) @ q


def test_heads_that_nobody_counts_are_refused_by_name() -> None:
    model, x = nn.Sequential(Flat()), torch.randn(1, N, H * D)
    refused = pytest.raises(ValueError, match=r"0 can't be watched: .*how many heads.*num_heads")
    with refused, hw.watch(model, strict=True):
        model(x)
    model[0].num_heads = H
    with hw.watch(model) as seen:
        model(x)
    assert seen.layers[0].heads == H


def test_large_weights_are_not_kept_for_a_map(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "LARGEST", B * H * N * N - 1)
    with hw.watch(model := Hand(WAYS["matmul"])) as seen:
        model(torch.randn(B, N, H * D))
    assert seen.layers[0].last.call is None
    with pytest.raises(ValueError, match=f"more than {layers.LARGEST:,} weights"):
        seen.layers[0].map()


@pytest.mark.parametrize("inplace", [False, True])
def test_dropped_weights_are_no_reason_to_refuse(inplace: bool) -> None:
    drop = nn.Dropout(0.5, inplace)
    model, x = Hand(lambda p, v: drop(p) @ v.transpose(1, 2)), torch.randn(B, N, H * D)
    with hw.watch(model) as seen:
        model(x)
    s = model.logits(x).masked_fill(model.hides, -torch.inf)
    torch.testing.assert_close(seen.layers[0].observation.lse, s.logsumexp(-1))


def test_a_product_with_weights_turned_around_is_no_attention() -> None:
    model = Hand(lambda p, v: p.mT @ v.transpose(1, 2))
    with pytest.raises(ValueError, match="no attention was found"), hw.watch(model):
        model(torch.randn(B, N, H * D))


@pytest.mark.parametrize("broken", ["q", "v"])
def test_a_model_whose_numbers_are_gone_is_watched_all_the_same(broken: str) -> None:
    model = Hand(WAYS["matmul"])
    getattr(model, broken).weight.data.fill_(torch.nan)
    with hw.watch(model) as seen:
        model(torch.randn(B, N, H * D))
    figure = "max_logit_max" if broken == "q" else "output_norm_mean"
    assert torch.tensor(seen.heads()[figure]).isnan().all()
