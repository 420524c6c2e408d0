"""Switching heads off, for ablation and for measuring importance."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Protocol

import torch
from torch import Tensor

from headwise.core.arguments import is_integer
from headwise.core.problem import describe


class Gated(Protocol):
    """A layer that multiplies each head's output by its entry of a gate (heads,), if it has one."""

    head_gate: Tensor | None


class DroppedHeads:
    """The heads that `drop_heads` switched off; `restore()` switches them on again."""

    def __init__(self, layer: Gated, before: Tensor | None) -> None:
        self._layer, self._before = layer, before

    def restore(self) -> None:
        """Put the gate back as it was before."""
        self._layer.head_gate = self._before

    def __enter__(self) -> DroppedHeads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()


def gate_without(
    gate: Tensor | None, dropped: int | Iterable[int] | Tensor, heads: int, like: Tensor
) -> Tensor:
    """A gate (heads,) with zeros for the heads dropped now or before, on the device of `like`.

    >>> gate_without(None, [1], 3, torch.empty(0))
    tensor([1., 0., 1.])
    """
    if isinstance(dropped, Tensor):
        dropped = dropped.flatten().tolist()
    if is_integer(dropped):
        chosen = [dropped]
    elif isinstance(dropped, Iterable):
        chosen = list(dropped)
    else:
        raise ValueError(f"drop_heads takes the numbers of heads, not {describe(dropped)}")
    for head in chosen:
        if not is_integer(head) or not -heads <= head < heads:
            raise ValueError(
                f"there is no head {head!r}; this attention has heads 0 to {heads - 1}"
            )
    gate = torch.ones(heads, device=like.device) if gate is None else gate.detach().clone()
    gate[chosen] = 0
    return gate
