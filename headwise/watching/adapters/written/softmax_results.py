"""Results of a softmax, and what functions make of them before they meet values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.watching.adapters.written.softmax_rows import Move, SoftmaxRows, replayed

Function = Callable[..., Any]


def _named(*names: str) -> frozenset[Function]:
    """The functions of these names in torch, as methods, and in torch.nn.functional."""
    owners = (torch, Tensor, F, torch.special)
    return frozenset(getattr(x, name) for name in names for x in owners if hasattr(x, name))


SOFTMAXES = _named("softmax")
LOGARITHMS = _named("log_softmax")
EXPONENTIALS = _named("exp")
STARTS = SOFTMAXES | LOGARITHMS | EXPONENTIALS
"""The functions with which weights begin."""

SUMS = _named("sum")
QUOTIENTS = _named("div", "true_divide", "divide", "div_", "__truediv__", "__itruediv__")
TIMES = _named("mul", "multiply", "__mul__", "__rmul__")
PRODUCTS = _named("matmul", "bmm", "mm", "einsum", "__matmul__", "__rmatmul__")
ADDED = _named("baddbmm", "addmm")
DROPOUTS = _named("dropout", "dropout_", "alpha_dropout")
LAYOUTS = _named(
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "__getitem__"),
    *("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t"),
) | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
CUTS = _named(
    *("pad", "narrow", "expand", "repeat", "index_select", "roll", "flip", "cat", "as_strided"),
    *("gather", "unfold", "repeat_interleave", "concat", "tile", "broadcast_to", "select"),
)
"""Functions after which weights are still weights, and rows may not be whole."""
STORED = _named("as_strided")
"""Those of them whose result depends on how the weights lie in memory."""


@dataclass(eq=False)
class Origin:
    """A softmax: the modules that ran, the outermost first, and the shape of its result."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    shape: tuple[int, ...]
    axis: int
    used: bool = False  # its weights were multiplied with values
    routed: bool = False  # or multiplied over another axis, as where tokens are sent to experts
    missing: int | None = None  # of its weights, some met values and so many did not

    @property
    def done(self) -> bool:
        """True if its weights are used up, or are not those of attention."""
        return self.used or (self.routed and self.missing is None)

    @property
    def looks_like_attention(self) -> bool:
        """True for weights of (B, H, N, M), and of (B, N, N): other softmaxes have fewer axes."""
        last = self.axis % len(self.shape) >= len(self.shape) - 2
        square = len(self.shape) == 3 and self.shape[-1] == self.shape[-2] > 1
        return last and (len(self.shape) > 3 or square)


@dataclass(frozen=True)
class Weights:
    """The result of a softmax, or what was made of it since."""

    origin: Origin
    logits: Tensor | None  # in the layout of the weights; None if rows are not whole any more
    axis: int  # of the keys
    rows: SoftmaxRows
    moves: tuple[Move, ...] | None = ()  # since the softmax; None if it is not known any more
    dropped: bool = False  # some weights were dropped
    undropped: tuple[Tensor, int] | None = None  # as they were then, and how many moves came before

    def without_dropout(self, p: Tensor) -> Tensor | None:
        """Weights p as they would be without dropout; None if that is not known."""
        if not self.dropped or self.undropped is None or self.moves is None:
            return None if self.dropped else p
        p, before = self.undropped
        return replayed(self.moves[before:], p)


@dataclass(frozen=True, eq=False)
class Exponential:
    """exp(logits), which divided by its sum is a softmax."""

    logits: Tensor


@dataclass(frozen=True)
class ExponentialSum:
    """The sum of an exponential over one axis."""

    of: Exponential
    axis: int


@dataclass(frozen=True)
class WeighedValues:
    """Weights times values, not yet summed over the keys."""

    weights: Weights
    shape: torch.Size  # of the weights
    values: Tensor


def drops(p: float = 0.5, training: bool = True, *_: bool, **options: Any) -> bool:
    """True if a dropout with these arguments drops anything."""
    rate = options.get("p", p)
    return bool(rate > 0 and options.get("train", options.get("training", training)))


def follow_layout(
    known: Weights, function: Function, given: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Tensor, int] | None:
    """The logits and the axis of the keys after a change of layout; None if rows were cut up.

    A probe without storage, whose keys lie side by side, shows where their axis goes.
    """
    assert known.logits is not None
    shape, axis = known.logits.shape, known.axis % known.logits.ndim
    keys, sizes = shape[axis], [*shape[:axis], *shape[axis + 1 :], shape[axis]]
    probe = torch.empty(sizes, device="meta").movedim(-1, axis)
    try:
        turned = function(probe, *given[1:], **options)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
    if not isinstance(turned, Tensor) or turned.numel() != probe.numel():
        return None
    if turned.untyped_storage()._cdata == probe.untyped_storage()._cdata:
        found = [n for n, size in enumerate(turned.shape) if size == keys and turned.stride(n) == 1]
    else:  # copied in the order of its axes: rows stay whole if they were last and still are
        found = [turned.ndim - 1] * (axis == len(shape) - 1 and turned.shape[-1] == keys)
    if len(found) != 1 and keys > 1:
        return None
    after = found[0] if len(found) == 1 else axis - len(shape) + turned.ndim
    return function(known.logits, *given[1:], **options), after
