"""Rotary positions: queries and keys rotated by their position, so that scores see distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
from torch import Tensor

from headwise.checks import Positive, Size, check_size
from headwise.nn.positions import Position, PositionModule, Waves
from headwise.nn.rotary_scaling import DynamicNTK, Scaling, plain_frequencies


@dataclass(frozen=True)
class Rotary(Position):
    """Rotate pairs of entries of queries and keys by their position: scores see only distances.

    `base` sets the longest wavelength; `width` entries rotate (all of the head if None); `layout`
    says which entries form a pair: i and i + width/2 ("halves": Llama in transformers, Qwen,
    GPT-NeoX) or 2i and 2i + 1 ("adjacent": GPT-J, the paper). `scaling` is for sequences beyond the
    trained length.
    """

    base: Positive = 10000.0
    width: Size | None = None
    layout: Literal["halves", "adjacent"] = "halves"
    scaling: Scaling | None = None

    def build(self, d_model: int, heads: int, head_dim: int) -> RotaryPosition:
        return RotaryPosition(self, head_dim)


class RotaryPosition(PositionModule):
    """Rotates queries and keys (B, H, N, D); has no parameters.

    >>> rotary = Rotary().build(d_model=64, heads=4, head_dim=16)
    >>> q, k = torch.randn(2, 1, 4, 5, 16).unbind(0)
    >>> q, k = (rotary.rotate(x, rotary.waves(torch.full((5,), 7))) for x in (q, k))
    >>> far = [rotary.rotate(x, rotary.waves(torch.full((5,), 1000))) for x in (q, k)]
    >>> torch.allclose((q * k).sum(-1), (far[0] * far[1]).sum(-1), atol=1e-4)  # both moved by 993
    True
    """

    rotates = True

    def __init__(self, rotary: Rotary, head_dim: int) -> None:
        super().__init__()
        check_size("head_dim", head_dim)
        self.width = head_dim if rotary.width is None else rotary.width
        if self.width % 2 or not 0 < self.width <= head_dim:
            raise ValueError(
                f"{rotary} can't rotate {self.width} entries of a head of width {head_dim}; use an "
                f"even width up to {head_dim}"
            )
        self.rotary = rotary
        self.rotates_late = isinstance(rotary.scaling, DynamicNTK)
        self.magnitude = 1.0 if rotary.scaling is None else rotary.scaling.magnitude
        self.frequencies: Tensor
        self.register_buffer("frequencies", self._frequencies(), persistent=False)

    def _frequencies(self) -> Tensor:
        rotary = self.rotary
        if rotary.scaling is None:
            return plain_frequencies(rotary.base, self.width)
        return rotary.scaling.frequencies(rotary.base, self.width)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # A model moved to bfloat16 keeps its angles: 8 bits can't tell position 256 from 257.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
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

    def rotate(self, x: Tensor, waves: Waves) -> Tensor:
        cosine, sine = (_beside(wave, x) for wave in waves)
        part = x if self.width == x.shape[-1] else x[..., : self.width]
        if self.rotary.layout == "halves":
            a, b = part.chunk(2, -1)
            rotated = torch.cat((a * cosine - b * sine, b * cosine + a * sine), -1)
        else:
            a, b = part.unflatten(-1, (-1, 2)).unbind(-1)
            rotated = torch.stack((a * cosine - b * sine, b * cosine + a * sine), -1).flatten(-2)
        rotated = rotated.to(x.dtype)
        return rotated if part is x else torch.cat((rotated, x[..., self.width :]), -1)

    def extra_repr(self) -> str:
        return f"{self.rotary}, width={self.width}"


def _beside(wave: Tensor, x: Tensor) -> Tensor:
    """A wave that can be multiplied with x: on every rank of its mesh if x is a DTensor."""
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        return wave
    from torch.distributed.tensor import DTensor, Replicate  # which x has imported

    everywhere: Tensor = DTensor.from_local(wave, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return everywhere
