"""The operations that are timed to measure a machine: their sizes, and the attention calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.api import attention
from headwise.costs.machines.clock import Run
from headwise.mask import causal


@dataclass(frozen=True)
class TrialSizes:
    """The sizes of what is measured: large enough to fill the device, small enough to be quick."""

    square: int  # of the matrix product that shows the rate
    products: tuple[tuple[int, int, int], ...]  # m, n, k
    tokens: int  # batch · length of an attention call
    model: int  # heads · width
    widths: tuple[int, ...]
    lengths: tuple[int, int]
    cache: int  # numbers in the keys of a decoding call
    sequences: int  # among which these keys are divided
    stream: int  # numbers in a tensor beyond every cache
    tile: tuple[int, int]
    rounds: int
    slice: float  # seconds of a timed slice


CPU = TrialSizes(
    square=1536,
    products=(
        (640, 640, 640),
        (1024, 1536, 768),
        (1536, 96, 1536),
        (1, 4096, 3072),
        (24, 1536, 2048),
    ),
    tokens=1536,
    model=256,
    widths=(32, 64, 96, 128),
    lengths=(384, 1536),
    cache=6 << 20,
    sequences=1,
    stream=32 << 20,
    tile=(256, 512),
    rounds=7,
    slice=0.02,
)
CUDA = TrialSizes(
    square=8192,
    products=(
        (6144, 6144, 6144),
        (12288, 5120, 2048),
        (3072, 20480, 5120),
        (16384, 3072, 3072),
        (24576, 1536, 2560),
        (1, 16384, 12288),
    ),
    tokens=12288,
    model=2048,
    widths=(32, 64, 96, 128, 256),
    lengths=(1536, 6144),
    cache=512 << 20,
    sequences=16,
    stream=512 << 20,
    tile=(128, 128),
    rounds=7,
    slice=0.01,
)


@dataclass(frozen=True)
class Trial:
    """An attention call to time."""

    width: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int

    @property
    def rows(self) -> float:
        """Query rows of all heads."""
        return float(self.batch * self.heads * self.queries)

    @property
    def pairs(self) -> float:
        """Pairs of all heads; every key is visible."""
        return self.rows * self.keys

    @property
    def stored(self) -> float:
        """Numbers in the keys and values."""
        return 2.0 * self.batch * self.kv_heads * self.keys * self.width

    def tensors(self, where: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v."""
        q = torch.randn(self.batch, self.heads, self.queries, self.width, device=where)
        k, v = torch.randn(
            2, self.batch, self.kv_heads, self.keys, self.width, device=where
        ).unbind()
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def forward(self, where: torch.device, dtype: torch.dtype) -> Run:
        """The call; a single query is causal, as in decoding."""
        q, k, v = self.tensors(where, dtype)
        mask = causal() if self.queries == 1 else None
        return lambda: attention(q, k, v, mask=mask)

    def backward(self, where: torch.device, dtype: torch.dtype) -> Run:
        """The backward of the call."""
        leaves = self.tensors(where, dtype)
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves)
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)
