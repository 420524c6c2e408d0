"""Attention whose weights are learned directly and are the same for every input."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.api import observe
from headwise.checks import check_flag, check_integers, check_sizes, check_tensor
from headwise.core.intervals import Mask
from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.core.problem import check_mask
from headwise.engines.plan import check_engine
from headwise.handover import held_positions
from headwise.nn.caches.cache import Cache, RollbackOnError, check_cache
from headwise.nn.call import Call, check_dtype
from headwise.nn.layer_options import Widths
from headwise.score import Dot


class FixedAttention(nn.Module):
    """A learned logit per head and pair of positions up to `length`; no queries, no keys.

    x (B, N, d_model) -> (B, N, d_model), N <= length. Values and output are projected as usual:
    2 d_model² + 2 d_model + heads · length² parameters.

    >>> import torch, headwise as hw
    >>> attn = hw.nn.FixedAttention(64, 8, length=16, mask=hw.mask.causal())
    >>> attn(torch.randn(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    >>> sum(p.numel() for p in attn.parameters()) == 2 * 64**2 + 2 * 64 + 8 * 16**2
    True
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        length: int,
        *,
        bias: bool = True,
        mask: Mask | None = None,
        engine: str = "auto",
    ) -> None:
        super().__init__()
        check_sizes(length=length)
        Widths.of(d_model, heads)  # which checks that they divide
        check_flag("bias", bias)
        check_mask(mask)
        check_engine(engine)
        self.d_model, self.heads, self.length = d_model, heads, length
        self.mask, self.engine = mask, engine
        self.value = nn.Linear(d_model, d_model, bias=bias)
        self.out = nn.Linear(d_model, d_model, bias=bias)
        self.logits = nn.Parameter(torch.zeros(heads, length, length))  # starts as the average

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """x (B, N, d_model) -> (B, N, d_model); `positions` (N,) if x does not simply continue."""
        call = self.prepare(x, mask=mask, cache=cache, positions=positions)
        with RollbackOnError(cache, x.shape[1]):
            out = call.attend()
        return self.join(out)

    def observe(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
        stats: Iterable[str] | None = None,
        rows: int | Tensor | None = None,
    ) -> tuple[Tensor, Observation]:
        """The output of a call and the statistics of each head, as from `hw.observe`."""
        call = self.prepare(x, mask=mask, cache=cache, positions=positions)
        with RollbackOnError(cache, x.shape[1]):
            out, seen = observe(call.q, call.k, call.v, **call.options(), stats=stats, rows=rows)
        return self.join(out), seen

    def prepare(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        cache: Cache | None = None,
        positions: Tensor | None = None,
    ) -> Call:
        """The call of `hw.attention` that a forward makes: scores of 0, the logits as a bias."""
        check_tensor("x", x, "batch", "length", self.d_model)
        check_dtype(self.value, x=x)
        check_cache(cache)
        v = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, N, D)
        zeros = v.new_zeros(()).expand(*v.shape[:3], 1)
        start, queries = 0 if cache is None else cache.length, x.shape[1]
        at, whole = held_positions(queries, x.device)
        columns = start + whole if isinstance(start, int) else self.length
        if columns > self.length:
            raise ValueError(
                f"{columns} positions are more than the {self.length} that have learned weights; "
                f"use FixedAttention(..., length={columns})"
            )
        if positions is None:
            positions = at + start
        check_integers("positions", positions, 0, self.length - 1, queries)
        bias = self.logits.index_select(1, positions)[None, ..., :columns]  # (1, H, N, M)
        mask = self.mask if mask is None else mask if self.mask is None else self.mask & mask
        check_mask(mask)
        k = zeros
        if cache is not None:
            k, v = cache.append(k, v)
            with RollbackOnError(cache, queries):
                if not isinstance(start, int):  # a FixedCache returns all its room
                    bias = F.pad(bias, (0, k.shape[2] - columns))
                bias, mask = cache.place_bias(bias), cache.place(mask, queries)
        return Call(zeros, k, v, Options(Dot(), mask, bias, engine=self.engine))

    def join(self, out: Tensor) -> Tensor:
        """Concatenate the heads' outputs (B, H, N, D) and apply the output projection."""
        joined: Tensor = self.out(out.transpose(1, 2).flatten(2))
        return joined
