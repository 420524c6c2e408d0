"""Bahdanau's attention: one head, a small network as the score, unprojected values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.api import observe
from headwise.checks import CheckedFields, Size, check_sizes, check_tensor
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.nn.caches.cache import Memory
from headwise.nn.call import Call, check_dtype
from headwise.score import Additive


@dataclass(frozen=True)
class Bahdanau(CheckedFields):
    """A description of additive attention that compares queries and keys in `width` dimensions."""

    width: Size

    def build(self, query_dim: int, key_dim: int) -> AdditiveAttention:
        """The module for queries and keys of these widths."""
        return AdditiveAttention(query_dim, key_dim, self.width)


class AdditiveAttention(nn.Module):
    """Σ_d w_d tanh(W_q q + W_k k)_d: queries (B, N, query_dim), keys (B, M, key_dim) -> (B, N, Dv).

    query_dim · width + key_dim · width + width parameters. The values are the keys unless others
    are given.

    >>> import torch, headwise as hw
    >>> attn = hw.nn.AdditiveAttention(query_dim=32, key_dim=48, width=24)
    >>> attn(torch.randn(2, 5, 32), torch.randn(2, 7, 48)).shape
    torch.Size([2, 5, 48])
    >>> sum(p.numel() for p in attn.parameters()) == 32 * 24 + 48 * 24 + 24
    True
    """

    def __init__(self, query_dim: int, key_dim: int, width: int) -> None:
        super().__init__()
        check_sizes(query_dim=query_dim, key_dim=key_dim, width=width)
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
        """Attend from queries (B, N, query_dim) to values (B, M, Dv), or the keys: (B, N, Dv)."""
        call = self.prepare(queries, keys, values, mask=mask)
        return self.join(call.attend())

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
        """The output of a call and the statistics of its one head, (B, 1, N)."""
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
        """The call of `hw.attention` that a forward makes, with one head."""
        check_tensor("queries", queries, "batch", "length", self.query.in_features)
        memory = keys if isinstance(keys, Memory) else self.remember(keys, values)
        check_dtype(self.query, queries=queries)
        q, score = self.query(queries)[:, None], Additive(self.weight)
        return Call(q, memory.keys, memory.values, Options(score, mask))

    def join(self, out: Tensor) -> Tensor:
        """Drop the axis of the one head: (B, 1, N, Dv) -> (B, N, Dv)."""
        return out[:, 0]

    def remember(self, keys: Tensor, values: Tensor | None = None) -> Memory:
        """Project keys (B, M, key_dim) once, for a decoder that attends to them at every step."""
        check_tensor("keys", keys, "batch", "length", self.key.in_features)
        if values is not None:
            check_tensor("values", values, *keys.shape[:2], "width")
        check_dtype(self.key, keys=keys, values=values)
        return Memory(self.key(keys)[:, None], (keys if values is None else values)[:, None])
