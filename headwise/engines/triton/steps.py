"""A plain step of decoding, worked out once for its shapes: then two launches and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headwise.engines.triton.cards import INTERPRETING, card
from headwise.engines.triton.decoding import NOTHING_HELD, processors, shares, tile
from headwise.engines.triton.launch import WORD, on, stride_unit
from headwise.engines.triton.split import Held, merge_step, split_step

Grid = tuple[int, int, int]


class Step:
    """Few queries (B, Hq, N, D) against many keys and values, as a cache keeps them.

    A call needs pointers that are multiples of 16 bytes: the kernels are compiled for such.
    """

    def __init__(
        self,
        q: torch.Size,
        k: torch.Size,  # (B, Hkv, any, D), or (pages, Hkv, page, D)
        length: int,  # keys of each batch entry
        strides: tuple[int, ...],  # of q, k and v, three each, and of scales and pages
        dtype: torch.dtype,
        itemsize: int,  # of keys and values
        device: torch.device,
        scale: float,
        causal: bool,
        paged: bool,
    ) -> None:
        batch, heads, queries, width = q
        key_heads = k[1]
        group = heads // key_heads
        rows = max(16, 1 << (group * queries - 1).bit_length())
        block, warps, stages = tile(width, itemsize, rows)
        splits = shares(batch * key_heads, -(-length // block), processors(device))
        chained = not INTERPRETING and card(device).major >= 9
        unit = stride_unit(strides[:9], 16)
        self.shape, self.dtype, self.device = q, dtype, device
        self.parts = batch * heads * queries * splits
        self.room = self.parts * (width + 2)
        self.fits = max(*strides, self.room) < WORD
        numbers = [stride // unit for stride in strides[:9]]
        self.numbers = (
            self.parts, *numbers, *strides[9:], splits, queries, length, group, scale
        )  # fmt: skip
        self.constants = {
            "ROWS": rows, "KEYS": block, "WIDTH": width, "UNIT": unit,
            "PAGE": k[2] if paged else 0, "CAUSAL": causal, "CHAINED": chained,
        }  # fmt: skip
        self.launched = {"num_warps": warps, "num_stages": stages, "launch_pdl": chained}
        self.grid: Grid = (splits, key_heads, batch)
        part = min(width, 64)
        self.merged = (self.parts, splits)
        self.merging = {
            "SPLITS": 1 << (splits - 1).bit_length(), "VALUES": width, "BLOCK": part,
            "CHAINED": chained,
        }  # fmt: skip
        self.lines: Grid = (batch * heads * queries, width // part, 1)
        self.first: Callable[..., Any] | None = None
        self.second: Callable[..., Any] | None = None
        self.tails = (tuple(self.constants.values()), tuple(self.merging.values()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, held: Held = NOTHING_HELD) -> Tensor:
        """out (B, Hq, N, D)."""
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with on(self.device):
                return self._run(q, k, v, held)
        return self._run(q, k, v, held)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, held: Held) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        mixed = torch.empty(self.room, dtype=torch.float32, device=self.device)
        if self.first is None or self.second is None:
            return self._compile(q, k, v, held, mixed, out)
        self.first(q, k, v, held, mixed, *self.numbers, *self.tails[0])
        self.second(mixed, out, *self.merged, *self.tails[1])
        return out

    def _compile(
        self, q: Tensor, k: Tensor, v: Tensor, held: Held, mixed: Tensor, out: Tensor
    ) -> Tensor:
        """The same by Triton's own launch, whose compiled kernels are kept."""
        first = split_step[self.grid](
            q, k, v, held, mixed, *self.numbers, **self.constants, **self.launched
        )
        second = merge_step[self.lines](
            mixed, out, *self.merged, **self.merging, num_warps=2,
            launch_pdl=self.constants["CHAINED"],
        )  # fmt: skip
        if not INTERPRETING:
            self.first, self.second = first[self.grid], second[self.lines]
        return out
