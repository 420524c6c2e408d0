"""Attention as well-known repositories write it, none of which headwise knows by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

HEADS, WIDTH, TOKENS = 4, 32, 12


class Attention(nn.Module):
    """One layer for queries, keys and values; each way returns the output and its weights."""

    def __init__(self, way: Callable[[Attention, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.way, self.num_heads, self.scale = way, HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = (nn.LayerNorm(WIDTH // HEADS) for _ in range(2))
        self.attend, self.drop = nn.Softmax(dim=-1), nn.Dropout(0.1)
        self.rel_pos = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        nn.init.normal_(self.qkv.weight, std=0.4)  # so that heads choose
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        out, weights = self.way(self, x)
        self.weights = weights.detach()
        return self.proj(out)

    def split(self, x: Tensor) -> list[Tensor]:
        return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1)]


def joined(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(2)


def timm(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    q, k = self.q_norm(q) * self.scale, self.k_norm(k)
    p = (q @ k.transpose(-2, -1)).softmax(dim=-1)
    return joined(self.drop(p) @ v), p


def vit_pytorch(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.split(x)
    p = self.attend(torch.matmul(q, k.transpose(-1, -2)) * self.scale)
    return joined(torch.matmul(self.drop(p), v)), p


def segment_anything(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    b, n, _ = x.shape
    q, k, v = (y.reshape(b * HEADS, n, -1) for y in self.split(x))
    p = ((q * self.scale) @ k.transpose(-2, -1) + self.rel_pos.repeat(b, 1, 1)).softmax(dim=-1)
    return joined((p @ v).view(b, HEADS, n, -1)), p.view(b, HEADS, n, n)


def llama_of_meta(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.split(x)
    mask = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    scores = torch.matmul(q, k.transpose(2, 3)) / q.shape[-1] ** 0.5 + mask
    p = F.softmax(scores.float(), dim=-1).type_as(q)
    return joined(torch.matmul(p, v)), p


def nanogpt(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.split(x)
    seen = torch.ones(TOKENS, TOKENS).tril()[None, None]
    p = ((q @ k.mT) * self.scale).masked_fill(seen == 0, float("-inf")).softmax(-1)
    return joined(self.drop(p) @ v), p


def palm_pytorch(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.split(x)
    k, v = k[:, 0], v[:, 0]  # one head of keys
    scores = torch.einsum("b h i d, b j d -> b h i j", q * self.scale, k)
    p = (scores - scores.amax(dim=-1, keepdim=True).detach()).softmax(dim=-1)
    return joined(torch.einsum("b h i j, b j d -> b h i d", p, v)), p


def by_exponentials(self: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = self.split(x)
    scores = q @ k.mT * self.scale
    e = (scores - scores.amax(-1, keepdim=True)).exp()
    p = e / e.sum(-1, keepdim=True)
    return joined(p @ v), p


WAYS = (
    timm, vit_pytorch, segment_anything, llama_of_meta, nanogpt, palm_pytorch, by_exponentials,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_heads_are_read_and_outputs_stay(way: Callable[..., tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    model, x = Attention(way).eval(), torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():
        before = model(x)
        with hw.watch(model, strict=True) as seen:
            assert torch.equal(model(x), before)
    (layer,) = seen.layers
    entropy = torch.special.entr(model.weights).sum(-1)
    torch.testing.assert_close(layer.observation.entropy, entropy, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer.map().to_tensor(), model.weights, rtol=1e-4, atol=1e-5)
