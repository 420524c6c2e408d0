"""Masks: the keys that a query may see, as one or two intervals of keys per query row.

Masks refer to positions in the whole sequence. A `Place` is where a call's queries and keys are in
it, so cached decoding, chunks and splits are not special cases.

>>> import headwise as hw
>>> from headwise.core.place import Place
>>> place = Place(batch=1, heads=1, queries=3, keys=3)
>>> (hw.mask.causal() & hw.mask.window(1)).to_dense(place)[0, 0].int()
tensor([[1, 0, 0],
        [1, 1, 0],
        [0, 1, 1]], dtype=torch.int32)
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.arguments import as_int, as_tensor, integers, is_integer
from headwise.core.intervals import FURTHEST, Mask
from headwise.core.patterns import (
    Between,
    Causal,
    Dense,
    Documents,
    Lengths,
    PerBatch,
    Window,
)

__all__ = [
    "Mask", "between", "causal", "dense", "documents", "lengths", "prefix", "window",
]  # fmt: skip


def causal(offset: PerBatch | None = None) -> Mask:
    """Query i sees keys j <= i + offset; without an offset, queries and keys align at the end.

    offset is an int, or one per batch entry (B,).
    """
    return Causal(_offset("causal(offset)", offset))


def window(left: int, right: int = 0, offset: PerBatch | None = None) -> Mask:
    """Query i sees keys i + offset - left <= j <= i + offset + right.

    A sliding window of 9 keys that ends at the query is `causal() & window(8)`.
    """
    if not is_integer(left) or not is_integer(right):
        raise ValueError(f"hw.mask.window(left={left!r}, right={right!r}) takes integers")
    left, right = as_int(left), as_int(right)
    if left + right < 0:
        raise ValueError(f"hw.mask.window(left={left}, right={right}) shows no key to any query")
    return Window(left, right, _offset("window(..., offset)", offset))


def prefix(p: PerBatch) -> Mask:
    """Every query sees keys j < p. A prefix language model is `causal() | prefix(p)`."""
    return Lengths(integers("hw.mask.prefix(p)", p), "prefix")


def lengths(n: PerBatch) -> Mask:
    """Every query of batch entry b sees keys j < n[b]: right padding. n is (B,)."""
    return Lengths(integers("hw.mask.lengths(n)", n))


def between(first: Tensor, last: Tensor) -> Mask:
    """Query i sees keys first <= j < last; tensors broadcast to (B, Hq, N)."""
    first, last = (integers("hw.mask.between(first, last)", bound) for bound in (first, last))
    return Between(torch.as_tensor(first), torch.as_tensor(last))


def documents(ids: Tensor) -> Mask:
    """A query sees its own document only. ids (B|1, M); a change of id starts a document."""
    return Documents(as_tensor("hw.mask.documents(ids)", ids))


def dense(seen: Tensor) -> Mask:
    """Any boolean tensor, True = may attend, broadcast to (B, Hq, N, M)."""
    seen = as_tensor("hw.mask.dense(seen)", seen)
    if seen.dtype != torch.bool:
        raise ValueError(
            f"hw.mask.dense takes a bool tensor (True = may attend), not {seen.dtype}; "
            "a tensor that is added to the logits goes into bias="
        )
    return Dense(seen)


def _offset(call: str, offset: PerBatch | None) -> PerBatch | None:
    if offset is None:
        return None
    offset = integers(f"hw.mask.{call}", offset)
    if isinstance(offset, int) and abs(offset) > FURTHEST:
        raise ValueError(f"hw.mask.{call}: an offset of {offset} is beyond 2**30")
    return offset
