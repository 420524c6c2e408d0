"""The Transformer block: attention, then a feed-forward layer, each with a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.checks import check_kind, check_rate, check_size
from headwise.nn.norms import LayerNorm, Norm


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the residual stream is never normed, so deep models train without warm-up."""


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)): as in the 2017 paper and in BERT."""


Arrangement = PreNorm | PostNorm
"""The places of the norm in a block."""


class Residual(nn.Module):
    """x + dropout(f(norm(x))) or norm(x + dropout(f(x))), for any sublayer f.

    x (..., d_model) -> (..., d_model)

    >>> import torch
    >>> from headwise.nn import LayerNorm
    >>> around = Residual(8, PreNorm(), LayerNorm())
    >>> around(torch.ones(2, 3, 8), lambda x: x * 0).sum()
    tensor(48., grad_fn=<SumBackward0>)
    """

    def __init__(
        self, d_model: int, arrangement: Arrangement, norm: Norm, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_size("d_model", d_model)
        check_kind("arrangement", arrangement, Arrangement, "hw.nn.PreNorm() or hw.nn.PostNorm()")
        check_kind("norm", norm, Norm, "hw.nn.LayerNorm() or hw.nn.RMSNorm()")
        check_rate("dropout", dropout)
        self.arrangement = arrangement
        self.norm = norm.build(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        out: Tensor
        if isinstance(self.arrangement, PreNorm):
            out = x + self.dropout(sublayer(self.norm(x)))
        else:
            out = self.norm(x + self.dropout(sublayer(x)))
        return out


class Block(nn.Module):
    """x (B, N, d_model) -> (B, N, d_model); every other argument of a call goes to the attention.

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
        check_kind("attention", attention, nn.Module, "hw.nn.MultiHeadAttention(d_model, heads)")
        check_kind("feed_forward", feed_forward, nn.Module, "hw.nn.GELU(width).build(d_model)")
        self.attention, self.feed_forward = attention, feed_forward
        self.around_attention = Residual(d_model, arrangement, norm, dropout)
        self.around_feed_forward = Residual(d_model, arrangement, norm, dropout)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, **options))
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out
