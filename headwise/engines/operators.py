"""An engine's forward and backward as PyTorch operators, with shapes, gradients and FLOP counts.

`torch.compile`, `torch.export` and FlopCounterMode see two nodes, whichever engine they come from.
The operators are defined by schema, because the wrapper of `torch.library.custom_op` checks every
call for aliases and loads all of torch's compiler. If nothing needs to see the operator, its
implementation is called directly, and with gradients as one node of autograd (`learning`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headwise.core.problem import Terms, without_autocast
from headwise.core.row_sums import ENTROPY, RowResults, RowTotals, room, unpacked
from headwise.engines import failures, flops
from headwise.engines.calls import intercepted, learns
from headwise.engines.failures import KernelError, family_of_terms
from headwise.engines.learning import (
    BIAS,
    FOR_BACKWARD,
    TENSORS,
    LearningCall,
    RowGradients,
    Sources,
    without_gradients,
)
from headwise.engines.library_backward import LibraryBackward
from headwise.engines.second_derivatives import refuse

SAFE = "streaming"
_FORWARDS: dict[str, Callable[..., Any]] = {}  # by engine
_BACKWARDS: dict[str, Callable[..., Any]] = {}


def safe_forward(engine: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's forward `run`, whose calls the SAFE engine computes if its kernels fail.

    If they do, calls with gradients and without are planned for another engine from then on.
    """
    _FORWARDS[engine] = run
    return _with_safe_engine(engine, run, _FORWARDS, (False, True))


def safe_backward(engine: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's backward `run`, whose calls the SAFE engine computes if its kernels fail.

    If they do, calls with gradients are planned for another engine from then on.
    """
    _BACKWARDS[engine] = run
    return _with_safe_engine(engine, run, _BACKWARDS, (True,))


def _with_safe_engine(
    engine: str,
    run: Callable[..., Any],
    safe: dict[str, Callable[..., Any]],
    learns: tuple[bool, ...],
) -> Callable[..., Any]:
    """`learns`: the calls that fail with one, those without gradients (False) and with (True)."""

    def call(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *rest: Any) -> Any:
        calls = [family_of_terms(engine, q, v, terms, each) for each in learns]
        if failures.caller_replans() or failures.reason(calls[0]) is None:
            try:
                return run(q, k, v, terms, *rest)
            except KernelError as failure:
                if failures.caller_replans():
                    raise
                for each in calls:
                    failures.record(each, failure)
        terms = terms.without_band(q.shape[2], k.shape[2])
        return safe[SAFE](q, k, v, terms, *rest)

    return call


Forward = Callable[[Tensor, Tensor, Tensor, Terms, int], RowResults]

LIBRARY = torch.library.Library("headwise", "FRAGMENT")
CALL = (  # q, k, v, and the fields of Terms
    "Tensor q, Tensor k, Tensor v, Tensor? additive, Tensor? intervals, Tensor? dense, "
    "Tensor position, Tensor? bias, Tensor? slopes, Tensor? relative, Tensor? sinks, Tensor? seed, "
    "float scale, float softcap, float dropout, SymInt first_key, SymInt[]? band"
)
_RESULTS = ", ".join(["Tensor"] * len(RowResults._fields))
FORWARD = f"({CALL}, int wants) -> ({_RESULTS})"
BACKWARD = (
    f"({CALL}, Tensor out, Tensor lse, Tensor max_logit, Tensor? log_total, Tensor? entropy, "
    "Tensor grad_out, Tensor? grad_lse, Tensor? grad_entropy, bool bias_learns) -> Tensor[]"
)
_TERMS = len(Terms._fields)
_IN_ORDER = tuple(range(TENSORS))
_LEARNABLE = (0, 1, 2, 3, BIAS, 8, 9, 10)  # arguments of the forward that have a gradient


class Gradients(NamedTuple):
    """The gradients of a call's tensors; None where the call has no such tensor.

    A bias that does not require a gradient has none: it would take as much memory as the weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    additive: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    relative: Tensor | None
    sinks: Tensor | None


# (q, k, v, terms, out, totals, entropy, gradients of out, lse and entropy, bias_learns)
Backward = Callable[..., Gradients]

PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""The forward and backward behind each engine's operators, for callers with gradients of their own:
both take any part of the keys. The backward takes any forward's out and lse, and its gradients are
as wide as out, since those of other keys are to be added."""


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    shapes: Callable[..., Any],
    *tags: torch.Tag,
) -> Any:
    """Register headwise::<name>, computed by `run`, its shapes given by `shapes`, and return it."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag, *tags))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headwise::{name}", shapes, lib=LIBRARY)
    return getattr(torch.ops.headwise, name).default


@dataclass(frozen=True, eq=False)
class EngineFunctions:
    """An engine's forward and backward as functions of an operator's arguments."""

    run: Forward
    differentiate: Backward
    library_on: str  # the type of device where PyTorch's kernel computes the gradients if it can

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> RowResults:
        """Return the results of a call."""
        with without_autocast(q.device):
            return self.run(q, k, v, Terms(*given[:_TERMS]), given[_TERMS])

    def backward(
        self, library: LibraryBackward | None, q: Tensor, k: Tensor, v: Tensor, *given: Any
    ) -> list[Tensor]:
        """Return the gradients of the tensors that learn, from PyTorch's kernel if it can.

        Without `library` the engine computes them, as wide as out.
        """
        terms = Terms(*given[:_TERMS])
        out, lse, max_logit, log_total, entropy, grad_out, *others = given[_TERMS:]
        with without_autocast(q.device):
            alone = others[0] is None and others[1] is None  # only out has a gradient
            if library is not None and alone and out.dtype == q.dtype:
                three = library.gradients(q, k, v, terms, out, lse, grad_out)
                if three is not None:
                    return list(three)
            totals = RowTotals.known(lse, max_logit, log_total)
            found = self.differentiate(q, k, v, terms, out, totals, entropy, grad_out, *others)
        return [
            grad.to(x.dtype if library is not None else torch.promote_types(x.dtype, out.dtype))
            for grad, x in zip(found, _learnable(q, k, v, terms, given[-1]), strict=True)
            if grad is not None and x is not None
        ]

    def packed_forward(self, *given: Any) -> tuple[Tensor, ...]:
        """Compute the forward operator."""
        return self.forward(*given).packed()

    def packed_backward(self, *given: Any) -> list[Tensor]:
        """Compute the backward operator, whose results are laid out as `_backward_shapes` says."""
        found = self.backward(LibraryBackward(self.library_on), *given)
        return [grad.contiguous() for grad in found]


