"""Descriptions of feed-forward layers, which act on every position alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from headwise.checks import CheckedFields, Size, check_flag, check_size


@dataclass(frozen=True)
class ReLU(CheckedFields):
    """max(0, x W₁ + b₁) W₂ + b₂, as in the 2017 paper; `width` is that of the hidden layer.

    >>> ReLU(2048).build(512)[0]
    Linear(in_features=512, out_features=2048, bias=True)
    """

    width: Size

    def build(self, d_model: int, bias: bool = True) -> nn.Sequential:
        """The layer from and to vectors of width d_model."""
        return _two_layers(d_model, self.width, nn.ReLU(), bias)


@dataclass(frozen=True)
class GELU(CheckedFields):
    """gelu(x W₁ + b₁) W₂ + b₂; GPT-2 uses `approximate="tanh"`.

    >>> GELU(3072).build(768)[1]
    GELU(approximate='none')
    """

    width: Size
    approximate: Literal["none", "tanh"] = "none"

    def build(self, d_model: int, bias: bool = True) -> nn.Sequential:
        """The layer from and to vectors of width d_model."""
        return _two_layers(d_model, self.width, nn.GELU(self.approximate), bias)


@dataclass(frozen=True)
class SwiGLU(CheckedFields):
    """(silu(x W_g) * x W_u) W_d: three matrices, of which the first gates the second.

    >>> sum(p.numel() for p in SwiGLU(1024).build(384, bias=False).parameters()) == 3 * 384 * 1024
    True
    """

    width: Size

    def build(self, d_model: int, bias: bool = True) -> GatedFeedForward:
        """The layer from and to vectors of width d_model."""
        return GatedFeedForward(d_model, self.width, bias)


FeedForward = ReLU | GELU | SwiGLU
"""The kinds of feed-forward layers."""


class GatedFeedForward(nn.Module):
    """The layer that `SwiGLU` describes: (..., d_model) -> (..., d_model)."""

    def __init__(self, d_model: int, width: int, bias: bool) -> None:
        super().__init__()
        check_size("d_model", d_model)
        check_flag("bias", bias)
        self.gate = nn.Linear(d_model, width, bias=bias)
        self.up = nn.Linear(d_model, width, bias=bias)
        self.down = nn.Linear(width, d_model, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def _two_layers(d_model: int, width: int, activation: nn.Module, bias: bool) -> nn.Sequential:
    check_size("d_model", d_model)
    check_flag("bias", bias)
    return nn.Sequential(
        nn.Linear(d_model, width, bias=bias), activation, nn.Linear(width, d_model, bias=bias)
    )
