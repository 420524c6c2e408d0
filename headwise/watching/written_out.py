"""Attention that a module writes out: a softmax whose result is multiplied with values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.stretches import read, split

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset(
    (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
)
PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.einsum)
)
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead")


@dataclass
class WrittenOut:
    """The softmaxes of a module that runs, until their results meet the values.

    The logits that entered the softmax are all there is to know, so a call has them as its bias,
    and queries and keys of zeros. They take the memory that the model takes itself.
    """

    waiting: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """By the identity of a result: the result itself, so that it lives on, and the logits."""

    def softmax(self, out: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """A softmax over the last axis of (B, H, N, M) or (B, N, M) was computed."""
        logits = given[0] if given else options.get("input")
        axis = given[1] if len(given) > 1 else options.get("dim", -1)
        if isinstance(logits, Tensor) and logits.ndim in (3, 4) and axis in (-1, logits.ndim - 1):
            self.waiting[id(out)] = out, logits.detach()

    def follow(self, out: Any, given: tuple[Any, ...]) -> None:
        """Something was made of a result: dropout, another dtype, another shape."""
        if isinstance(out, Tensor) and given and id(given[0]) in self.waiting:
            kept, logits = self.waiting[id(given[0])]
            if out is not kept and out.numel() == kept.numel():
                self.waiting[id(out)] = out, logits

    def product(self, module: nn.Module, name: str, given: tuple[Any, ...]) -> Call | None:
        """The call, where a result is multiplied with values; None: this is another product."""
        written = isinstance(given[0], str)  # einsum
        operands = given[1:] if written else given
        operands = operands[0] if len(operands) == 1 else operands
        if len(operands) != 2:
            return None
        weights, values = operands
        found = self.waiting.pop(id(weights), None)
        if found is None or not isinstance(values, Tensor):
            return None
        self.waiting.clear()
        logits = found[1]
        if logits.ndim == 3:
            logits = logits.unflatten(0, (-1, _heads(module, logits.shape[0])))
        batch, heads, queries, keys = logits.shape
        v = values.detach()
        if v.ndim == 3 and v.shape[:2] == (batch * heads, keys):
            v = v.unflatten(0, (batch, heads))
        if v.ndim != 4 or v.shape[2] != keys or heads % v.shape[1] or v.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} ({type(module).__name__}) writes its attention out, and headwise can't "
                f"tell its values: logits {tuple(logits.shape)}, values {tuple(values.shape)}. "
                f"({batch}, {heads}, {keys}, width) would work"
            )
        seen, bias = split(logits)
        nothing = logits.new_zeros(batch, heads, max(queries, keys), 1)
        return Call(
            nothing[:, :, :queries],
            nothing[:, :, :keys],
            v.expand(batch, heads, *v.shape[2:]).to(logits.dtype),
            Dot(1.0),
            None if seen is None else read(seen),
            bias,
            None,
            None,
            0.0,
            "auto",
        )


def _heads(module: nn.Module, entries: int) -> int:
    """How many heads a module says it has, where (B · H, N, M) logits can be of so many."""
    for name in _HEADS:
        heads = getattr(module, name, None)
        if isinstance(heads, int) and heads > 0 and entries % heads == 0:
            return heads
    return 1
