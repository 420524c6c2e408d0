"""Calls that other processes take over: those of a split sequence, and those of DTensors.

`headwise.distributed` says who takes over. Models, modules and watches ask here, so that they need
not know how a sequence is split.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from headwise.core.observation import Observation
from headwise.core.options import Options
from headwise.maps.attention_map import AttentionMap
from headwise.maps.effect_map import EffectMap


class SplitCalls(Protocol):
    """Takes over calls whose sequence is split between processes.

    `tokens` (B, N) bool is False where the whole sequence is padding, `padded_rows` is True where
    this process's part is; both are None without padding.
    """

    @property
    def tokens(self) -> Tensor | None: ...

    @property
    def padded_rows(self) -> Tensor | None: ...

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
        """`attention` of this process's rows."""
        ...

    def observe(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, **asked: Any
    ) -> tuple[Tensor, Observation]:
        """`observe` of this process's rows; `asked` are its stats, rows, sink_keys and spans."""
        ...

    def every(self, number: int) -> list[int]:
        """Return the number that each process gives."""
        ...

    def positions(self, lengths: list[int]) -> Tensor:
        """Return this process's positions, if the processes hold parts of these lengths."""
        ...

    def attention_map(
        self, q: Tensor, k: Tensor, options: Options, lse: Tensor | None
    ) -> AttentionMap:
        """`attention_map` of the whole sequence, for which every process must ask."""
        ...

    def effect_map(
        self, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, options: Options
    ) -> EffectMap:
        """`effect_map` of the whole sequence, for which every process must ask."""
        ...

    def index_loss(
        self,
        q: Tensor,
        k: Tensor,
        index_q: Tensor,
        index_k: Tensor,
        index_weights: Tensor,
        options: Options,
        selected: Tensor | None,
    ) -> Tensor:
        """`index_loss` of the whole sequence, with the gradients of this process's part."""
        ...


class ShardedCalls(Protocol):
    """Takes over calls whose tensors are DTensors."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, options: Options, **asked: Any) -> Tensor:
        """`attention`, a DTensor; `asked` are the arguments of `hw.distributed.attention`."""
        ...

    def observe(
        self, q: Tensor, k: Tensor, v: Tensor, options: Options, **asked: Any
    ) -> tuple[Tensor, Observation]:
        """`observe`, of DTensors; `asked` are its stats, rows, sink_keys and spans."""
        ...


_split: SplitCalls | None = None
_sharded: ShardedCalls | None = None


@contextmanager
def splitting(calls: SplitCalls | None) -> Iterator[None]:
    """Hand every call of `attention` and `observe` inside the block to `calls`; None to nobody."""
    global _split
    before, _split = _split, calls
    try:
        yield
    finally:
        _split = before


def serve_sharded(calls: ShardedCalls) -> None:
    """Hand every call whose tensors are DTensors to `calls`, from now on."""
    global _sharded
    _sharded = calls


def sharded(*tensors: object) -> ShardedCalls | None:
    """Return who takes over a call with these tensors; None unless one of them is a DTensor."""
    if all([type(x) is Tensor for x in tensors]):
        return None
    loaded = sys.modules.get("torch.distributed.tensor")  # if not, there is no DTensor
    if loaded is None or not any(isinstance(x, loaded.DTensor) for x in tensors):
        return None
    if _sharded is None:
        import_module("headwise.distributed")
    return _sharded


def taken_over(*tensors: object) -> SplitCalls | ShardedCalls | None:
    """Return who takes over a call with these tensors; None if it is computed here."""
    return sharded(*tensors) or _split


def split_calls() -> SplitCalls | None:
    """Return who takes over calls now, because their sequence is split between processes."""
    return _split


def held_positions(length: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the positions (length,) of the tokens held here, and the length of the sequence.

    Inside `splitting` these are this process's part of all positions, and every process must ask.

    >>> held_positions(3, torch.device("cpu"))
    (tensor([0, 1, 2]), 3)
    """
    if _split is None:
        return torch.arange(length, device=device), length
    lengths = _split.every(length)
    return _split.positions(lengths).to(device), sum(lengths)


def reached(positions: Tensor) -> Tensor | int | None:
    """Return the number after the largest position, of all processes inside `splitting`."""
    end = positions.max() + 1 if positions.numel() else None
    return end if _split is None else max(_split.every(0 if end is None else int(end)))
