"""Mean and variance of plain logits without visiting pairs: when it applies, and the launches.

Rows that see every key get both from the mean and the scatter matrix of the keys. Causal rows get
them from whole blocks of keys in this way; the forward's loop takes the keys past those blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.core.row_sums import RowResults
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.launches import Launches, kind_of
from headwise.engines.triton.host.operands import Operands, described
from headwise.engines.triton.host.tile_shapes import TENSOR_MEMORY
from headwise.engines.triton.kernels.interpreter import INTERPRETING
from headwise.engines.triton.kernels.key_scatter import VECTORS, join_blocks, scatter_of_blocks
from headwise.engines.triton.kernels.row_moments import moments_of_rows
from headwise.engines.triton.limits import GRID

SCRATCH = 36 << 20  # bytes of scratch memory: heads that do not fit are processed later
ROOM = 220_000  # bytes of shared memory that the tiles need
REGISTERS = 128  # per thread of `scatter_of_blocks`: two programs share a multiprocessor
# With fewer keys per row, rows per key head or multiplications in q·k, the loop is faster.
LEAST_KEYS, LEAST_ROWS = 32, 16  # per head dimension
LEAST = 1 << 35


@dataclass(frozen=True)
class Cut:
    """The block and tile sizes of the moments kernels."""

    block: int  # keys per block
    whole_block: int  # keys per block, if every row sees all keys
    tile: int  # keys of a block that are loaded at once
    block_warps: int
    part: int  # rows of a scatter matrix that one program joins
    ahead: int  # blocks that it loads ahead
    rows: int  # query rows per tile
    warps: int
    stages: int


INTERPRETED = Cut(64, 64, 32, 4, 8, 1, 32, 4, 1)  # so that small problems have several blocks
CUTS = {  # by the padded width of a head
    64: Cut(512, 1024, 64, 4, 8, 4, 64, 4, 3),
    128: Cut(1024, 1024, 64, 8, 8, 4, 64, 4, 3),
}


def cut_of(call: Operands, least_keys: int | None = None) -> Cut | None:
    """Return the sizes for a call's moments, or None if the loop over pairs must take them.

    `least_keys` replaces LEAST_KEYS, the keys that a row must see per head dimension.
    """
    q, terms, sizes = call.q, call.terms, call.sizes
    looped = call.chooses or terms.intervals is not None or terms.dense is not None
    if not terms.plain or looped:
        return None
    if sizes.low > 1 - sizes.queries or sizes.queries - 1 + sizes.high < 1:
        return None  # a window, or no visible key
    if None in call.steps[:2]:
        return None
    if INTERPRETING:
        return INTERPRETED
    found = card(q.device)
    if q.dtype == torch.float32 or found.shared < ROOM or found.major in TENSOR_MEMORY:
        return None  # Triton 3.7 can't compile `scatter_of_blocks` for tensor memory
    padded, keys = call.padded[0], sizes.keys
    if sizes.high < keys:  # the average over rows
        keys = (max(sizes.high, 0) + min(keys, sizes.queries + sizes.high)) // 2
    least = LEAST_KEYS if least_keys is None else least_keys
    if keys < least * padded or sizes.queries * sizes.group < LEAST_ROWS * padded:
        return None
    few = q.shape[0] * q.shape[1] * sizes.queries * keys * padded < LEAST
    return None if few else CUTS.get(padded)


def run_moments(
    launches: Launches,
    call: Operands,
    flags: dict[str, Any],
    cut: Cut,
    rest: Tensor | None,
    at_once: int,
    found: RowResults,
) -> None:
    """Write logit_mean, logit_var and visible.

    `rest` (2, B, Hq, N) holds mean and sum of squares of the logits past the whole blocks, from a
    forward with `at_once` rows per tile; None if all rows see all keys.
    """
    q, k, sizes, padded = call.q, call.k, call.sizes, flags["PADDED"]
    keys, reach, first = sizes.keys, 0, 0
    block = cut.whole_block
    stretches = -(-sizes.queries // block)
    if rest is not None:
        reach, block = sizes.high, cut.block
        keys = min(keys, sizes.queries - 1 + reach)
        k = k if keys == sizes.keys else k[:, :, :keys]  # the others are hidden from all rows
        first = reach // block
        last = (sizes.queries - 1) // at_once * at_once + reach
        stretches = last // block - first + 1
    slots = -(-keys // block) + 1
    half = torch.float32 if INTERPRETING else torch.bfloat16  # the interpreter has no bfloat16
    lines, heads = k.shape[0] * k.shape[1], k.shape[1]
    fit = max(1, SCRATCH // (2 * half.itemsize * slots * padded * padded))
    fit = max(1, min(fit, GRID // sizes.group))
    together = -(-lines // -(-lines // fit))  # heads per turn, in even turns
    vectors = q.new_empty(VECTORS, together, slots, padded, dtype=torch.float32)
    scatters = q.new_empty(2, together, slots, padded, padded, dtype=half)
    launches.allocated(vectors, scatters)
    _, (k_, q_) = described((k, q), (call.steps[1], call.steps[0]), (cut.tile, cut.rows))
    kind = kind_of(call, (), rest is None)
    shared = {"BLOCK": block, "PADDED": padded}
    for line in range(0, lines, together):
        now = min(together, lines - line)
        launches.start(
            scatter_of_blocks, (slots - 1, now, 1), kind,
            (k_, keys, heads, line, slots, vectors, scatters), cut.block_warps, 3,
            TILE=cut.tile, WIDTH=flags["WIDTH"], maxnreg=REGISTERS, **shared,
        )  # fmt: skip
        launches.start(
            join_blocks, (padded // cut.part, now, 1), kind, (keys, slots, vectors, scatters), 4,
            1, ROWS=cut.part, WHOLE=rest is None, AHEAD=cut.ahead, **shared,
        )  # fmt: skip
        launches.start(
            moments_of_rows, (stretches, now * sizes.group, 1), kind,
            (q_, k_, sizes.queries, keys, sizes.group, reach, first, heads, line, slots,
            sizes.scale, vectors, scatters, *((None, None) if rest is None else rest),
            found.logit_mean, found.logit_var, found.visible),
            cut.warps, cut.stages, AT_ONCE=at_once, ROWS=cut.rows, KEYS=cut.tile,
            WIDTH=flags["WIDTH"], **shared,
        )  # fmt: skip
