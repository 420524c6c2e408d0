"""Masks of the compiled region that is being traced: each is read once, for all its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headwise.core.mask_reading import TracedDense
from headwise.core.observation import sample_rows
from headwise.watching.adapters.traced_graph import is_in_main_graph
from headwise.watching.adapters.traced_rules import read_rule

Made = TypeVar("Made")

# The compiler loses what is assigned to a global object after a call such as flex_attention; it
# follows lists.
RUNNING: list[nn.Module | None] = []
"""The modules whose forwards are being traced; None where an adapter reads a call already."""
_read: list[tuple[Tensor, tuple[object, ...], Any]] = []
_rows: list[tuple[tuple[int, int], torch.device, Tensor | None]] = []


def forget() -> None:
    """The region has been traced."""
    _read.clear()
    _rows.clear()


def recall(make: Callable[[], Made], tensor: Tensor, *options: object) -> Made:
    """The result of `make` for this tensor and these options, in a region that is being traced."""
    for known, given, found in _read:
        if known is tensor and (not given or given == options):
            kept: Made = found
            return kept
    made = make()
    # What the body of a checkpoint computes is not there for the next one.
    if RUNNING and is_in_main_graph():
        _read.append((tensor, options, made))
    return made


def note(tensor: object, named: dict[str, Any]) -> None:
    """Remember what is known of a mask (B, 1, N, M) from the keywords that transformers made it of.

    A mask without padding need not be read from its tensor; with padding (B, tokens), that says
    which rows and keys are hidden.
    """
    if not RUNNING or not isinstance(tensor, Tensor) or tensor.ndim != 4 or "q_length" not in named:
        return
    if isinstance(named.get("q_offset"), Tensor) or named.get("use_vmap") or not is_in_main_graph():
        return
    batch, _, queries, keys = tensor.shape
    key, padding = named.get("kv_offset", 0), named.get("attention_mask")
    rule = read_rule(named["mask_function"], batch, key, keys, tensor.device)
    if rule is None:
        return
    offset, mask = named.get("q_offset", 0) - key, None
    if padding is None:
        mask = rule.mask(offset, queries, keys)
    elif rule.groups is None and padding.ndim == 2 and padding.shape[1] >= key + keys:
        mask = padded_mask(tensor, padding[:, key : key + keys].bool(), rule.shows_all)
    if mask is not None:
        _read.append((tensor, (), (mask, None)))


def padded_mask(tensor: Tensor, shown: Tensor, only: bool = False) -> TracedDense:
    """The mask of a tensor (B, 1, N, M) that hides padding, shown (B, M) bool, and maybe more."""
    shown = shown[:, None]
    if only:
        return TracedDense.of(shown[:, :, None], shown)
    return TracedDense.of(tensor if tensor.dtype == torch.bool else tensor >= 0, shown)


def sampled(rows: int, queries: int, device: torch.device) -> Tensor | None:
    """The rows to look at, computed once for all layers; None for all."""
    for known, given, found in _rows:
        if known == (rows, queries) and given == device:
            return found
    found = sample_rows(rows, queries, device)
    if RUNNING and is_in_main_graph():
        _rows.append(((rows, queries), device, found))
    return found
