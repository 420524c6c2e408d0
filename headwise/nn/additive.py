"""Bahdanau's attention: one head, a small network as the score, the values as they come."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.api import attention, observe
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.nn.caches.cache import Memory
from headwise.nn.call import Call
from headwise.score import Additive


@dataclass(frozen=True)
class Bahdanau:
    """A model's wish for additive attention that compares in `width` dimensions."""

    width: int

    def build(self, query_dim: int, key_dim: int) -> AdditiveAttention:
        """The module for queries and keys of these widths."""
        return AdditiveAttention(query_dim, key_dim, self.width)


class AdditiveAttention(nn.Module):
    """Σ_d w_d tanh(W_q q + W_k k)_d: queries (B, N, query_dim), keys (B, M, key_dim) -> (B, N, Dv).

    query_dim · width + key_dim · width + width parameters. The values are the keys themselves
    unless others are given.

    >>> import torch, headwise as hw
    >>> attn = hw.nn.AdditiveAttention(query_dim=32, key_dim=48, width=24)
    >>> attn(torch.randn(2, 5, 32), torch.randn(2, 7, 48)).shape
    torch.Size([2, 5, 48])
    >>> sum(p.numel() for p in attn.parameters()) == 32 * 24 + 48 * 24 + 24
    True
    """

    def __init__(self, query_dim: int, key_dim: int, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(query_dim, width, bias=False)
        self.key = nn.Linear(key_dim, width, bias=False)
        self.weight = nn.Parameter(torch.empty(width))
        nn.init.uniform_(self.weight, -(width**-0.5), width**-0.5)

    def forward(
        self,
        queries: Tensor,
        keys: Tensor | Memory,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
    ) -> Tensor:
        """What each query sees in the values (B, M, Dv), by default the keys: (B, N, Dv)."""
        call = self.prepare(queries, keys, values, mask=mask)
        return self.join(attention(call.q, call.k, call.v, **call.options()))

    def observe(
        self,
        queries: Tensor,
        keys: Tensor | Memory,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
        stats: Iterable[str] | None = None,
        rows: int | Tensor | None = None,
    ) -> tuple[Tensor, Observation]:
        """What a call returns, and what its one head did: statistics are (B, 1, N)."""
        call = self.prepare(queries, keys, values, mask=mask)
        out, seen = observe(call.q, call.k, call.v, **call.options(), stats=stats, rows=rows)
        return self.join(out), seen

    def prepare(
        self,
        queries: Tensor,
        keys: Tensor | Memory,
        values: Tensor | None = None,
        *,
        mask: Mask | None = None,
    ) -> Call:
        """What a call hands to `hw.attention`: one head."""
        memory = keys if isinstance(keys, Memory) else self.remember(keys, values)
        q, score = self.query(queries)[:, None], Additive(self.weight)
        return Call(q, memory.keys, memory.values, score, mask, None, None, None, 0.0, "auto")

    def join(self, out: Tensor) -> Tensor:
        """The one head's output (B, 1, N, Dv) without its axis."""
        return out[:, 0]

    def remember(self, keys: Tensor, values: Tensor | None = None) -> Memory:
        """Project keys (B, M, key_dim) once, for a decoder that asks at every step."""
        return Memory(self.key(keys)[:, None], (keys if values is None else values)[:, None])
