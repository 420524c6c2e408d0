"""The bits of the keys that rows keep, for so many rows at a time that memory stays linear."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.engines.triton.host.launches import launching
from headwise.engines.triton.host.operands import on
from headwise.engines.triton.kernels.kept_runs import MOST_RUNS, Marks, best_runs, mark

WORDS = 1 << 26  # that are held at a time
ROWS = 128  # rows of a part are a multiple of it
SIZE = 1024  # entries per program


def marked(numbers: Tensor, run: int, rows: int, keys: int) -> Iterator[tuple[slice, Marks]]:
    """Some rows after the others, and the marks of the runs that they keep.

    numbers (B|1, Hq|1, N|1, count): of runs of `run` keys, negative ones for none.
    """
    batch, heads, own, _ = numbers.shape
    width = -(-keys // (32 * run))
    step = rows
    if own > 1:
        step = max(ROWS, WORDS // max(1, batch * heads * width) // ROWS * ROWS)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        some = numbers[:, :, part] if own > 1 else numbers
        yield part, Marks(_words(some.contiguous(), run, keys, width), run)


def _words(numbers: Tensor, run: int, keys: int, width: int) -> Tensor:
    """The marks of these runs, (B|1, Hq|1, N|1, width)."""
    words = numbers.new_zeros(*numbers.shape[:3], width, dtype=torch.int32)
    total, count = numbers.numel(), numbers.shape[3]
    if total:
        with on(numbers.device), launching(mark):
            mark[(-(-total // SIZE),)](
                numbers, words, total, count, -(-keys // run), width, SIZE=SIZE
            )
    return words


def best_of(scores: Tensor, counts: Tensor, most: int) -> Tensor:
    """The numbers of each row's best runs, (B, Hq, N, most) int32, -1 for none.

    scores (B, Hq, N, runs), counts (1,) or (Hq,); of equal scores the first run.
    """
    batch, heads, rows, runs = scores.shape
    if runs > MOST_RUNS:
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        late = torch.arange(most, device=scores.device) >= counts.reshape(-1, 1, 1)
        none = late | (best[..., :most] == -torch.inf)
        return order[..., :most].masked_fill(none, -1).int()
    numbers = torch.full((batch, heads, rows, most), -1, dtype=torch.int32, device=scores.device)
    if numbers.numel():
        size = max(32, 1 << (runs - 1).bit_length())
        with on(scores.device), launching(best_runs):
            best_runs[(batch * heads * rows,)](
                scores.float().contiguous(), counts.contiguous(), numbers, runs, most, heads, rows,
                int(len(counts) > 1), SIZE=size, num_warps=min(8, max(1, size // 256)),
            )  # fmt: skip
    return numbers
