"""One piece of work on a device, with the counts that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from headwise.core.intervals import Mask

Kind = Literal["matmul", "attention", "softmax", "norm", "elementwise", "embedding", "convolution"]


@dataclass(frozen=True)
class MatmulShape:
    """`batch` products of an (m, k) and a (k, n) matrix."""

    m: int
    n: int
    k: int
    batch: int = 1


@dataclass(frozen=True)
class AttentionShape:
    """A fused attention call: q (batch, heads, queries, head_dim), k and v with kv_heads and keys.

    `pairs` and `executed_pairs` are totals over the batch and the query heads: those that the mask
    shows, and those in the tiles that a kernel visits. `mask` is None if every pair is visible.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    pairs: int
    executed_pairs: int
    mask: Mask | None = field(default=None, compare=False)
    softcap: bool = False
    additive: bool = False  # Σ w tanh(q + k), which no matrix product computes


@dataclass(frozen=True)
class Kernel:
    """One kernel, run `count` times; every other number is for a single run.

    `flops` are multiplications and additions of visible pairs, two per multiply-add, and only those
    of matrix products, convolutions and additive scores; `flops_dense` count every pair, and
    `flops_executed` all that the kernel computes: whole tiles, and in the backward of fused
    attention the recomputed scores. `special` counts exponentials, tanh, erf and sigmoids.

    >>> Kernel("out", "matmul", flops=16, bytes_read=24, shape=MatmulShape(2, 2, 2)).flops_dense
    16
    """

    name: str  # the path of its part, such as layers.attention.query
    kind: Kind
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    special: int = 0
    count: int = 1
    dtype: str = "bf16"
    shape: MatmulShape | AttentionShape | None = None
    backward: bool = False
    flops_dense: int = -1  # -1: as many as `flops`
    flops_executed: int = -1

    def __post_init__(self) -> None:
        for name in ("flops_dense", "flops_executed"):
            if getattr(self, name) < 0:
                object.__setattr__(self, name, self.flops)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written by one run."""
        return self.bytes_read + self.bytes_written
