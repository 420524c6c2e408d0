"""How attention learns where things stand: descriptions, and the modules they build.

Three kinds, by where they act: `Rotary` turns queries and keys; `ALiBi` and `RelativeBuckets` add
to the logits; `Learned` and `Sinusoidal` add to the input (`at_input`), usually once, below the
first layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwise import bias
from headwise.nn.placement import PositionModule
from headwise.nn.rotary import Rotary
from headwise.nn.scalings import plain_frequencies


@dataclass(frozen=True)
class ALiBi:
    """-slope · distance on the logits, a slope for each head, which may be `learned`."""

    learned: bool = False
    at_input: ClassVar[bool] = False

    def build(self, d_model: int, heads: int, head_dim: int) -> ALiBiPosition:
        """The module for this many heads."""
        return ALiBiPosition(heads, self.learned)


@dataclass(frozen=True)
class RelativeBuckets:
    """T5's: a learned number for each head and bucket of distances, on the logits."""

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    at_input: ClassVar[bool] = False

    def __post_init__(self) -> None:
        bias.check_buckets(self.buckets, self.bidirectional, self.max_distance)

    def build(self, d_model: int, heads: int, head_dim: int) -> BucketPosition:
        """The module for this many heads."""
        return BucketPosition(self, heads)


@dataclass(frozen=True)
class Learned:
    """A learned vector for each of `length` positions, added to the input."""

    length: int
    at_input: ClassVar[bool] = True

    def build(self, d_model: int, heads: int, head_dim: int) -> LearnedPosition:
        """The module for inputs of width d_model."""
        return LearnedPosition(self.length, d_model)


@dataclass(frozen=True)
class Sinusoidal:
    """The 2017 paper's sines and cosines of different wavelengths, added to the input."""

    base: float = 10000.0
    at_input: ClassVar[bool] = True

    def build(self, d_model: int, heads: int, head_dim: int) -> SinusoidalPosition:
        """The module for inputs of width d_model."""
        return SinusoidalPosition(self.base, d_model)


Position = Rotary | ALiBi | RelativeBuckets | Learned | Sinusoidal


class ALiBiPosition(PositionModule):
    """A slope for each head, (heads,): a parameter, or a buffer that checkpoints leave out."""

    def __init__(self, heads: int, learned: bool) -> None:
        super().__init__()
        slopes = bias.ALiBi(heads).slopes
        self.slopes: Tensor
        if learned:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def bias(self) -> bias.Bias:
        return bias.ALiBi(self.slopes)


class BucketPosition(PositionModule):
    """A table (buckets, heads), to be learned."""

    def __init__(self, described: RelativeBuckets, heads: int) -> None:
        super().__init__()
        self.described = described
        self.table = nn.Parameter(torch.zeros(described.buckets, heads))

    def bias(self) -> bias.Bias:
        described = self.described
        return bias.RelativeBuckets(self.table, described.bidirectional, described.max_distance)

    def extra_repr(self) -> str:
        return str(self.described)


class LearnedPosition(PositionModule):
    """A table (length, d_model) of vectors for x (B, N, d_model)."""

    at_input = True

    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        self.table = nn.Embedding(length, d_model)
        nn.init.normal_(self.table.weight, std=0.02)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        length = self.table.num_embeddings
        # On a GPU reading a position would wait for it; there the lookup itself complains.
        known = positions.device.type == "cpu" and not torch.compiler.is_compiling()
        if known and int(positions.max()) >= length:
            raise ValueError(
                f"position {int(positions.max())} has no learned vector; there are {length}: "
                f"Learned({length}) serves sequences up to that length"
            )
        placed: Tensor = x + self.table(positions)
        return placed


class SinusoidalPosition(PositionModule):
    """Sines on even entries, cosines on odd ones; no parameters, any length.

    >>> place = Sinusoidal().build(d_model=4, heads=1, head_dim=4)
    >>> place.add(torch.zeros(1, 2, 4), torch.arange(2))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    at_input = True

    def __init__(self, base: float, d_model: int) -> None:
        super().__init__()
        if d_model % 2:
            raise ValueError(f"sinusoidal positions come in pairs; d_model={d_model} is odd")
        self.base, self.d_model = base, d_model

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None] * plain_frequencies(self.base, self.d_model, x.device)
        return x + torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(x.dtype)
