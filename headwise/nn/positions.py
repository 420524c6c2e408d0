"""Positions: descriptions of how attention learns where tokens stand, and the modules they build.

Three kinds, by where they act: `Rotary` rotates queries and keys; `ALiBi` and `RelativeBuckets` add
to the logits; `Learned` and `Sinusoidal` add to the input (`at_input`), usually once, below the
first layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from headwise import bias
from headwise.checks import CheckedFields, Positive, Size, check_sizes
from headwise.core.problem import describe
from headwise.nn.rotary_scaling import plain_frequencies

Waves = tuple[Tensor, Tensor]  # cosine and sine, (N, W/2) or (B, 1, N, W/2)


class PositionModule(nn.Module):
    """A position at work: it may add to the input, rotate queries and keys, or bias the logits."""

    at_input = False  # it adds to the input
    rotates = False
    rotates_late = False  # keys are rotated when read from a cache, not when written

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, d_model) with its positions (N,) or (B, N) added."""
        return x

    def waves(self, positions: Tensor, length: int | Tensor | None = None) -> Waves:
        """Cosine and sine for positions (N,) or (B, N) of a sequence of this length."""
        raise NotImplementedError

    def rotate(self, x: Tensor, waves: Waves) -> Tensor:
        """x (B, H, N, D), rotated."""
        return x

    def bias(self) -> bias.Bias | None:
        """The bias that is added to the logits, if any."""
        return None


@dataclass(frozen=True)
class Position(CheckedFields, ABC):
    """A description of positions, from which a layer builds its module."""

    at_input: ClassVar[bool] = False

    @abstractmethod
    def build(self, d_model: int, heads: int, head_dim: int) -> PositionModule:
        """The module for a layer of these widths."""


@dataclass(frozen=True)
class ALiBi(Position):
    """-slope · distance on the logits, one slope per head, `learned` or fixed."""

    learned: bool = False

    def build(self, d_model: int, heads: int, head_dim: int) -> ALiBiPosition:
        return ALiBiPosition(heads, self.learned)


@dataclass(frozen=True)
class RelativeBuckets(Position):
    """T5's positions: a learned number per head and bucket of distances, on the logits."""

    buckets: Size = 32
    max_distance: Size = 128
    bidirectional: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        bias.check_buckets(self.buckets, self.bidirectional, self.max_distance)

    def build(self, d_model: int, heads: int, head_dim: int) -> BucketPosition:
        return BucketPosition(self, heads)


@dataclass(frozen=True)
class Learned(Position):
    """A learned vector for each of `length` positions, added to the input."""

    length: Size
    at_input: ClassVar[bool] = True

    def build(self, d_model: int, heads: int, head_dim: int) -> LearnedPosition:
        return LearnedPosition(self.length, d_model)


@dataclass(frozen=True)
class Sinusoidal(Position):
    """Sines and cosines of many wavelengths, as in the 2017 paper, added to the input."""

    base: Positive = 10000.0
    at_input: ClassVar[bool] = True

    def build(self, d_model: int, heads: int, head_dim: int) -> SinusoidalPosition:
        return SinusoidalPosition(self.base, d_model)


class ALiBiPosition(PositionModule):
    """One slope per head, (heads,): a parameter, or a buffer that checkpoints leave out."""

    def __init__(self, heads: int, learned: bool) -> None:
        super().__init__()
        check_sizes(heads=heads)
        slopes = bias.ALiBi(heads).slopes
        self.slopes: Tensor
        if learned:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes, persistent=False)

    def bias(self) -> bias.Bias:
        return bias.ALiBi(self.slopes)


class BucketPosition(PositionModule):
    """A learned table (buckets, heads)."""

    def __init__(self, described: RelativeBuckets, heads: int) -> None:
        super().__init__()
        check_sizes(heads=heads)
        self.described = described
        self.table = nn.Parameter(torch.zeros(described.buckets, heads))

    def bias(self) -> bias.Bias:
        described = self.described
        return bias.RelativeBuckets(self.table, described.bidirectional, described.max_distance)

    def extra_repr(self) -> str:
        return str(self.described)


class LearnedPosition(PositionModule):
    """A learned table (length, d_model) of vectors, one per position."""

    at_input = True

    def __init__(self, length: int, d_model: int) -> None:
        super().__init__()
        check_sizes(length=length, d_model=d_model)
        self.table = nn.Embedding(length, d_model)
        nn.init.normal_(self.table.weight, std=0.02)

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        length = self.table.num_embeddings
        if positions.is_floating_point():
            raise ValueError(f"positions={describe(positions)} must be integers to be looked up")
        # Reading a position from a GPU would wait for it; there the lookup itself fails.
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            unknown = positions[(positions < 0) | (positions >= length)]
            if unknown.numel():
                raise ValueError(
                    f"position {unknown[0].item()} has no learned vector: Learned({length}) takes "
                    f"sequences of up to {length} tokens"
                )
        out: Tensor = x + self.table(positions)
        return out


class SinusoidalPosition(PositionModule):
    """Sines in even entries, cosines in odd ones; no parameters, any length.

    >>> place = Sinusoidal().build(d_model=4, heads=1, head_dim=4)
    >>> place.add(torch.zeros(1, 2, 4), torch.arange(2))
    tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
             [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    at_input = True

    def __init__(self, base: float, d_model: int) -> None:
        super().__init__()
        check_sizes(d_model=d_model)
        if d_model % 2:
            raise ValueError(
                f"Sinusoidal() fills pairs of entries, so d_model must be even; it is {d_model}"
            )
        self.base, self.d_model = base, d_model

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[..., None] * plain_frequencies(self.base, self.d_model, x.device)
        return x + torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).to(x.dtype)