@dataclass(frozen=True, eq=False)
class Operators:
    """An engine's forward and its gradients, called directly where nothing must see an operator."""

    functions: EngineFunctions
    forward: Callable[..., tuple[Tensor, ...]]  # headwise::<engine>
    backward: Callable[..., list[Tensor]]  # headwise::<engine>_backward

    def __call__(self, *given: Any, library: LibraryBackward | None = None) -> RowResults:
        """Return the results of an operator's arguments: q, k, v, those of `Terms`, and `wants`."""
        if intercepted(*given):
            return RowResults(*unpacked(self.forward(*given)))  # type: ignore[arg-type]
        if not learns(given):
            return self.functions.forward(*given)
        rest = given[TENSORS:]

        def run(*tensors: Any) -> RowResults:
            return self.functions.forward(*tensors, *rest)

        return RowResults(*self.learning(run, _IN_ORDER, rest[:-1], library)(*given[:TENSORS]))

    def learning(
        self,
        run: Callable[..., Any],
        sources: Sources,
        numbers: tuple[Any, ...],
        library: LibraryBackward | None = None,
    ) -> LearningCall:
        """Return a call with gradients, whose forward is `run`."""
        library = LibraryBackward(self.functions.library_on) if library is None else library
        return LearningCall(run, sources, numbers, self.differentiate, library)

    def differentiate(
        self,
        tensors: list[Tensor | None],
        numbers: tuple[Any, ...],
        known: tuple[Tensor | None, ...],
        grads: RowGradients,
        bias_learns: bool,
        library: LibraryBackward | None = None,
    ) -> list[Tensor | None]:
        """Return a gradient for each of the tensors, or None; see `Differentiate`."""
        result: list[Tensor | None] = [None] * TENSORS
        if all(grad is None for grad in grads):
            return result
        grad_out = torch.zeros_like(known[0]) if grads.out is None else grads.out  # type: ignore[arg-type]
        asked = (*tensors, *numbers, *known, grad_out, *grads[1:], bias_learns)
        if intercepted(*tensors[:3], grad_out) or learns(asked):
            found = iter(self.backward(*asked))
        else:
            library = LibraryBackward(self.functions.library_on) if library is None else library
            found = iter(self.functions.backward(library, *asked))
        for place in _LEARNABLE:
            if tensors[place] is not None and (place != BIAS or bias_learns):
                result[place] = next(found)
        return result

    def gradient(self, ctx, *grads_of_results):  # type: ignore[no-untyped-def]
        """Return the gradients of the forward operator's arguments."""
        tensors, known = ctx.saved_tensors[:TENSORS], unpacked(ctx.saved_tensors[TENSORS:])
        grads = RowGradients.of(grads_of_results)
        grads = grads if ctx.wants & ENTROPY else grads._replace(entropy=None)
        bias_learns = tensors[BIAS] is not None and ctx.needs_input_grad[BIAS]
        found = self.differentiate(tensors, ctx.numbers, known, grads, bias_learns)
        return (*found, *[None] * (len(ctx.numbers) + 1))


def operators(engine: str, run: Forward, differentiate: Backward, library_on: str) -> Operators:
    """Register headwise::<engine> and headwise::<engine>_backward, and return them.

    On devices of the type `library_on`, one of PyTorch's kernels computes the gradients if it can.
    """
    run, differentiate = safe_forward(engine, run), safe_backward(engine, differentiate)
    functions = EngineFunctions(run, differentiate, library_on)
    PARTS[engine] = functions.forward, partial(functions.backward, None)

    def no_second(ctx, *grads):  # type: ignore[no-untyped-def]
        refuse(engine)

    forward = define(engine, FORWARD, functions.packed_forward, _forward_shapes)
    backward = define(f"{engine}_backward", BACKWARD, functions.packed_backward, _backward_shapes)
    found = Operators(functions, forward, backward)
    torch.library.register_autograd(forward, found.gradient, setup_context=_setup, lib=LIBRARY)
    torch.library.register_autograd(backward, no_second, lib=LIBRARY)
    ops = torch.ops.headwise
    flops.register(getattr(ops, engine), getattr(ops, f"{engine}_backward"))
    return found


def _learnable(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, bias_learns: bool
) -> tuple[Tensor | None, ...]:
    bias = terms.bias if bias_learns else None
    return q, k, v, terms.additive, bias, terms.slopes, terms.relative, terms.sinks


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return room(q, v, given[_TERMS]).packed()


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in _learnable(q, k, v, Terms(*given[:_TERMS]), given[-1])
        if x is not None
    ]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.wants = inputs[TENSORS:-1], inputs[-1]
    ctx.mark_non_differentiable(*without_gradients(output))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output[:FOR_BACKWARD])
