"""A plain step of decoding, worked out once for its shapes: then two launches and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from headwise.engines.tape import Made
from headwise.engines.triton.host.cards import INTERPRETING, card
from headwise.engines.triton.host.decoding_call import (
    NOTHING_HELD,
    SPLITS,
    processors,
    shares,
    tile,
    tile_rows,
)
from headwise.engines.triton.host.launches import launcher
from headwise.engines.triton.host.operands import GRID, WORD, on, stride_unit
from headwise.engines.triton.host.tile_shapes import Shape, fit
from headwise.engines.triton.kernels.split_keys import Held, merge_step, split_step

Grid = tuple[int, int, int]
made = lru_cache(maxsize=1024)(Made)  # steps of many lengths allocate the same


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
        self.group = heads // k[1]
        self.key_heads, self.length, self.scale = k[1], length, scale
        self.shape, self.device, self.out = q, device, made(q, dtype, device)
        self.rows = tile_rows(self.group * queries)
        self.tile = tile(width, itemsize, self.rows, device)
        self.chained = not INTERPRETING and card(device).major >= 9
        self.unit = stride_unit(strides[:9], 16)
        self.strides = (*(stride // self.unit for stride in strides[:9]), *strides[9:])
        self.page, self.causal = k[2] if paged else 0, causal
        room = batch * heads * queries * SPLITS * (width + 2)  # however the keys are cut
        self.fits = max(*strides, room) < WORD and max(batch, heads) <= GRID
        self.first: Callable[..., Any] | None = None
        self.second: Callable[..., Any] | None = None

    def _cut(self, shape: Shape) -> None:
        """Work out the launches with a tile of this shape."""
        batch, heads, queries, width = self.shape
        blocks, chained = -(-self.length // shape.keys), self.chained
        splits = shares(batch * self.key_heads, blocks, processors(self.device))
        parts = batch * heads * queries * splits
        self.parts = made((parts * (width + 2),), torch.float32, self.device)
        self.numbers = (
            parts, *self.strides, splits, queries, self.length, self.group, self.scale
        )  # fmt: skip
        self.constants = {
            "ROWS": self.rows, "KEYS": shape.keys, "WIDTH": width, "UNIT": self.unit,
            "PAGE": self.page, "CAUSAL": self.causal, "CHAINED": chained,
        }  # fmt: skip
        self.launched = {
            "num_warps": shape.warps, "num_stages": shape.stages, "launch_pdl": chained,
        }  # fmt: skip
        self.grid: Grid = (splits, self.key_heads, batch)
        part = min(width, 64)
        self.merged = (parts, splits)
        self.merging = {
            "SPLITS": 1 << (splits - 1).bit_length(), "VALUES": width, "BLOCK": part,
            "CHAINED": chained,
        }  # fmt: skip
        self.lines: Grid = (batch * heads * queries, width // part, 1)
        self.tails = (tuple(self.constants.values()), tuple(self.merging.values()))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, held: Held = NOTHING_HELD) -> Tensor:
        """out (B, Hq, N, D)."""
        if self.device.type == "cuda" and self.device.index != torch._C._cuda_getDevice():
            with on(self.device):
                return self._run(q, k, v, held)
        return self._run(q, k, v, held)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, held: Held) -> Tensor:
        out = self.out.of()
        if self.first is None or self.second is None:
            fit(*self.tile, partial(self._compile, q, k, v, held, out))
            return out
        mixed = self.parts.of()
        self.first(q, k, v, held, mixed, *self.numbers, *self.tails[0])
        self.second(mixed, out, *self.merged, *self.tails[1])
        return out

    def _compile(
        self, q: Tensor, k: Tensor, v: Tensor, held: Held, out: Tensor, shape: Shape
    ) -> None:
        """The same by Triton's own launch, whose compiled kernels are kept."""
        self._cut(shape)
        mixed = self.parts.of()
        first = split_step[self.grid](
            q, k, v, held, mixed, *self.numbers, **self.constants, **self.launched
        )
        second = merge_step[self.lines](
            mixed, out, *self.merged, **self.merging, num_warps=2,
            launch_pdl=self.constants["CHAINED"],
        )  # fmt: skip
        if not INTERPRETING:
            self.first, self.second = launcher(first, self.grid), launcher(second, self.lines)
