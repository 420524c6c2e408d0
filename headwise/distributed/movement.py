"""The choice of how keys move between ranks, and what it costs: bytes, steps and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.intervals import Mask
from headwise.core.problem import check_mask
from headwise.distributed.geometry import Geometry, geometry
from headwise.distributed.layouts import Contiguous, Layout, head_shares, imbalance, pairs
from headwise.distributed.ranges import size

MOVES = ("auto", "ranges", "ring", "gather", "ulysses")


class CallWidths(NamedTuple):
    """The sizes of a call that do not depend on its sequence."""

    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor) -> CallWidths:
        """Those of q (B, Hq, N, D), k (B, Hkv, M, D) and v (B, Hkv, M, Dv)."""
        return cls(q.shape[0], q.shape[1], k.shape[1], q.shape[3], v.shape[3])

    @property
    def each(self) -> int:
        """The numbers in one key and value of all heads and entries."""
        return self.batch * self.kv_heads * (self.width + self.value_width)


@dataclass(frozen=True)
class Movement:
    """The movement of one call's keys, in numbers per rank, for all heads and entries."""

    move: str  # "ranges", "ring", "gather" or "ulysses"
    why: str
    steps: int  # exchanges of the forward
    sent: tuple[int, ...]  # bytes that each rank sends in the forward
    returned: tuple[int, ...]  # bytes that it sends in the backward
    kept: tuple[int, ...]  # bytes of other ranks' positions that it holds at once
    pairs: tuple[int, ...] = ()  # visible pairs of its rows, per head; () if they weren't counted

    def __str__(self) -> str:
        held = "queries, keys and values" if self.move == "ulysses" else "keys and values"
        lines = [
            f"{self.move}: {self.why}",
            f"  steps       {self.steps}",
            f"  forward     {_bytes(max(self.sent))} sent by the busiest rank",
            f"  backward    {_bytes(max(self.returned))}",
            f"  held        {_bytes(max(self.kept))} of other ranks' {held}",
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
    if heads % (kv_heads or heads):
        raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
    layout, keys = layout or Contiguous(), length if keys is None else keys
    lengths = [
        tuple(size(ranges) for ranges in layout.pieces(total, ranks)) for total in (length, keys)
    ]
    found = geometry(mask, batch, heads, lengths[0], lengths[1], layout)
    widths = CallWidths(batch, heads, kv_heads or heads, width, value_width or width)
    work = pairs(mask, length, ranks, layout, keys)
    chosen, why = choose_move(found, move, widths, dtype)
    return movement(found, chosen, why, widths, dtype, tuple(work))


def movement(
    found: Geometry,
    chosen: str,
    why: str,
    widths: CallWidths,
    dtype: torch.dtype,
    work: tuple[int, ...] = (),
) -> Movement:
    """The movement of a call in the chosen way."""
    if chosen == "ulysses":
        return _by_heads(found, why, widths, dtype, work)
    found = found.everything() if chosen == "gather" else found
    ranks = range(len(found.rows))
    wider = torch.promote_types(dtype, torch.float32)
    narrow, wide = widths.each * dtype.itemsize, widths.each * wider.itemsize
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


def _by_heads(
    found: Geometry, why: str, widths: CallWidths, dtype: torch.dtype, work: tuple[int, ...]
) -> Movement:
    """The movement of a call whose ranks exchange positions for heads, and the results back."""
    batch, heads, kv_heads, width, value_width = widths
    rows, keys = ([size(held) for held in each] for each in (found.rows, found.keys))
    shares = head_shares(heads, kv_heads, len(rows))
    mine = [share.queries[1] - share.queries[0] for share in shares]
    key_heads = [share.keys[1] - share.keys[0] for share in shares]
    unit = dtype.itemsize
    shared = sum(key_heads) > kv_heads  # then gradients of keys are added up, in wider numbers
    wide = torch.promote_types(dtype, torch.float32).itemsize if shared else unit
    sent, returned, kept = [], [], []
    for r in range(len(rows)):
        of_others, of_other_keys = sum(mine) - mine[r], sum(key_heads) - key_heads[r]
        far, far_keys = sum(rows) - rows[r], sum(keys) - keys[r]
        queries, out = of_others * rows[r] * width, mine[r] * far * value_width
        pairs_given = of_other_keys * keys[r] * (width + value_width)
        sent.append(batch * unit * (queries + pairs_given + out))
        out_grads, query_grads = of_others * rows[r] * value_width, mine[r] * far * width
        key_grads = key_heads[r] * far_keys * (width + value_width)
        returned.append(batch * (unit * (out_grads + query_grads) + wide * key_grads))
        kept.append(batch * unit * (query_grads + key_grads))
    work = tuple(sum(work) * n // max(1, heads) for n in mine) if work else ()
    alone = len(rows) == 1
    return Movement(
        "ulysses", why, 0 if alone else 2, tuple(sent), tuple(returned), tuple(kept), work
    )


def choose_move(
    found: Geometry, move: str, widths: CallWidths, dtype: torch.dtype, biased: bool = False
) -> tuple[str, str]:
    """The way to move keys, and why; every rank chooses the same. `biased` by a tensor."""
    if move != "auto":
        return move, "it was requested"
    ranks = range(len(found.rows))
    room = 2 * max((size(keys) for keys in found.keys), default=0)  # as much as a ring holds
    most = max(sum(size(found.moves(r, o)) for o in ranks if o != r) for r in ranks)
    if most <= room:
        return "ranges", "the ranges that rows see fit in two parts of the sequence"
    if widths.kv_heads % len(found.rows) == 0 and not biased:  # a bias would have to move too
        plans = [movement(found, way, "", widths, dtype) for way in ("ulysses", "ring")]
        by_heads, ring = (max(map(sum, zip(x.sent, x.returned, strict=True))) for x in plans)
        if by_heads < ring:
            return "ulysses", "heads divide among the ranks, which moves less than a ring of keys"
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
