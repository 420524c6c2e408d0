"""A sublayer, the path around it, and the norm before or after the two meet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from headwise.nn.norms import Norm


@dataclass(frozen=True)
class PreNorm:
    """x + f(norm(x)): the path around is untouched, so that deep models train without warm-up."""


@dataclass(frozen=True)
class PostNorm:
    """norm(x + f(x)): as in the 2017 paper and in BERT."""


Arrangement = PreNorm | PostNorm


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
