"""Descriptions of the two usual norms, from which a module builds its layers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from headwise.checks import CheckedFields, Positive, check_size


@dataclass(frozen=True)
class LayerNorm(CheckedFields):
    """Subtract the mean, divide by the standard deviation; then a learned scale and shift.

    >>> LayerNorm().build(64)
    LayerNorm((64,), eps=1e-05, elementwise_affine=True, bias=True)
    """

    eps: Positive = 1e-5
    bias: bool = True

    def build(self, width: int) -> nn.Module:
        """The layer for vectors of this width."""
        check_size("width", width)
        return nn.LayerNorm(width, eps=self.eps, bias=self.bias)


@dataclass(frozen=True)
class RMSNorm(CheckedFields):
    """Divide by the root of the mean square; then a learned scale.

    >>> RMSNorm().build(64)
    RMSNorm((64,), eps=1e-06, elementwise_affine=True)
    """

    eps: Positive = 1e-6

    def build(self, width: int) -> nn.Module:
        """The layer for vectors of this width."""
        check_size("width", width)
        return nn.RMSNorm(width, eps=self.eps)


Norm = LayerNorm | RMSNorm
"""The kinds of norms."""
