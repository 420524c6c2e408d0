"""How attention learns where things stand: descriptions, and the modules they build.

Three kinds, by where they act: `Rotary` turns queries and keys; `ALiBi` and `RelativeBuckets` add
to the logits; `Learned` and `Sinusoidal` add to the input (`at_input`), usually once, below the
first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from headwise import bias
from headwise.nn.scalings import DynamicNTK, Scaling, plain_frequencies

Waves = tuple[Tensor, Tensor]  # cosine and sine, (N, W/2) or (B, 1, N, W/2)


@dataclass(frozen=True)
class Rotary:
    """Turn pairs of a query's and a key's entries by their position: scores see distances only.

    `base` sets the longest wave; `width` entries turn (None: all of the head); `layout` says which
    entries are a pair: i and i + width/2 ("halves": Llama in transformers, Qwen, GPT-NeoX) or 2i
    and 2i + 1 ("adjacent": GPT-J, the paper). `scaling` serves sequences beyond the trained length.
    """

    base: float = 10000.0
    width: int | None = None
    layout: Literal["halves", "adjacent"] = "halves"
    scaling: Scaling | None = None
    at_input: ClassVar[bool] = False

    def build(self, d_model: int, heads: int, head_dim: int) -> RotaryPosition:
        """The module for heads of this width."""
        return RotaryPosition(self, head_dim)


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


class PositionModule(nn.Module):
    """What a position may do at each of the three places; by default nothing."""

    at_input = False
    turns = False
    turns_late = False  # keys are turned when read from a cache, not when written

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, d_model) with its positions (N,) or (B, N)."""
        return x

    def waves(self, positions: Tensor, length: int | Tensor | None = None) -> Waves:
        """Cosine and sine for positions (N,) or (B, N) of a sequence that is `length` long."""
        raise NotImplementedError

    def turn(self, x: Tensor, waves: Waves) -> Tensor:
        """x (B, H, N, D), turned."""
        return x

    def bias(self) -> bias.Bias | None:
        """What is added to the logits."""
        return None


class RotaryPosition(PositionModule):
    """Turns queries and keys (B, H, N, D); has no parameters.

    >>> rotary = Rotary().build(d_model=64, heads=4, head_dim=16)
    >>> q, k = torch.randn(2, 1, 4, 5, 16).unbind(0)
    >>> q, k = (rotary.turn(x, rotary.waves(torch.full((5,), 7))) for x in (q, k))
    >>> far = [rotary.turn(x, rotary.waves(torch.full((5,), 1000))) for x in (q, k)]
    >>> torch.allclose((q * k).sum(-1), (far[0] * far[1]).sum(-1), atol=1e-4)  # both moved alike
    True
    """

    turns = True

    def __init__(self, rotary: Rotary, head_dim: int) -> None:
        super().__init__()
        self.width = head_dim if rotary.width is None else rotary.width
        if self.width % 2 or not 0 < self.width <= head_dim:
            raise ValueError(
                f"{rotary} turns {self.width} entries of heads {head_dim} wide; an even number up "
                f"to {head_dim} would work"
            )
        self.rotary = rotary
        self.turns_late = isinstance(rotary.scaling, DynamicNTK)
        self.magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
        self.frequencies: Tensor
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        rotary = self.rotary
        if rotary.scaling is None:
            return plain_frequencies(rotary.base, self.width)
        return rotary.scaling.frequencies(rotary.base, self.width)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A model moved to bfloat16 keeps its angles: 8 bits cannot tell position 256 from 257.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not self.frequencies.is_meta:
            self.frequencies = self._frequencies().to(self.frequencies.device)
        return self

    def waves(self, positions: Tensor, length: int | Tensor | None = None) -> Waves:
        frequencies = self.frequencies
        if isinstance(self.rotary.scaling, DynamicNTK):
            scaled = self.rotary.scaling.frequencies(self.rotary.base, self.width, length)
            frequencies = scaled.to(positions.device)
        angle = positions[..., None] * frequencies  # (N, W/2) or (B, N, W/2)
        angle = angle if positions.ndim == 1 else angle[:, None]
        cosine, sine = angle.cos(), angle.sin()
        if self.magnitude != 1.0:
            cosine, sine = cosine * self.magnitude, sine * self.magnitude
        return cosine, sine

    def turn(self, x: Tensor, waves: Waves) -> Tensor:
        cosine, sine = waves
        turning = x if self.width == x.shape[-1] else x[..., : self.width]
        if self.rotary.layout == "halves":
            a, b = turning.chunk(2, -1)
            turned = torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)
        else:
            a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
            turned = torch.stack((a * cosine - b * sine, b * cosine + a * sine), -1).flatten(-2)
        turned = turned.to(x.dtype)
        return turned if turning is x else torch.cat((turned, x[..., self.width :]), -1)

    def extra_repr(self) -> str:
        return f"{self.rotary}, width={self.width}"


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
        if not torch.compiler.is_compiling() and int(positions.max()) >= length:
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
