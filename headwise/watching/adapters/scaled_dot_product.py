"""Reading a call of F.scaled_dot_product_attention, and remembering the masks that were read."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.core.mask_reading import read_mask, split_mask, traced_mask
from headwise.core.options import Options
from headwise.core.place import as_four_axes
from headwise.mask import Mask, causal, window
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters import traced_masks
from headwise.watching.recorder.seen_call import Kind

SCALED_DOT_PRODUCT = F.scaled_dot_product_attention
Made = TypeVar("Made")


class MaskMemo:
    """The masks read from the last few tensors: all layers of a model are given the same."""

    def __init__(self) -> None:
        self._made: list[tuple[weakref.ref[Tensor], int, tuple[object, ...], Any]] = []

    def recall(self, make: Callable[[], Made], tensor: Tensor, *options: object) -> Made:
        """The result of `make` for this tensor, unchanged since, and these options."""
        if torch.compiler.is_compiling():
            return traced_masks.recall(make, tensor, *options)
        if tensor.is_inference():
            return make()  # it does not count its changes
        for known, version, given, found in self._made:
            if known() is tensor and version == tensor._version and given == options:
                kept: Made = found
                return kept
        made = make()
        known = weakref.ref(tensor, self._forget)
        self._made = [*self._made[-3:], (known, tensor._version, options, made)]
        return made

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        self._made = [entry for entry in self._made if entry[0] is not gone]


def scaled_dot_product(
    memo: MaskMemo,
    heads: Callable[[Tensor], int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Call, Kind | None]:
    """Read a call of F.scaled_dot_product_attention; dropout does not change the statistics.

    `heads` tells how many heads queries (B · H, N, D) have. "cross" if all queries see the same
    keys, and there are not as many keys as queries.
    """
    count = heads(query) if query.ndim == 3 else 1
    q, k, v = (_with_heads(x.detach(), count) for x in (query, key, value))
    mask: Mask | None = None
    bias: Tensor | None = None
    if is_causal:  # PyTorch aligns it at the start, also where N ≠ M
        mask = (band if torch.compiler.is_compiling() else known_band)(True, 0, None)
    elif attn_mask is not None:
        mask, bias = _read_mask(memo, attn_mask, query, count)
    alike = not is_causal and (attn_mask is None or attn_mask.shape[-2:-1] == (1,))
    kind: Kind | None = "cross" if alike and lengths_differ(q, k) else None
    return Call(q, k, v, Options(as_dot(scale), mask, bias, dropout=dropout_p)), kind


def as_dot(scale: Any) -> Dot:
    """The score with this scale; most layers of most models have the same."""
    if torch.compiler.is_compiling() or not (scale is None or type(scale) is float):
        return Dot(scale)
    return _known_dot(scale)


_known_dot = functools.lru_cache(maxsize=256)(Dot)


def band(hides: bool, offset: int, width: int | None) -> Mask | None:
    """The mask that hides the keys after a query if so asked, and those `width` and more away."""
    mask = causal(offset) if hides else None
    if width is None:
        return mask
    reach = window(width - 1, 0 if hides else width - 1, offset)
    return reach if mask is None else mask & reach


known_band = functools.lru_cache(maxsize=256)(band)  # every call asks


def with_gradients(call: Call, *given: Any, **options: Any) -> Call:
    """A call read from these arguments of F.scaled_dot_product_attention, with their gradients."""
    named = dict(zip(("query", "key", "value", "attn_mask"), given, strict=False)) | options
    mask = named.get("attn_mask")
    if isinstance(mask, Tensor) and mask.requires_grad:
        raise ValueError("attention can't be changed where attn_mask has a gradient; detach it")
    count = call.q.shape[1]
    q, k, v = (_with_heads(named[name], count) for name in ("query", "key", "value"))
    return call._replace(q=q, k=k, v=v)


def lengths_differ(q: Tensor, k: Tensor) -> bool:
    """True if there are not as many queries (B, H, N, D) as keys, nor one: that is a next token."""
    return q.shape[2] > 1 and q.shape[2] != k.shape[2]


def _read_mask(
    memo: MaskMemo, given: Tensor, query: Tensor, heads: int
) -> tuple[Mask | None, Tensor | None]:
    """A mask tensor, True = may attend or added to the logits, as mask and bias."""

    def made() -> tuple[Mask | None, Tensor | None]:
        fitting = _with_four_axes(given.detach(), query, heads)
        if torch.compiler.is_compiling():
            return traced_mask(fitting, query.shape[-2])
        seen, bias = (fitting, None) if given.dtype == torch.bool else split_mask(fitting)
        # One row for several queries does not tell where they stand.
        return None if seen is None else read_mask(seen, seen.shape[-2] == query.shape[-2]), bias

    return memo.recall(made, given, query.ndim, query.shape[-2], heads)


def _with_heads(x: Tensor, heads: int) -> Tensor:
    """(..., H, N, D) with one batch axis; (B · H, N, D) has so many heads."""
    if x.ndim == 3:
        return x.reshape(-1, heads, *x.shape[1:])
    return x if x.ndim == 4 else x.reshape(-1, *x.shape[-3:])


def _with_four_axes(mask: Tensor, query: Tensor, heads: int) -> Tensor:
    """The mask of queries with three, four or more axes, with four axes."""
    if query.ndim == 3 and mask.ndim == 3:
        return mask[:, None] if len(mask) == 1 else mask.unflatten(0, (-1, heads))
    if query.ndim > 4 and mask.ndim > 4:
        mask = mask.expand(*query.shape[:-3], *mask.shape[-3:])
        return mask.reshape(-1, *mask.shape[-3:])
    return as_four_axes(mask)
