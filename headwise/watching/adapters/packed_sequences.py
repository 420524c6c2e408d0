"""Sequences that are packed into one row, as flash attention takes them, as a mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headwise import mask as masks
from headwise.core.intervals import Mask
from headwise.watching.adapters.scaled_dot_product import MaskMemo

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""The options of transformers' attention functions that pack sequences, if all are given."""


def packed(ends: Tensor, ends_of_keys: Tensor, rows: int, length: int) -> Mask:
    """The mask of sequences that end at these tokens, (sequences + 1,), of rows one by one.

    ValueError unless they are the same for queries and keys, and each lies in one row.
    """
    looking = not torch.compiler.is_compiling()  # compiled code can't look into a tensor
    if ends is not ends_of_keys and not (looking and torch.equal(ends, ends_of_keys)):
        more = "" if looking else ", as far as compiled code can tell"
        raise ValueError(f"its packed queries and keys are of different lengths{more}")
    tokens = torch.arange(rows * length, device=ends.device, dtype=ends.dtype)
    numbers = torch.searchsorted(ends, tokens, right=True).reshape(rows, length)
    if looking and int(ends[-1]) != rows * length:
        raise ValueError(
            f"its packed sequences have {int(ends[-1])} tokens, and it has {rows * length}"
        )
    if rows > 1 and not (looking and bool((numbers[1:, 0] != numbers[:-1, -1]).all())):
        raise ValueError("its packed sequences go on from one row of the batch to the next")
    return masks.documents(numbers)


def by_lengths(options: Mapping[str, Any], q: Tensor, k: Tensor, memo: MaskMemo) -> Mask | None:
    """The mask of q and k (B, H, N, D) that cu_seq_lens pack; None if they do not."""
    ends, of_keys, *longest = (options.get(name) for name in LENGTHS)
    if not isinstance(ends, Tensor) or not isinstance(of_keys, Tensor):
        return None
    if any(x is None for x in longest):
        return None
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            f"its sequences are packed by cu_seq_lens, and it has {q.shape[2]} queries and "
            f"{k.shape[2]} keys; use no cache"
        )
    rows, length = q.shape[0], q.shape[2]

    def made() -> Mask:
        return packed(ends, of_keys, rows, length)

    if of_keys.is_inference():
        return made()
    return memo.recall(made, ends, _Unchanged(of_keys), rows, length)


class _Unchanged:
    """A tensor, equal to itself as long as nobody writes into it."""

    def __init__(self, x: Tensor) -> None:
        self.tensor, self.version = x, x._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Unchanged) and (
            self.tensor is other.tensor and self.version == other.version
        )

    __hash__ = None  # type: ignore[assignment]


def by_positions(positions: object, q: Tensor, k: Tensor, memo: MaskMemo) -> Mask | None:
    """The mask of one row whose positions start again; None if they do not."""
    if not isinstance(positions, Tensor) or positions.ndim != 2 or q.shape[0] != 1:
        return None
    if not positions.shape[1] == q.shape[2] == k.shape[2] or q.shape[2] == 1:
        return None
    if torch.compiler.is_compiling():
        raise ValueError("its position_ids may start again, and compiled code can't look into them")

    def made() -> Mask | None:
        begins = positions == positions.min()
        return masks.documents(begins.cumsum(-1)) if int(begins.sum()) > 1 else None

    return memo.recall(made, positions, "positions")
