"""The kernels of chosen keys: which runs of neighbouring keys rank highest, and a bit for each.

Attention over chosen keys goes through all of them and looks up a bit, which for each row takes one
32nd of a number per run: products of whole tiles are faster than gathering what a row keeps.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: no-check-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from headwise.engines.triton.kernels.tile import NOTHING

MOST_RUNS = 1 << 14  # that `best_runs` holds on chip


class Marks(NamedTuple):
    """A bit for each run of keys that a row keeps, as `Given` takes it."""

    words: Tensor  # (B|1, Hq|1, N|1, W) int32
    run: int  # keys per bit


@triton.jit(do_not_specialize=["total", "count", "runs", "width"])
def mark(numbers, words, total, count, runs, width, SIZE: tl.constexpr):
    """Set the bits of the runs that each line names.

    numbers (lines, count), others than 0 <= n < runs name none; words (lines, width) is zero.
    """
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    here = place < total
    number = tl.load(numbers + place, mask=here, other=-1)
    here = here & (number >= 0) & (number < runs)
    number = tl.where(here, number, 0).to(tl.int32)
    bit = tl.full([SIZE], 1, tl.int32) << (number & 31)
    tl.atomic_or(words + place // count * width + (number >> 5), bit, mask=here, sem="relaxed")


@triton.jit(do_not_specialize=["runs", "most", "heads", "rows", "step"])
def best_runs(scores, counts, numbers, runs, most, heads, rows, step, SIZE: tl.constexpr):
    """Write the numbers of the runs with a line's largest scores; of equal ones the earliest.

    scores (lines, runs) float32, -inf for a run that must not be chosen; numbers (lines, most); a
    line is a row of one of `heads` heads, which have counts[head · step] runs each.
    """
    line = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, SIZE)
    s = tl.load(scores + line * runs + n, mask=n < runs, other=NOTHING)
    # As unsigned integers that are in the same order: NaN first, 0 and −0 equal.
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(s != s, 0x7FFFFFFF, bits)
    key = bits.to(tl.uint32, bitcast=True) ^ tl.full([SIZE], 0x80000000, tl.uint32)
    there = s != NOTHING
    key = tl.where(there, key, 0)
    count = tl.load(counts + line // rows % heads * step).to(tl.int32)
    count = tl.minimum(count, tl.sum(there.to(tl.int32), 0))
    edge = tl.zeros([1], tl.uint32)  # the largest number that `count` keys reach
    for n_bit in tl.static_range(32):
        trial = edge | tl.full([1], 1 << (31 - n_bit), tl.uint32)
        enough = tl.sum((key >= trial).to(tl.int32), 0) >= count
        edge = tl.where(enough, trial, edge)
    above = key > edge
    equal = (key == edge) & there
    room = count - tl.sum(above.to(tl.int32), 0)
    chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), 0) <= room))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(numbers + line * most + place, n, mask=chosen)
