"""Attention that a model writes out: a softmax whose result is multiplied with values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from headwise.watching.adapters.written.product_axes import Equation
from headwise.watching.adapters.written.softmax_results import (
    ADDED,
    CUTS,
    DROPOUTS,
    EXPONENTIALS,
    LAYOUTS,
    PRODUCTS,
    QUOTIENTS,
    SOFTMAXES,
    STORED,
    SUMS,
    TIMES,
    Exponential,
    ExponentialSum,
    Origin,
    WeighedValues,
    Weights,
    drops,
    follow_layout,
)
from headwise.watching.adapters.written.softmax_rows import SoftmaxRows
from headwise.watching.adapters.written.written_attention import (
    Operation,
    ValueProduct,
    WrittenAttention,
)


@dataclass
class WrittenOut:
    """The softmaxes of a model that runs, until their results are multiplied with values."""

    origins: list[Origin] = field(default_factory=list)
    _tracked: dict[int, tuple[weakref.ref[Tensor], Any]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """True if a function may make something of weights."""
        return bool(self._tracked)

    def start(self, op: Operation) -> None:
        """A softmax or an exponential was computed."""
        x, out = op.given[0] if op.given else op.options.get("input"), op.out
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim < 2 or out is x:
            return
        if op.function in EXPONENTIALS:
            known = self._known(x)
            if isinstance(known, Weights):  # exp(log_softmax(...))
                self.origins.append(known.origin)
                self._track(out, known)
            else:
                self._track(out, Exponential(x.detach()))
        elif isinstance(axis := op.axis(-1), int):
            weights = _first_weights(x, axis, op)
            self._track(out, weights)
            if op.function in SOFTMAXES:
                self.origins.append(weights.origin)

    def follow(self, op: Operation) -> WrittenAttention | None:
        """Something may have been made of weights; the attention if they met their values.

        UnreadableError if they met values in a way that can't be read.
        """
        function, out, given = op.function, op.out, op.given
        if not isinstance(out, Tensor):
            return None
        known = self._known(given[0]) if given else None
        other = self._known(given[1]) if len(given) > 1 else None
        if function in PRODUCTS or function in ADDED or isinstance(known, WeighedValues):
            try:
                return (
                    self._sum(known, op) if isinstance(known, WeighedValues) else self._product(op)
                )
            finally:
                self._forget(lambda x: isinstance(x, Weights) and x.origin.used)
        if isinstance(known, Exponential):
            self._normalise(known, other, op)
        elif isinstance(known, ExponentialSum) and function in LAYOUTS:
            self._track(out, known)
        elif isinstance(known, Weights) and not known.origin.used:
            self._made_of(known, op)
        elif isinstance(other, Weights) and not other.origin.used and function in TIMES:
            self._made_of(other, replace(op, given=(given[1], given[0])))
        elif function in CUTS and isinstance(other := self._first(op), Weights):
            self._track(out, replace(other, logits=None, moves=None))  # cat([p, ...])
        return None

    def unused(self) -> list[Origin]:
        """Softmaxes that look like attention, and whose weights never met values; forget all."""
        self._tracked.clear()
        found = [x for x in self.origins if x.looks_like_attention and not x.done]
        self.origins.clear()
        return found

    def leave(self) -> None:
        """A module has run: exponentials that it made and did not divide are not weights."""
        self._forget(lambda x: isinstance(x, Exponential | ExponentialSum))

    def _forget(self, which: Callable[[object], bool]) -> None:
        """Forget what is not needed: in training autograd keeps tensors, and so their logits."""
        self._tracked = {key: kept for key, kept in self._tracked.items() if not which(kept[1])}

    def _track(self, out: Tensor, what: object) -> None:
        key = id(out)

        def forget(gone: weakref.ref[Tensor]) -> None:
            if self._tracked.get(key, (None,))[0] is gone:
                del self._tracked[key]

        self._tracked[key] = (weakref.ref(out, forget), what)

    def _known(self, x: object) -> object:
        reference, what = self._tracked.get(id(x), (None, None))
        return what if reference is not None and reference() is x else None

    def _first(self, op: Operation) -> object:
        """The first weights in a list of tensors."""
        many = op.given[0] if op.given else op.options.get("tensors")
        found = (self._known(x) for x in many) if isinstance(many, list | tuple) else ()
        return next((x for x in found if isinstance(x, Weights)), None)

    def _normalise(self, known: Exponential, other: object, op: Operation) -> None:
        """Follow exp(x) to exp(x) / Σ exp(x), which is a softmax."""
        if op.function in SUMS:
            if isinstance(axis := op.axis(), int):
                self._track(op.out, ExponentialSum(known, axis))
        elif op.function in QUOTIENTS and isinstance(other, ExponentialSum) and other.of is known:
            weights = _first_weights(known.logits, other.axis, op)
            self.origins.append(weights.origin)
            self._track(op.out, weights)

    def _made_of(self, known: Weights, op: Operation) -> None:
        """Follow weights through dropout, another dtype, another shape, a factor."""
        function, out, given = op.function, op.out, op.given
        shape = given[0].shape
        if function in DROPOUTS and drops(*given[1:], **op.options) and not known.dropped:
            kept = None if out is given[0] else (given[0].detach(), len(known.moves or ()))
            known = replace(known, dropped=True, undropped=kept)
        if function in LAYOUTS or function in CUTS:
            whole = function in LAYOUTS and known.logits is not None
            found = follow_layout(known, function, given, op.options) if whole else None
            logits, axis = (None, -1) if found is None else found
            move = (function, given[1:], op.options)
            lost = known.moves is None or function in STORED
            moves = None if lost else (*(known.moves or ()), move)
            self._track(out, replace(known, logits=logits, axis=axis, moves=moves))
        elif out.shape == shape:
            self._track(out, known)
        elif function in TIMES and isinstance(given[1], Tensor) and out.ndim == len(shape):
            self._track(out, WeighedValues(known, shape, given[1].detach()))

    def _product(self, op: Operation) -> WrittenAttention | None:
        given, added = op.given, (0.0, 1.0)
        if op.function in ADDED and len(given) > 2:
            beta, alpha = op.options.get("beta", 1), op.options.get("alpha", 1)
            added, given = (beta * given[0].detach() if beta else 0.0, alpha), given[1:]
        written = given[0] if given and isinstance(given[0], str) else None
        operands = given if written is None else given[1:]
        operands = operands[0] if len(operands) == 1 else operands
        if len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
            return None
        first = isinstance(self._known(operands[0]), Weights)
        p, values = operands if first else reversed(operands)
        known = self._known(p)
        if not isinstance(known, Weights) or known.origin.used:
            return None
        alike = values.ndim != 2 if p.ndim == 2 else values.ndim < 3
        if alike or isinstance(values, nn.Parameter):
            if op.out.shape == p.shape:  # heads are mixed
                self._track(op.out, replace(known, logits=None, moves=None))
            return None  # values that are the same for all sequences: a table, such as embeddings
        axes = operands[0].ndim, operands[1].ndim
        equation = (
            Equation.of_matmul(*axes) if written is None else Equation.of_einsum(written, *axes)
        )
        if equation is not None and not first:
            equation = equation.swapped()
        if known.logits is None and not known.origin.looks_like_attention:
            return None
        return ValueProduct(known, p, values.detach(), equation, op, added).read()

    def _sum(self, known: WeighedValues, op: Operation) -> WrittenAttention | None:
        """(p[..., None] * v).sum(keys)."""
        weights, values, axis = known.weights, known.values, op.axis()
        if op.function not in SUMS or not isinstance(axis, int) or weights.origin.used:
            return None
        shapes = known.shape, (1,) * (len(known.shape) - values.ndim) + values.shape
        axis, letters = axis % len(known.shape), "abcdefgh"[: len(known.shape)]
        kept = [[n for n, size in enumerate(shape) if size > 1 or shapes[1 - side][n] == 1]
                for side, shape in enumerate(shapes)]  # fmt: skip
        first, second = ("".join(letters[n] for n in side) for side in kept)
        values = values.reshape([shapes[1][n] for n in kept[1]])
        equation = Equation(first, second, letters.replace(letters[axis], ""))
        logits, key = weights.logits, weights.axis
        if op.options.get("keepdim"):
            logits = None
        if logits is not None and key not in kept[0]:
            weights.origin.routed = True  # a softmax over one key gates values
            return None
        if logits is not None:
            logits = logits.reshape([shapes[0][n] for n in kept[0]])
            key = first.index(letters[key])
        weights = replace(weights, logits=logits, axis=key, moves=None)
        return ValueProduct(weights, None, values, equation, op).read()


def _first_weights(logits: Tensor, axis: int, op: Operation) -> Weights:
    """The weights of a softmax over this axis."""
    parts = tuple(op.modules), tuple(op.modules.values())
    origin, axis = Origin(*parts, tuple(logits.shape), axis), axis % logits.ndim
    logits = logits.detach()
    return Weights(origin, logits, axis, SoftmaxRows(logits.movedim(axis, -1), axis))
