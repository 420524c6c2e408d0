"""Statistics of many rows added to a board: sums, counts and extremes per head, in one launch."""

# A kernel is Triton's language, not Python's: its arguments have no Python types.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def larger(a, b):
    """Return the larger of two numbers; NaN if one of them is NaN."""
    return tl.where((a != a) | (b != b), float("nan"), tl.maximum(a, b))


@triton.jit
def add_rows(
    board, slot, values, sums, extremes, signs, highest, padding, proof, batch, heads, rows,
    columns, width, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the rows of one head to one column of its slot, and to that of its extreme if it has one.

    board float64 (slots, columns, width), values and highest float32 (batch, heads, rows), padding
    uint8 (batch, rows). The first program of a head counts its rows and takes the proof; each of
    the others has one of the values, whose columns are in `sums` and `extremes` (0 for none), the
    extreme being the largest of value times sign.
    """
    h, mine = tl.program_id(0).to(tl.int64), tl.program_id(1)
    x, column, extreme, sign = highest, 0, 0, 1
    for i in tl.static_range(COUNT):
        if mine == i + 1:
            x, column, extreme, sign = values[i], sums[i], extremes[i], signs[i]
    total = tl.zeros([BLOCK], tl.float64)
    largest = tl.full([BLOCK], NOTHING, tl.float32)
    unknown = tl.zeros([BLOCK], tl.int32)
    for b in range(batch):
        start = (b * heads + h) * rows
        for first in range(0, rows, BLOCK):
            n = first + tl.arange(0, BLOCK)
            counted = tl.load(highest + start + n, mask=n < rows, other=NOTHING) != NOTHING
            if padding is not None:
                left_out = tl.load(padding + b * rows + n, mask=n < rows, other=1)
                counted = counted & (left_out == 0)
            found = tl.load(x + start + n, mask=counted, other=0.0)
            found = tl.where(mine == 0, 1.0, found)
            total += tl.where(counted, found, 0.0).to(tl.float64)
            unknown = tl.maximum(unknown, (counted & (found != found)).to(tl.int32))
            largest = tl.maximum(largest, tl.where(counted, found * sign, NOTHING))
    place = board + tl.load(slot) * columns * width + h
    tl.store(place + column * width, tl.load(place + column * width) + tl.sum(total, 0))
    if extreme > 0:
        most = tl.max(largest, 0).to(tl.float64)
        most = tl.where(tl.max(unknown, 0) > 0, float("nan"), most)
        at = place + extreme * width
        tl.store(at, larger(tl.load(at), most))
    if proof is not None:  # noqa: SIM102 (the compiler knows the first)
        if mine == 0:
            at = place + (columns - 1) * width
            tl.store(at, larger(tl.load(at), tl.load(proof)))
