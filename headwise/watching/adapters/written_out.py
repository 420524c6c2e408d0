"""Attention that a module writes out: a softmax whose result is multiplied with values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.core.mask_reading import HIDDEN, read_mask, without_hidden
from headwise.nn.call import Call
from headwise.score import Dot
from headwise.watching.adapters.product_axes import Product, of_einsum, of_matmul, weighs

SOFTMAXES: frozenset[Callable[..., Any]] = frozenset(
    (torch.softmax, F.softmax, Tensor.softmax, torch.special.softmax)
)
PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, torch.einsum)
)
_DROPOUTS = frozenset((F.dropout, torch.dropout))
_LAYOUTS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in (
        *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"),
        *("transpose", "permute", "movedim", "swapaxes"),
    )
    if hasattr(owner, name)
) | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nheads", "nhead", "h")
FURTHER = 1e3
"""A logit that lies so far below the largest of its row has the weight 0, and was hidden."""


@dataclass(frozen=True)
class Softmax:
    """A softmax over the last axis, and what was made of it since."""

    result: Tensor  # itself, so that it lives on, and no other tensor gets its identity
    logits: Tensor
    dropped: bool = False  # some of its weights were

    def followed(
        self, function: Callable[..., Any], given: tuple[Any, ...], options: Mapping[str, Any]
    ) -> Tensor | None:
        """The logits where a function changed the layout of the weights; None: not by rows."""
        shape = self.logits.shape
        probe = function(torch.empty(shape, device="meta"), *given[1:], **options)
        if probe.shape[-1] != shape[-1] or (probe.numel() and probe.stride(-1) != 1):
            return None  # a row is no longer the last axis
        made: Tensor = function(self.logits, *given[1:], **options)
        return made


@dataclass(frozen=True)
class Found:
    """An attention that was written out: the call, and how its product laid out the heads."""

    call: Call
    product: Product
    exact: bool  # no weight was dropped


@dataclass
class WrittenOut:
    """The softmaxes of a module that runs, until their results meet the values.

    The logits that entered the softmax are all there is to know, so a call has them as its bias,
    and queries and keys of zeros.
    """

    waiting: dict[int, Softmax] = field(default_factory=dict)  # by the identity of a result

    def softmax(self, out: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        """A softmax over the last axis of (B, H, N, M) or (B, N, M) was computed."""
        logits = given[0] if given else options.get("input")
        axis = given[1] if len(given) > 1 else options.get("dim", -1)
        if isinstance(logits, Tensor) and logits.ndim in (3, 4) and axis in (-1, logits.ndim - 1):
            self.waiting[id(out)] = Softmax(out, logits.detach())

    def follow(
        self,
        function: Callable[..., Any],
        out: Any,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        """Something was made of a result: dropout, another dtype, another shape."""
        known = self.waiting.get(id(given[0])) if given else None
        if known is None or not isinstance(out, Tensor):
            return
        dropped = known.dropped or (function in _DROPOUTS and _drops(*given, **options))
        if function in _LAYOUTS and out is not known.result:
            logits = known.followed(function, given, options)
            if logits is not None:
                self.waiting[id(out)] = Softmax(out, logits, dropped)
        elif out.shape == known.result.shape:
            self.waiting[id(out)] = Softmax(out, known.logits, dropped)

    def product(
        self, module: nn.Module, name: str, given: tuple[Any, ...], sizes: tuple[int, ...]
    ) -> Found | None:
        """The call, where a result is multiplied with values; None: this is another product.

        `sizes` are those of what the model was called with, (B, N, ...) or (N, B, ...).
        """
        written = given[0] if isinstance(given[0], str) else None  # einsum
        operands = given if written is None else given[1:]
        operands = operands[0] if len(operands) == 1 else operands
        if len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
            return None
        first = id(operands[0]) in self.waiting
        if not first and (written is None or id(operands[1]) not in self.waiting):
            return None
        weights, values = operands if first else reversed(operands)
        if values.ndim < 3:
            return None  # the same for all: a matrix of weights, such as an embedding
        if written is not None and not weighs(written, first):
            return None
        known = self.waiting[id(weights)]
        self.waiting.clear()
        if written is None:
            product = of_matmul(weights.ndim, values.ndim)
        else:
            product = of_einsum(written, known.logits.ndim, values.ndim, first)
        if product is not None and _heads_lead(module, product, known.logits, sizes):
            product = product.swapped()
        made = None if product is None else product.arranged(known.logits, values.detach())
        if product is None or made is None:
            raise ValueError(_unclear(module, name, known.logits, values))
        logits, v = made
        if logits.ndim == 3:
            heads = _heads(module, name, logits, sizes)
            logits = logits.unflatten(0, (-1, heads))
            v = v.expand(logits.shape[0] * heads, -1, -1).unflatten(0, (-1, heads))
        return Found(from_logits(logits, v), product, not known.dropped)


def _drops(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **options: bool
) -> bool:
    """Whether a dropout with these arguments drops anything."""
    return p > 0 and options.get("train", training)


def from_logits(logits: Tensor, v: Tensor) -> Call:
    """Attention with these logits (B, H, N, M) and values (B|1, H|1, M, D)."""
    batch, heads, queries, keys = logits.shape
    largest = logits.amax(-1, keepdim=True)
    hidden = (logits <= HIDDEN) | (logits < largest - FURTHER)
    seen, bias = without_hidden(logits, ~hidden)  # NaN hides nothing
    nothing = logits.new_zeros(batch, heads, max(queries, keys), 1)
    return Call(
        nothing[:, :, :queries],
        nothing[:, :, :keys],
        v.expand(batch, heads, *v.shape[2:]).to(logits.dtype),
        Dot(1.0),
        None if seen is None else read_mask(seen),
        bias,
        None,
        None,
        0.0,
        "auto",
    )


def _stated(module: nn.Module) -> list[int]:
    """How many heads a module says it has, by any of the names that are usual."""
    found = (getattr(module, name, None) for name in _HEADS)
    return [heads for heads in found if isinstance(heads, int) and heads > 0]


def _heads_lead(
    module: nn.Module, product: Product, logits: Tensor, sizes: tuple[int, ...]
) -> bool:
    """Whether what was read as (B, H, N, M) is (H, B, N, M): its module or its input say so.

    Where there are as many heads as sequences, nobody can say it.
    """
    size = dict(zip(product.weights, logits.shape, strict=True))
    if "h" not in size or size["b"] == size["h"]:
        return False
    batch, heads, queries = size["b"], size["h"], size["q"]
    stated = _stated(module)
    if (batch in stated) != (heads in stated):
        return batch in stated and sizes[:2] not in ((batch, queries), (queries, batch))
    return sizes[:2] in ((heads, queries), (queries, heads))


def _heads(module: nn.Module, name: str, logits: Tensor, sizes: tuple[int, ...]) -> int:
    """How many heads (B · H, N, M) logits are of; ValueError where nobody says it."""
    entries = logits.shape[0]
    for heads in _stated(module):
        if entries % heads == 0:
            return heads
    if sizes[:1] == (entries,) or sizes[:2] == (logits.shape[1], entries):
        return 1  # (B, N, ...) or (N, B, ...)
    raise ValueError(
        f"{name or 'the model'} ({type(module).__name__}) writes its attention out, and headwise "
        f"can't tell how many heads its logits {tuple(logits.shape)} are of; its attribute "
        "num_heads would say it"
    )


def _unclear(module: nn.Module, name: str, logits: Tensor, values: Tensor) -> str:
    return (
        f"{name or 'the model'} ({type(module).__name__}) writes its attention out, and headwise "
        f"can't tell its values: logits {tuple(logits.shape)}, values {tuple(values.shape)}. "
        "(B, H, N, M) and (B, H, M, width) would work"
    )
