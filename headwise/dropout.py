"""Dropout as a function of (seed, batch, head, i, j), so that every engine drops the same weights.

A weight is kept if a 32-bit hash of its place is above the rate. The hash applies one mixer to the
seed, batch and head, query position and key position in turn, in unsigned 32-bit arithmetic, so
that a kernel in any language can repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.arguments import INTEGER_DTYPES, is_integer, is_scalar

_WORD = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9


@dataclass(frozen=True, eq=False)
class Dropout:
    """A rate and, if two calls must drop the same weights, a seed (an int or a tensor)."""

    rate: float
    seed: int | Tensor | None = None

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.seed is not None:
            _check_seed(self.seed)

    def seed_on(self, device: torch.device) -> Tensor:
        """The seed as an int64 tensor (), drawn from PyTorch's generator if there is none."""
        if self.seed is None:
            return draw_seed(device)
        if isinstance(self.seed, Tensor):
            return self.seed.reshape(()).to(device, torch.int64)
        signed = (int(self.seed) + 2**63) % 2**64 - 2**63  # the same 64 bits
        return torch.tensor(signed, device=device, dtype=torch.int64)


def check_rate(rate: float) -> None:
    """Raise ValueError unless 0 <= rate < 1."""
    if not is_scalar(rate) or not 0 <= float(rate) < 1:
        raise ValueError(f"dropout={rate!r} must be in [0, 1)")


def _check_seed(seed: object) -> None:
    """Raise ValueError unless seed is an integer of 64 bits, or a tensor of one integer."""
    if isinstance(seed, Tensor):
        fits = seed.numel() == 1 and seed.dtype in INTEGER_DTYPES
        kind = f"a {seed.dtype} tensor of shape {tuple(seed.shape)}"
    else:
        fits = is_integer(seed) and -(2**63) <= seed < 2**64
        kind = repr(seed)
    if not fits:
        raise ValueError(f"hw.Dropout's seed is {kind}; give an integer of 64 bits")


def draw_seed(device: torch.device) -> Tensor:
    """A new seed from PyTorch's generator, on the device, without synchronising."""
    return torch.randint(0, 2**31, (), device=device, dtype=torch.int64)


def row_hash(seed: Tensor, batch: Tensor, head: Tensor, row: Tensor) -> Tensor:
    """The hash of a query row; arguments broadcast, int64 that holds 32 bits."""
    word = mix(seed & _WORD ^ mix(seed >> 32 & _WORD))  # all 64 bits of the seed
    place = mix(word ^ mix(batch * _GOLDEN & _WORD) + head & _WORD)
    return mix(place + (row * _GOLDEN & _WORD) & _WORD)


def keep(rows: Tensor, column: Tensor, rate: float) -> Tensor:
    """The weights to keep: rows (..., N) from `row_hash`, column (M,) -> bool (..., N, M)."""
    return mix(rows[..., None] ^ (column * _GOLDEN & _WORD)) >= threshold(rate)


def threshold(rate: float) -> int:
    """The smallest hash that is kept."""
    return min(int(rate * 2**32), _WORD)


def mix(x: Tensor) -> Tensor:
    """A 32-bit integer mixer with low bias (xor-shift and multiply, twice)."""
    x = x ^ x >> 16
    x = x * 0x7FEB352D & _WORD
    x = x ^ x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16
