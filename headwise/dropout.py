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
    """A rate and, if two calls must drop the same weights, a seed (an int or a tensor).

    `first` numbers the call's first batch entry and query head, where it is part of a larger one.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 4, 5, 8).unbind(0)
    >>> whole = hw.attention(q, k, v, dropout=hw.Dropout(0.5, seed=1))
    >>> half = [x[:, 2:] for x in (q, k, v)]
    >>> part = hw.attention(*half, dropout=hw.Dropout(0.5, seed=1, first=(0, 2)))
    >>> torch.allclose(part, whole[:, 2:])
    True
    """

    rate: float
    seed: int | Tensor | None = None
    first: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        check_rate(self.rate)
        if self.seed is not None:
            _check_seed(self.seed)
        place: tuple[object, ...] = self.first
        if len(place) != 2 or not all(is_integer(x) and x >= 0 for x in place):
            raise ValueError(
                f"hw.Dropout's first is {self.first!r}; give the numbers of the first batch entry "
                "and query head"
            )

    def seed_on(self, device: torch.device) -> Tensor:
        """The seed as int64 (), drawn from PyTorch's generator if there is none.

        If the call is part of a larger one it is (3,): the seed, the first batch entry and head.
        """
        if self.seed is None:
            seed = draw_seed(device)
        elif isinstance(self.seed, Tensor):
            seed = self.seed.reshape(()).to(device, torch.int64)
        else:
            signed = (int(self.seed) + 2**63) % 2**64 - 2**63  # the same 64 bits
            seed = torch.tensor(signed, device=device, dtype=torch.int64)
        if self.first == (0, 0):
            return seed
        return torch.cat((seed[None], torch.tensor(self.first, device=device)))


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
    """The hash of a query row; arguments broadcast, int64 that holds 32 bits.

    seed: (), or (3,) with the numbers of the call's first batch entry and head.
    """
    if seed.ndim:
        seed, first_batch, first_head = seed.unbind()
        batch, head = batch + first_batch, head + first_head
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
