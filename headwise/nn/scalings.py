"""Rotary frequencies for sequences longer than those a model was trained on.

A scaling takes the frequencies 1 / base^(2i/width) and returns others. Each `trained_length` is
the length the model saw in training before anything was stretched.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def plain_frequencies(
    base: float | Tensor, width: int, device: torch.device | None = None
) -> Tensor:
    """1 / base^(2i/width) for each of the width / 2 turning pairs, float32.

    >>> plain_frequencies(10000.0, 4)
    tensor([1.0000, 0.0100])
    """
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    return 1.0 / torch.as_tensor(base, device=device, dtype=torch.float32) ** (steps / width)


@dataclass(frozen=True)
class LinearScaling:
    """Every position divided by `factor`: all wavelengths are stretched alike."""

    factor: float

    def frequencies(self, base: float, width: int) -> Tensor:
        """(width / 2,) float32."""
        return plain_frequencies(base, width) / self.factor

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied with."""
        return 1.0


@dataclass(frozen=True)
class DynamicNTK:
    """A larger base as the sequence outgrows `trained_length`: long waves are stretched most.

    The frequencies change with the length, so cached keys are turned when they are read.
    """

    factor: float
    trained_length: int

    def frequencies(self, base: float, width: int, length: int | Tensor | None = None) -> Tensor:
        """(width / 2,) float32 for a sequence of this length."""
        if width <= 2:
            raise ValueError(
                f"DynamicNTK needs more than one turning pair, and the width is {width}"
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
        """What cosine and sine are multiplied with."""
        return 1.0


@dataclass(frozen=True)
class YaRN:
    """Short waves stay, long ones are stretched by `factor`, those between are mixed.

    A wave is short when it turns more than `fast` times within `trained_length`, long when it
    turns fewer than `slow` times. `attention` multiplies cosine and sine; None: 0.1 ln(factor) + 1.
    `whole` rounds the bounds to whole pairs, as the paper's code does.
    """

    factor: float
    trained_length: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
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
        """What cosine and sine are multiplied with."""
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's: waves above trained_length / low are stretched, those below / high stay."""

    factor: float
    trained_length: int
    low: float = 1.0
    high: float = 4.0

    def frequencies(self, base: float, width: int) -> Tensor:
        """(width / 2,) float32."""
        plain = plain_frequencies(base, width)
        turns = self.trained_length * plain / (2 * math.pi)  # within the trained length
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return plain * kept + plain / self.factor * (1 - kept)

    @property
    def magnitude(self) -> float:
        """What cosine and sine are multiplied with."""
        return 1.0


Scaling = LinearScaling | DynamicNTK | YaRN | Llama3Scaling
