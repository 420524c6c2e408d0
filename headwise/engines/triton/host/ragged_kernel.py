"""The launch of the kernel for packed requests over a paged pool."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import Launches
from headwise.engines.triton.host.operands import on, precision, tile_side, widened
from headwise.engines.triton.host.tile_shapes import Shape, fit
from headwise.engines.triton.kernels.ragged import observe_pages

FIGURES = (
    "lse", "max_logit", "top_prob", "entropy", "effective_keys", "participation", "logit_mean",
    "logit_var", "sink_mass", "self_mass", "previous_mass", "distance", "output_norm",
)  # fmt: skip
"""The statistics in the order in which the kernel writes them."""

LEAST, MOST = 16, 64  # rows of a tile: tensor cores take 16 at least


def power(size: int) -> int:
    """The next power of two."""
    return 1 << max(0, size - 1).bit_length()


def launch(batch: Any, look: bool, sink_keys: int, marks: Any) -> tuple[Tensor, Tensor]:
    """The output (T, Hq, Dv) of a `RaggedBatch`, and its figures (13, Hq, T)."""
    q, keys, values = batch.q, batch.keys, batch.values
    tokens, heads, width = q.shape
    group = heads // keys.shape[1]
    together = power(group)
    q, keys, values = widened(q, keys, values)
    out = q.new_zeros(tokens, heads, values.shape[2])
    figures = q.new_zeros(len(FIGURES) if look else 0, heads, tokens, dtype=torch.float32)
    if look:
        figures[:2] = -torch.inf  # padding is of no request
    seen = None if marks is None else marks.pages

    def cut(shape: Shape) -> None:
        most = min(MOST, shape.rows) // together
        share = max(LEAST // together, min(most, power(batch.longest)), 1)
        grid = (-(-batch.longest // share), keys.shape[1], len(batch.query_ends) - 1)
        Launches().start(
            observe_pages, grid, None,
            (q, keys, values, batch.sinks, batch.query_ends, batch.key_ends, batch.pages.entries,
            batch.pages.width, None if seen is None else seen.entries,
            0 if seen is None else seen.width, None if marks is None else marks.received,
            out, figures, batch.scale, batch.softcap or 1.0, group, heads, tokens, sink_keys,
            *q.stride()[:2], *keys.stride()[:2], *values.stride()[:2]), shape.warps, shape.stages,
            TOKENS=share, GROUP=together, KEYS=shape.keys, WIDTH=width,
            PADDED=tile_side(width), VALUES=values.shape[2],
            PADDED_VALUES=tile_side(values.shape[2]), PAGE=batch.pages.page,
            MARK_PAGE=1 if seen is None else seen.page, WINDOW=batch.window or 0,
            CAP=batch.softcap is not None, LOOK=look, PRECISION=precision(q.dtype),
        )  # fmt: skip

    with on(q.device):
        fit("pages", tile_side(max(width, values.shape[2])), q.itemsize, card(q.device), cut)
    return out.to(batch.q.dtype), figures
