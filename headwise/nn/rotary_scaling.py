"""Scalings of rotary frequencies, for sequences longer than those a model was trained on.

A scaling changes the frequencies 1 / base^(2i/width). `trained_length` is the length of sequences
in training, before any scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.checks import CheckedFields, Positive, Size


def plain_frequencies(
    base: float | Tensor, width: int, device: torch.device | None = None
) -> Tensor:
    """1 / base^(2i/width) for each of the width / 2 rotating pairs, float32.

    >>> plain_frequencies(10000.0, 4)
    tensor([1.0000, 0.0100])
    """
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    # a number stays one: its copy to a GPU could not be captured in a CUDA graph
    base = base.to(device, torch.float32) if isinstance(base, Tensor) else base
    return 1.0 / base ** (steps / width)


@dataclass(frozen=True)
class LinearScaling(CheckedFields):
    """Divide every position by `factor`: all wavelengths are stretched alike."""

    factor: Positive

    def frequencies(self, base: float, width: int) -> Tensor:
        """(width / 2,) float32."""
        return plain_frequencies(base, width) / self.factor

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        return 1.0


@dataclass(frozen=True)
class DynamicNTK(CheckedFields):
    """Raise the base once a sequence exceeds `trained_length`: long waves are stretched most.

    The frequencies change with the length, so cached keys are rotated when they are read.
    """

    factor: Positive
    trained_length: Size

    def frequencies(self, base: float, width: int, length: int | Tensor | None = None) -> Tensor:
        """(width / 2,) float32 for a sequence of this length."""
        if width <= 2:
            raise ValueError(
                f"DynamicNTK needs more than one rotating pair, a width of 4 or more, not {width}"
            )
        if isinstance(length, Tensor):
            known: float | Tensor = length.clamp_min(self.trained_length)
        else:
            known = max(length or 0, self.trained_length)
        stretch = self.factor * known / self.trained_length - (self.factor - 1)
        device = length.device if isinstance(length, Tensor) else None
        return plain_frequencies(base * stretch ** (width / (width - 2)), width, device)

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        return 1.0


@dataclass(frozen=True)
class YaRN(CheckedFields):
    """Keep short waves, stretch long ones by `factor`, and mix those in between.

    A wave is short if it turns more than `fast` times within `trained_length`, and long if it turns
    fewer than `slow` times. `attention` multiplies cosine and sine, by default 0.1 ln(factor) + 1.
    `whole` rounds the bounds to whole pairs, as the paper's code does.
    """

    factor: Positive
    trained_length: Size
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention: Positive | None = None
    whole: bool = True

    def frequencies(self, base: float, width: int) -> Tensor:
        """(width / 2,) float32."""
        low, high = self._pair(self.fast, base, width), self._pair(self.slow, base, width)
        if self.whole:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        span = high - low if high != low else 0.001
        stretched = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
        plain = plain_frequencies(base, width)
        return plain / self.factor * stretched + plain * (1 - stretched)

    def _pair(self, turns: float, base: float, width: int) -> float:
        """The (fractional) pair that turns this often within the trained length."""
        return width * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(base))

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling(CheckedFields):
    """Llama 3.1's: stretch waves longer than trained_length / low, keep those below / high."""

    factor: Positive
    trained_length: Size
    low: Positive = 1.0
    high: Positive = 4.0

    def frequencies(self, base: float, width: int) -> Tensor:
        """(width / 2,) float32."""
        plain = plain_frequencies(base, width)
        turns = self.trained_length * plain / (2 * math.pi)  # within the trained length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    @property
    def magnitude(self) -> float:
        """The factor of cosine and sine."""
        return 1.0


Scaling = LinearScaling | DynamicNTK | YaRN | Llama3Scaling
"""The ways to stretch rotary positions to a longer context."""
