"""Attention that a model writes out: a softmax whose result is multiplied with values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.nn.call import Call
from headwise.watching.adapters.logits_call import from_logits, heads_lead, split_heads
from headwise.watching.adapters.product_axes import Equation, Product

Function = Callable[..., Any]


def _named(*names: str) -> frozenset[Function]:
    """The functions of these names in torch, as methods, and in torch.nn.functional."""
    owners = (torch, Tensor, F, torch.special)
    return frozenset(getattr(x, name) for name in names for x in owners if hasattr(x, name))


SOFTMAXES = _named("softmax")
_LOGARITHMS = _named("log_softmax")
_EXPONENTIALS = _named("exp")
STARTS = SOFTMAXES | _LOGARITHMS | _EXPONENTIALS
"""The functions with which weights begin."""

_SUMS = _named("sum")
_QUOTIENTS = _named("div", "true_divide", "divide", "div_", "__truediv__", "__itruediv__")
_TIMES = _named("mul", "multiply", "__mul__", "__rmul__")
_PRODUCTS = _named("matmul", "bmm", "mm", "einsum", "__matmul__", "__rmatmul__")
_ADDED = _named("baddbmm", "addmm")
_DROPOUTS = _named("dropout", "dropout_", "alpha_dropout")
_LAYOUTS = _named(
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "__getitem__"),
    *("transpose", "permute", "movedim", "swapaxes", "swapdims", "moveaxis", "t"),
) | {Tensor.T.__get__, Tensor.mT.__get__}  # type: ignore[attr-defined]
_CUTS = _named(
    *("pad", "narrow", "expand", "repeat", "as_strided", "index_select", "roll", "flip", "cat"),
    *("gather", "unfold", "repeat_interleave", "concat", "tile", "broadcast_to", "select"),
)
"""Functions after which weights are still weights, and the logits behind them are not known."""


@dataclass(eq=False)
class Origin:
    """A softmax: the modules that ran, the outermost first, and the shape of its result."""

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    shape: tuple[int, ...]
    axis: int
    met: bool = False  # its weights were multiplied with values
    routed: bool = False  # or multiplied over another axis, as where tokens are sent to experts

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
    logits: Tensor | None  # in the layout of the weights; None if it is not known any more
    axis: int = -1  # of the keys
    dropped: bool = False  # some weights were dropped


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


@dataclass(frozen=True)
class WrittenAttention:
    """An attention that was written out: the call, and the axes of its product."""

    name: str  # of the module
    call: Call
    product: Product
    exact: bool  # no weight was dropped
    added: tuple[float | Tensor, float] = (0.0, 1.0)  # out = added[0] + added[1] · product

    def heads_first(self, out: Tensor) -> Tensor:
        """The output as (B, H, N, D)."""
        rest, factor = self.added
        return self.product.heads_first((out - rest) / factor, self.call.q.shape[1])

    def as_it_was(self, heads: Tensor) -> Tensor:
        """The output in its own layout, from (B, H, N, D)."""
        rest, factor = self.added
        return rest + factor * self.product.as_it_was(heads)


@dataclass
class WrittenOut:
    """The softmaxes of a model that runs, until their results are multiplied with values."""

    origins: list[Origin] = field(default_factory=list)
    _tracked: dict[int, tuple[weakref.ref[Tensor], Any]] = field(default_factory=dict)

    @property
    def waiting(self) -> bool:
        """True if a function may make something of weights."""
        return bool(self._tracked)

    def start(
        self,
        function: Function,
        out: Any,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
    ) -> None:
        """A softmax or an exponential was computed while these modules ran, the outermost first."""
        x = given[0] if given else options.get("input")
        if not isinstance(x, Tensor) or not isinstance(out, Tensor) or x.ndim < 2 or out is x:
            return
        if function in _EXPONENTIALS:
            known = self._known(x)
            if isinstance(known, Weights):  # exp(log_softmax(...))
                self.origins.append(known.origin)
                self._track(out, known)
            else:
                self._track(out, Exponential(x.detach()))
            return
        axis = given[1] if len(given) > 1 else options.get("dim", -1)
        if isinstance(axis, int):
            weights = self._weights(x, axis, modules)
            self._track(out, weights)
            if function in SOFTMAXES:
                self.origins.append(weights.origin)

    def follow(
        self,
        function: Function,
        out: Any,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        sizes: tuple[int, ...],
    ) -> WrittenAttention | None:
        """Something may have been made of weights; the attention if they met their values.

        `sizes` are those of the model's input, (B, N, ...) or (N, B, ...). ValueError if they met
        values in a way that can't be read.
        """
        if not isinstance(out, Tensor):
            return None
        if function in _PRODUCTS or function in _ADDED:
            return self._product(function, out, given, options, modules, sizes)
        known = self._known(given[0]) if given else None
        other = self._known(given[1]) if len(given) > 1 else None
        if isinstance(known, WeighedValues):
            return self._sum(known, function, given, options, modules, sizes)
        if isinstance(known, Exponential):
            self._normalise(known, other, function, out, given, options, modules)
        elif isinstance(known, ExponentialSum) and function in _LAYOUTS:
            self._track(out, known)
        elif isinstance(known, Weights) and not known.origin.met:
            self._made_of(known, function, out, given, options)
        elif isinstance(other, Weights) and not other.origin.met and function in _TIMES:
            self._made_of(other, function, out, (given[1], given[0]), options)
        elif isinstance(other := self._first(given, options), Weights) and function in _CUTS:
            self._track(out, replace(other, logits=None))  # cat([p, ...])
        return None

    def unmet(self) -> list[Origin]:
        """Softmaxes that look like attention, and whose weights never met values; forget all."""
        found = [x for x in self.origins if x.looks_like_attention and not (x.met or x.routed)]
        self.origins.clear()
        return found

    def _track(self, out: Tensor, what: object) -> None:
        key = id(out)

        def forget(gone: weakref.ref[Tensor]) -> None:
            if self._tracked.get(key, (None,))[0] is gone:
                del self._tracked[key]

        self._tracked[key] = (weakref.ref(out, forget), what)

    def _known(self, x: object) -> object:
        reference, what = self._tracked.get(id(x), (None, None))
        return what if reference is not None and reference() is x else None

    def _first(self, given: tuple[Any, ...], options: Mapping[str, Any]) -> object:
        """What is known of the first tensor in a list of them."""
        many = given[0] if given else options.get("tensors")
        found = (self._known(x) for x in many) if isinstance(many, list | tuple) else ()
        return next((x for x in found if isinstance(x, Weights)), None)

    def _weights(self, logits: Tensor, axis: int, modules: Mapping[str, nn.Module]) -> Weights:
        shape, parts = tuple(logits.shape), (tuple(modules), tuple(modules.values()))
        return Weights(Origin(*parts, shape, axis), logits.detach(), axis % logits.ndim)

    def _normalise(
        self,
        known: Exponential,
        other: object,
        function: Function,
        out: Tensor,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
    ) -> None:
        """Follow exp(x) to exp(x) / Σ exp(x), which is a softmax."""
        if function in _SUMS:
            axis = given[1] if len(given) > 1 else options.get("dim")
            axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
            if isinstance(axis, int):
                self._track(out, ExponentialSum(known, axis))
        elif function in _QUOTIENTS and isinstance(other, ExponentialSum) and other.of is known:
            weights = self._weights(known.logits, other.axis, modules)
            self.origins.append(weights.origin)
            self._track(out, weights)

    def _made_of(
        self,
        known: Weights,
        function: Function,
        out: Tensor,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        """Follow weights through dropout, another dtype, another shape, a factor."""
        shape, dropped = given[0].shape, known.dropped
        if function in _DROPOUTS:
            dropped = dropped or _drops(*given[1:], **options)
        if function in _LAYOUTS:
            found = None if known.logits is None else _moved(known, function, given, options)
            logits, axis = (None, -1) if found is None else found
            self._track(out, Weights(known.origin, logits, axis, dropped))
        elif out.shape == shape:
            self._track(out, replace(known, dropped=dropped))
        elif function in _TIMES and isinstance(given[1], Tensor) and out.ndim == len(shape):
            self._track(out, WeighedValues(known, shape, given[1].detach()))
        elif function in _CUTS:
            self._track(out, replace(known, logits=None))

    def _product(
        self,
        function: Function,
        out: Tensor,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        sizes: tuple[int, ...],
    ) -> WrittenAttention | None:
        added: tuple[float | Tensor, float] = (0.0, 1.0)
        if function in _ADDED and len(given) > 2:
            beta, alpha = options.get("beta", 1), options.get("alpha", 1)
            added, given = (beta * given[0].detach() if beta else 0.0, alpha), given[1:]
        written = given[0] if given and isinstance(given[0], str) else None
        operands = given if written is None else given[1:]
        operands = operands[0] if len(operands) == 1 else operands
        if len(operands) != 2 or not all(isinstance(x, Tensor) for x in operands):
            return None
        first = isinstance(self._known(operands[0]), Weights)
        p, values = operands if first else reversed(operands)
        known = self._known(p)
        if not isinstance(known, Weights) or known.origin.met:
            return None
        alike = values.ndim != 2 if p.ndim == 2 else values.ndim < 3
        if alike or isinstance(values, nn.Parameter):
            if out.shape == p.shape:  # heads are mixed
                self._track(out, replace(known, logits=None))
            return None  # values that are the same for all sequences: a table, such as embeddings
        axes = operands[0].ndim, operands[1].ndim
        equation = (
            Equation.of_matmul(*axes) if written is None else Equation.of_einsum(written, *axes)
        )
        if equation is not None and not first:
            equation = equation.swapped()
        if known.logits is None:
            if not known.origin.looks_like_attention:
                return None
        elif equation is None or not equation.weighs(known.axis):
            known.origin.routed = True
            return None
        return self._read(known, known.logits, values.detach(), equation, modules, sizes, added)

    def _sum(
        self,
        known: WeighedValues,
        function: Function,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        modules: Mapping[str, nn.Module],
        sizes: tuple[int, ...],
    ) -> WrittenAttention | None:
        """(p[..., None] * v).sum(keys)."""
        axis = given[1] if len(given) > 1 else options.get("dim")
        axis = axis[0] if isinstance(axis, list | tuple) and len(axis) == 1 else axis
        weights, values = known.weights, known.values
        if function not in _SUMS or not isinstance(axis, int) or weights.origin.met:
            return None
        shapes = known.shape, (1,) * (len(known.shape) - values.ndim) + values.shape
        axis, letters = axis % len(known.shape), "abcdefgh"[: len(known.shape)]
        kept = [[n for n, size in enumerate(shape) if size > 1 or shapes[1 - side][n] == 1]
                for side, shape in enumerate(shapes)]  # fmt: skip
        first, second = ("".join(letters[n] for n in side) for side in kept)
        if weights.logits is None or weights.axis != axis or options.get("keepdim"):
            return self._read(weights, None, values, None, modules, sizes)
        equation = Equation(first, second, letters.replace(letters[axis], ""))
        logits = weights.logits.reshape([shapes[0][n] for n in kept[0]])
        values = values.reshape([shapes[1][n] for n in kept[1]])
        moved = replace(weights, axis=first.index(letters[axis]))
        return self._read(moved, logits, values, equation, modules, sizes)

    def _read(
        self,
        known: Weights,
        logits: Tensor | None,
        values: Tensor,
        equation: Equation | None,
        modules: Mapping[str, nn.Module],
        sizes: tuple[int, ...],
        added: tuple[float | Tensor, float] = (0.0, 1.0),
    ) -> WrittenAttention:
        """The call, where weights meet values; ValueError if it can't be read."""
        origin = known.origin
        origin.met = True
        name = _common(origin.names, tuple(modules))
        near = [modules[name], [*modules.values()][-1], origin.modules[-1]]
        product = None if equation is None or logits is None else equation.product(known.axis)
        if product is not None and logits is not None:
            if heads_lead(product, logits, near[:1], sizes):
                product = product.swapped()
            made = product.arranged(logits, values)
            if made is not None:
                try:
                    call = from_logits(*split_heads(*made, product, near, sizes))
                except ValueError as error:
                    raise UnreadableError(name, str(error)) from None
                exact = not known.dropped
                return WrittenAttention(name, call, product, exact, added)
        raise UnreadableError(
            name,
            f"it writes its attention out in a way that can't be read: weights {origin.shape}, "
            f"values {tuple(values.shape)}; headwise reads (B, H, N, M) weights and "
            "(B, H, M, D) values, in any order of axes",
        )


