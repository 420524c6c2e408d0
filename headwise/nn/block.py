"""The Transformer block: attention, then a feed-forward layer, each with a path around it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.nn.norms import LayerNorm, Norm
from headwise.nn.residual import Arrangement, PreNorm, Residual


class Block(nn.Module):
    """x (B, N, d_model) -> the same; what a call says beside x goes to the attention.

    >>> import torch, headwise as hw
    >>> block = hw.nn.Block(64, hw.nn.MultiHeadAttention(64, 8), hw.nn.GELU(256).build(64))
    >>> block(torch.randn(2, 10, 64), mask=hw.mask.causal()).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        d_model: int,
        attention: nn.Module,
        feed_forward: nn.Module,
        *,
        norm: Norm = LayerNorm(),
        arrangement: Arrangement = PreNorm(),
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.around_attention = Residual(d_model, arrangement, norm, dropout)
        self.around_feed_forward = Residual(d_model, arrangement, norm, dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, **options))
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out
