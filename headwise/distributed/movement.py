"""The choice of how keys move between ranks, and what it costs: bytes, steps and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headwise.core.intervals import Mask
from headwise.core.problem import check_mask
from headwise.distributed.geometry import Geometry, geometry
from headwise.distributed.layouts import Contiguous, Layout, imbalance, pairs
from headwise.distributed.ranges import size

MOVES = ("auto", "ranges", "ring", "gather")


@dataclass(frozen=True)
class Movement:
    """How one call's keys move between ranks; numbers are per rank, for all heads and entries."""

    move: str  # "ranges", "ring" or "gather"
    why: str
    steps: int  # exchanges of the forward
    sent: tuple[int, ...]  # bytes of keys and values that each rank sends in the forward
    returned: tuple[int, ...]  # bytes that it sends in the backward
    kept: tuple[int, ...]  # bytes of other ranks' keys and values that it holds at once
    pairs: tuple[int, ...] = ()  # visible pairs of its rows, per head; () if they weren't counted

    def __str__(self) -> str:
        lines = [
            f"{self.move}: {self.why}",
            f"  steps       {self.steps}",
            f"  forward     {_bytes(max(self.sent))} sent by the busiest rank",
            f"  backward    {_bytes(max(self.returned))}",
            f"  held        {_bytes(max(self.kept))} of other ranks' keys and values",
        ]
        if self.pairs:
            uneven = imbalance(self.pairs)
            lines.append(f"  work        the busiest rank has {uneven:.2f} times the mean of pairs")
        return "\n".join(lines)


def explain(
    length: int,
    ranks: int,
    *,
    mask: Mask | None = None,
    layout: Layout | None = None,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int | None = None,
    width: int = 128,
    value_width: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    keys: int | None = None,
    move: str = "auto",
) -> Movement:
    """Return how a call would move its keys, and the bytes: computed, without any process.

    >>> import headwise as hw
    >>> window = hw.mask.causal() & hw.mask.window(1023)
    >>> print(explain(131072, 8, mask=window, heads=32, kv_heads=8))
    ranges: the ranges that rows see fit in two parts of the sequence
      steps       1
      forward     4.0 MiB sent by the busiest rank
      backward    8.0 MiB
      held        4.0 MiB of other ranks' keys and values
      work        the busiest rank has 1.00 times the mean of pairs
    """
    check_move(move)
    check_mask(mask)
    layout, keys = layout or Contiguous(), length if keys is None else keys
    lengths = [
        tuple(size(ranges) for ranges in layout.pieces(total, ranks)) for total in (length, keys)
    ]
    found = geometry(mask, batch, heads, lengths[0], lengths[1], layout)
    each = batch * (kv_heads or heads) * (width + (value_width or width))
    work = pairs(mask, length, ranks, layout, keys)
    return movement(found, move, each, dtype, tuple(work))


def movement(
    found: Geometry, move: str, each: int, dtype: torch.dtype, work: tuple[int, ...] = ()
) -> Movement:
    """The movement of a call; one key and value of all heads and entries have `each` numbers."""
    chosen, why = choose_move(found, move)
    found = found.everything() if chosen == "gather" else found
    ranks = range(len(found.rows))
    narrow, wide = each * dtype.itemsize, each * torch.promote_types(dtype, torch.float32).itemsize
    if chosen == "ring":
        parts = [size(keys) for keys in found.keys]
        passed = [sum(parts) - parts[(r + 1) % len(parts)] for r in ranks]  # all but the next one's
        alone = len(parts) == 1
        sent = tuple(0 if alone else n * narrow for n in passed)
        home = tuple(0 if alone else sum(parts) * wide for _ in ranks)
        returned = tuple(a + b for a, b in zip(sent, home, strict=True))
        kept = tuple(0 if alone else 2 * max(parts) * narrow for _ in ranks)
        return Movement(chosen, why, len(parts) - 1, sent, returned, kept, work)
    moved = [[0 if o == r else size(found.moves(r, o)) for o in ranks] for r in ranks]
    sent = tuple(sum(moved[r][o] for r in ranks) * narrow for o in ranks)
    received = [sum(moved[r]) for r in ranks]
    returned = tuple(n * wide for n in received)
    kept = tuple(n * narrow for n in received)
    return Movement(chosen, why, int(any(received)), sent, returned, kept, work)


def choose_move(found: Geometry, move: str) -> tuple[str, str]:
    """The way to move keys, and why; every rank chooses the same."""
    if move != "auto":
        return move, "it was requested"
    ranks = range(len(found.rows))
    room = 2 * max((size(keys) for keys in found.keys), default=0)  # as much as a ring holds
    most = max(sum(size(found.moves(r, o)) for o in ranks if o != r) for r in ranks)
    if most <= room:
        return "ranges", "the ranges that rows see fit in two parts of the sequence"
    return "ring", "some rows see more than two parts of the sequence, and a ring holds two at once"


def check_move(move: object) -> None:
    """Raise ValueError unless `move` names a way to move keys."""
    if move not in MOVES:
        raise ValueError(f"move={move!r} is unknown; choose from {', '.join(map(repr, MOVES))}")


def _bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:.1f} {unit}" if unit != "B" else f"{count} B"
        count /= 1024  # type: ignore[assignment]
    raise AssertionError
