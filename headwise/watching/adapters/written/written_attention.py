"""An attention that a model wrote out, read where its weights meet their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.nn.call import Call
from headwise.watching.adapters.written.logits_call import from_logits, heads_lead, split_heads
from headwise.watching.adapters.written.product_axes import Equation, Product
from headwise.watching.adapters.written.softmax_results import Function, Weights
from headwise.watching.adapters.written.windowed_call import WindowedCall

Added = tuple[float | Tensor, float]
"""out = the first + the second · product."""


class UnreadableError(ValueError):
    """Attention that was found in a module and can't be read."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


@dataclass(frozen=True)
class WrittenAttention:
    """An attention that was written out: the module's name, and the call.

    The call is None if only a part of its weights has met values yet.
    """

    name: str
    call: Call | None

    def without(self, out: Tensor, head: int) -> Tensor:
        """The product's result without what one head gave."""
        raise NotImplementedError


@dataclass(frozen=True)
class WholeProduct(WrittenAttention):
    """Weights (B, H, N, M), in any order of axes, that were multiplied with values at once."""

    call: Call
    product: Product
    exact: bool  # no weight was dropped
    added: Added = (0.0, 1.0)

    def heads_first(self, out: Tensor) -> Tensor:
        """The output as (B, H, N, D)."""
        rest, factor = self.added
        return self.product.heads_first((out - rest) / factor, self.call.q.shape[1])

    def gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the output (B, H, N, D), from that of what was computed."""
        return self.product.heads_first(grad * self.added[1], self.call.q.shape[1])

    def without(self, out: Tensor, head: int) -> Tensor:
        rest, factor = self.added
        heads = self.heads_first(out).clone()
        heads[:, head] = 0
        return rest + factor * self.product.as_it_was(heads)


@dataclass(frozen=True)
class PartProduct(WrittenAttention):
    """A product of some of the weights, or of rows that have keys of their own."""

    windows: WindowedCall
    added: Added = (0.0, 1.0)

    def without(self, out: Tensor, head: int) -> Tensor:
        rest, _ = self.added
        meeting = self.windows.rows.meetings[-1]
        kept = (self.windows.head(meeting) != head).to(out.dtype)
        return rest + meeting.scaled(out - rest, kept)


@dataclass(frozen=True)
class Operation:
    """A function that was called, its arguments, and the modules that ran, the outermost first.

    `sizes` are those of the model's input, (B, N, ...) or (N, B, ...).
    """

    function: Function
    out: Any
    given: tuple[Any, ...]
    options: Mapping[str, Any]
    modules: Mapping[str, nn.Module]
    sizes: tuple[int, ...]

    def axis(self, default: int | None = None) -> Any:
        """The axis that the function works on; a tuple of one is that one."""
        axis = self.given[1] if len(self.given) > 1 else self.options.get("dim", default)
        return axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis


@dataclass(frozen=True)
class MetValues:
    """Weights p that met values, in a product of this equation; None if that is not known."""

    known: Weights
    p: Tensor | None
    values: Tensor
    equation: Equation | None
    op: Operation
    added: Added = (0.0, 1.0)

    def read(self) -> WrittenAttention | None:
        """The attention; None if the weights only route or gate the values.

        UnreadableError if it can't be read.
        """
        origin, whole = self.known.origin, self.known.logits is not None
        if whole and (self.equation is None or not self.equation.attends(self.known.axis)):
            origin.routed = True
            return None
        reason = "its weights were changed"
        try:
            found = self._at_once() or self._in_parts()
            if found is not None:
                origin.met = found.call is not None
                return found
        except ValueError as error:
            reason = str(error)
        origin.met = True
        raise UnreadableError(
            self.name,
            f"it writes its attention out in a way that can't be read: {reason}; weights "
            f"{origin.shape}, values {tuple(self.values.shape)}; headwise reads (B, H, N, M) "
            "weights and (B, H, M, D) values, in any order of axes, and windows of them",
        )

    @property
    def name(self) -> str:
        """The innermost module that ran at the softmax and at the product."""
        first, second = self.known.origin.names, tuple(self.op.modules)
        shared = [x for x, y in zip(first, second, strict=False) if x == y]
        return shared[-1] if shared else second[-1]

    @property
    def near(self) -> list[nn.Module]:
        """The modules that may state a number of heads."""
        modules = self.op.modules
        return [modules[self.name], [*modules.values()][-1], self.known.origin.modules[-1]]

    def _at_once(self) -> WholeProduct | None:
        """Whole rows (B, H, N, M) times values (B, H, M, D), in any order of axes."""
        if self.equation is None or self.known.logits is None:
            return None
        product, logits = self.equation.product(self.known.axis), self.known.logits
        if product is None:
            return None
        if heads_lead(product, logits, self.near[:1], self.op.sizes):
            product = product.swapped()
        made = product.arranged(logits, self.values)
        if made is None:
            return None
        call = from_logits(*split_heads(*made, product, self.near, self.op.sizes))
        return WholeProduct(self.name, call, product, not self.known.dropped, self.added)

    def _in_parts(self) -> PartProduct | None:
        """Some of the weights, or rows that have keys of their own."""
        rows, moves = self.known.rows, self.known.moves
        if self.equation is None or moves is None or self.p is None:
            return None
        out = (self.op.out.detach() - self.added[0]) / self.added[1]
        p = self.known.without_dropout(self.p.detach())
        rows.meet(p, moves, self.values, self.equation, out)
        windows = WindowedCall.of(rows, self.near, self.op.sizes)
        self.known.origin.missing = rows.missing
        call = None if rows.missing else windows.call()
        return PartProduct(self.name, call, windows, self.added)
