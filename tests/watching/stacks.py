"""A small model whose attention is a function that a test may replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw


class Layer(nn.Module):
    """Attention by a function that the test may replace."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(32, 96), nn.Linear(32, 32), attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(self.attend(self, q, k, v).transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def by_torch(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_headwise(layer: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return hw.attention(q, k, v, mask=hw.mask.causal())


@contextmanager
def attending(model: Stack, attend: Callable[..., Tensor]) -> Iterator[None]:
    before = [layer.attend for layer in model.layers]
    for layer in model.layers:
        layer.attend = attend
    yield
    for layer, old in zip(model.layers, before, strict=True):
        layer.attend = old
