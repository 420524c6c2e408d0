"""A module that attends more than once in a forward: each call has its own layer and map."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw


class BothWays(nn.Module):
    """One attention from x to y, and back from y to x."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return self.attn(x, y, y)[0], self.attn(y, x, x)[0]


@pytest.mark.parametrize("lengths", [(6, 4), (5, 5), (4, 6)])
def test_attention_in_both_directions_is_two_layers_with_their_own_maps(
    lengths: tuple[int, int],
) -> None:
    model, (x, y) = BothWays().eval(), (torch.randn(2, n, 16) for n in lengths)
    with torch.no_grad(), hw.watch(model) as seen:
        model(x, y)
    assert [layer.name for layer in seen.layers] == ["attn", "attn#1"]
    for name, (q, k) in {"attn": (x, y), "attn#1": (y, x)}.items():
        with torch.no_grad():
            weights = model.attn(q, k, k, average_attn_weights=False)[1]
        for head in range(2):
            found = seen.map(name, head, batch=1)[0, 0]
            torch.testing.assert_close(found, weights[1, head], atol=1e-6, rtol=1e-5)
        rows = weights[0].transpose(0, 1)[len(q[0]) // 2 :]
        near = 1 - (rows[:, 0] - rows[:, 1]).abs().sum(-1).mean() / 2
        torch.testing.assert_close(seen.similarity(name)[0, 1], near, atol=1e-5, rtol=1e-4)
    assert len(seen.types()) == len(seen.heads()) == 4


class Chunks(nn.Module):
    """Local attention: two chunks of queries, each with its keys and those before."""

    def forward(self, x: Tensor) -> Tensor:
        parts = [(x[:, :, :6], x[:, :, :4]), (x[:, :, 6:], x[:, :, 4:8])]
        return torch.cat([F.scaled_dot_product_attention(q, k, k) for q, k in parts], 2)


def test_sdpa_in_chunks_has_a_map_for_each_chunk() -> None:
    x = torch.randn(1, 2, 12, 8)
    with hw.watch(Chunks()) as seen:
        seen.model(x)
    assert [layer.name for layer in seen.layers] == ["", "#1"]
    for name, q, k in (("", x[:, :, :6], x[:, :, :4]), ("#1", x[:, :, 6:], x[:, :, 4:8])):
        torch.testing.assert_close(seen.map(name, 1)[0, 0], hw.attention_map(q, k)[0, 1])


class Steps(nn.Module):
    """A decoder that looks at two sequences in every step, one row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, *memories: Tensor) -> Tensor:
        rows = [self.attn(row, y, y)[0] for row in x.split(1, 1) for y in memories]
        return torch.cat(rows, 1)


def test_steps_over_the_same_keys_are_rows_of_one_map() -> None:
    model, x = Steps().eval(), torch.randn(1, 3, 16)
    memories = [torch.randn(1, 5, 16) for _ in range(2)]
    with torch.no_grad(), hw.watch(model) as seen:
        model(x, *memories)
    assert [layer.name for layer in seen.layers] == ["attn", "attn#1"]
    for name, y in zip(("attn", "attn#1"), memories, strict=True):
        with torch.no_grad():
            weights = model.attn(x, y, y, average_attn_weights=False)[1]
        found = seen.map(name, 1)[0, 0]
        torch.testing.assert_close(found, weights[0, 1], atol=1e-6, rtol=1e-5)


def test_lxmert_has_a_map_for_either_direction() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LxmertConfig(
        hidden_size=32, num_attention_heads=2, intermediate_size=32, l_layers=1, x_layers=1,
        r_layers=1, vocab_size=50, visual_feat_dim=8,
    )  # fmt: skip
    model = transformers.LxmertModel(config).eval()
    given: dict[str, Any] = {
        "input_ids": torch.arange(7)[None],
        "visual_feats": torch.randn(1, 5, 8),
        "visual_pos": torch.rand(1, 5, 4),
    }
    with torch.no_grad(), hw.watch(model) as seen:
        out = model(**given, output_attentions=True)
    across = [layer.name for layer in seen.layers if layer.kind == "cross"]
    assert [seen.map(name, 0).shape[2:] for name in across] == [(7, 5), (5, 7)]
    weights = out.cross_encoder_attentions[0]
    torch.testing.assert_close(seen.map(across[0], 1)[0, 0], weights[0, 1], atol=1e-6, rtol=1e-5)


def test_keys_that_change_while_a_model_generates_have_no_map() -> None:
    q, k = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8)

    class Decoder(nn.Module):
        def forward(self, memory: Tensor, rows: int) -> Tensor:
            own = torch.randn(1, 2, rows, 8)
            F.scaled_dot_product_attention(own[:, :, -1:], own, own)
            return self.cross_attn(q, memory)

        def __init__(self) -> None:
            super().__init__()
            self.cross_attn = Cross()

    class Cross(nn.Module):
        def forward(self, q: Tensor, memory: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, memory, memory)

    model = Decoder()
    with hw.watch(model) as seen:
        model(k, 2)
        model(k + 1, 3)
    with pytest.raises(ValueError, match="saw different keys"):
        seen.map("cross_attn", 0)