class UnreadableError(ValueError):
    """Attention that was found in a module and can't be read."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


def _common(first: Sequence[str], second: Sequence[str]) -> str:
    """The innermost module that ran both times; else the innermost of the second."""
    shared = [x for x, y in zip(first, second, strict=False) if x == y]
    return shared[-1] if shared else second[-1]


def _drops(p: float = 0.5, training: bool = True, *_: bool, **options: Any) -> bool:
    """True if a dropout with these arguments drops anything."""
    rate = options.get("p", p)
    return bool(rate > 0 and options.get("train", options.get("training", training)))


def _moved(
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
        moved = function(probe, *given[1:], **options)
    except (RuntimeError, TypeError, IndexError, NotImplementedError):
        return None
    if not isinstance(moved, Tensor) or moved.numel() != probe.numel():
        return None
    if moved.untyped_storage()._cdata == probe.untyped_storage()._cdata:
        found = [n for n, size in enumerate(moved.shape) if size == keys and moved.stride(n) == 1]
    else:  # copied in the order of its axes: rows stay whole if they were last and still are
        found = [moved.ndim - 1] * (axis == len(shape) - 1 and moved.shape[-1] == keys)
    if len(found) != 1 and keys > 1:
        return None
    after = found[0] if len(found) == 1 else axis - len(shape) + moved.ndim
    return function(known.logits, *given[1:], **options), after
