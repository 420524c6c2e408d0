"""Heads switched off, for importance and ablation."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headwise.nn.multi_head import MultiHeadAttention


class DroppedHeads:
    """What `drop_heads` returns: `restore()` puts the heads back as they were before."""

    def __init__(self, attn: MultiHeadAttention, before: Tensor | None) -> None:
        self._attn, self._before = attn, before

    def restore(self) -> None:
        """Put the heads back."""
        self._attn.head_gate = self._before

    def __enter__(self) -> DroppedHeads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def gate_without(gate: Tensor | None, dropped: Iterable[int], heads: int, like: Tensor) -> Tensor:
    """A gate (heads,) with zeros for what is dropped now or was before.

    >>> gate_without(None, [1], 3, torch.empty(0))
    tensor([1., 0., 1.])
    """
    chosen = list(dropped)
    for head in chosen:
        if not -heads <= head < heads:
            raise ValueError(f"there is no head {head}; this attention has heads 0 to {heads - 1}")
    gate = torch.ones(heads, device=like.device) if gate is None else gate.detach().clone()
    gate[chosen] = 0
    return gate
