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
from torch.autograd import forward_ad
from torch.nn import Parameter

from headwise.core.problem import Terms, without_autocast
from headwise.core.sums import ENTROPY, RowTotals, Sums, room
from headwise.engines import failures, flops
from headwise.engines.calls import learns
from headwise.engines.failures import KernelError, family_of_terms
from headwise.engines.learning import (
    BIAS,
    TENSORS,
    Differentiate,
    LearningCall,
    RowGradients,
    RowResults,
    Sources,
)
from headwise.engines.library_backward import LibraryBackward

Forward = Callable[[Tensor, Tensor, Tensor, Terms, int], Sums]

LIBRARY = torch.library.Library("headwise", "FRAGMENT")
CALL = (  # q, k, v, and the fields of Terms
    "Tensor q, Tensor k, Tensor v, Tensor? additive, Tensor? intervals, Tensor? dense, "
    "Tensor position, Tensor? bias, Tensor? slopes, Tensor? relative, Tensor? sinks, Tensor? seed, "
    "float scale, float softcap, float dropout, SymInt first_key, SymInt[]? band"
)
_ROOM = ", ".join(["Tensor"] * len(Sums._fields))
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

SAFE = "streaming"  # the engine that takes over in a compiled graph or a backward pass
_RUNS: dict[str, tuple[Forward, Backward]] = {}  # by engine
PARTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}
"""The forward and backward behind each engine's operators, for callers with gradients of their own:
both take any part of the keys. The backward takes any forward's out and lse, and its gradients are
as wide as out, since those of other keys are to be added."""


def define(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Register headwise::<name>, computed by `run`, its shapes given by `shapes`, and return it."""
    LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"headwise::{name}", shapes, lib=LIBRARY)
    return getattr(torch.ops.headwise, name).default


@dataclass(frozen=True, eq=False)
class Operators:
    """An engine's forward and its gradients, called directly where nothing must see an operator."""

    run: Callable[..., tuple[Tensor, ...]]
    operator: Callable[..., tuple[Tensor, ...]]
    differentiate: Differentiate
    library_on: str

    def __call__(self, *given: Any, library: LibraryBackward | None = None) -> tuple[Tensor, ...]:
        """Return the `Sums` of an operator's arguments: q, k, v, those of `Terms`, and `wants`."""
        if intercepted(*given):
            return self.operator(*given)
        if not learns(given):
            return self.run(*given)
        rest = given[TENSORS:]

        def run(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
            sums = Sums(*self.run(*tensors, *rest))
            return (*RowResults.of(sums), *(x if x.ndim > 1 else None for x in sums[4:8]))

        found = self.learning(run, _IN_ORDER, rest[:-1], library)(*given[:TENSORS])
        nothing = found[1].new_empty(0)
        found = tuple(nothing if x is None else x for x in found)
        return Sums._make((*found[:3], found[4], *found[5:], found[3]))

    def learning(
        self,
        run: Callable[..., Any],
        sources: Sources,
        numbers: tuple[Any, ...],
        library: LibraryBackward | None = None,
    ) -> LearningCall:
        """Return a call with gradients, whose forward is `run`."""
        library = LibraryBackward(self.library_on) if library is None else library
        return LearningCall(run, sources, numbers, self.differentiate, library)


def operators(engine: str, run: Forward, differentiate: Backward, library_on: str) -> Operators:
    """Register headwise::<engine> and headwise::<engine>_backward, and return them.

    On devices of the type `library_on`, one of PyTorch's kernels computes the gradients if it can.
    """
    _RUNS[engine] = run, differentiate
    run = _or_safe(engine, run, 0, (False, True))
    differentiate = _or_safe(engine, differentiate, 1, (True,))

    def forward(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
        with without_autocast(q.device):
            sums: Sums = run(q, k, v, Terms(*given[:_TERMS]), given[_TERMS])
        return sums

    def backward(
        library: LibraryBackward | None, q: Tensor, k: Tensor, v: Tensor, *given: Any
    ) -> list[Tensor]:
        terms = Terms(*given[:_TERMS])
        out, lse, max_logit, log_total, entropy, grad_out, *others = given[_TERMS:]
        with without_autocast(q.device):
            alone = others[0] is None and others[1] is None  # only out has a gradient
            if library is not None and alone and out.dtype == q.dtype:
                three = library.gradients(q, k, v, terms, out, lse, grad_out)
                if three is not None:
                    return list(three)
            totals = RowTotals.known(lse, max_logit, log_total)
            found = differentiate(q, k, v, terms, out, totals, entropy, grad_out, *others)
        return [
            grad.to(x.dtype if library is not None else torch.promote_types(x.dtype, out.dtype))
            for grad, x in zip(found, _learnable(q, k, v, terms, given[-1]), strict=True)
            if grad is not None and x is not None
        ]

    def backward_anew(*given: Any) -> list[Tensor]:
        return backward(LibraryBackward(library_on), *given)

    PARTS[engine] = forward, partial(backward, None)

    def packed_backward(*given: Any) -> list[Tensor]:
        return [grad.contiguous() for grad in backward_anew(*given)]  # as `_backward_shapes` says

    def differentiated(
        tensors: list[Tensor | None],
        numbers: tuple[Any, ...],
        known: RowResults,
        grads: RowGradients,
        bias_learns: bool,
        library: LibraryBackward | None = None,
    ) -> list[Tensor | None]:
        result: list[Tensor | None] = [None] * TENSORS
        if all(grad is None for grad in grads):
            return result
        nothing = known.lse.new_empty(0) if any(x is None for x in known) else known.lse
        results = [nothing if x is None else x for x in known]
        grad_out = torch.zeros_like(known.out) if grads.out is None else grads.out
        asked = (*tensors, *numbers, *results, grad_out, *grads[1:], bias_learns)
        if intercepted(*tensors[:3], grad_out) or learns(asked):
            found = iter(operator(*asked))
        else:
            library = LibraryBackward(library_on) if library is None else library
            found = iter(backward(library, *asked))
        for place in _LEARNABLE:
            if tensors[place] is not None and (place != BIAS or bias_learns):
                result[place] = next(found)
        return result

    def gradient(ctx, grad_out, grad_lse, _max, grad_entropy, *_):  # type: ignore[no-untyped-def]
        *tensors, out, lse, max_logit, log_total, entropy = ctx.saved_tensors
        grads = RowGradients(grad_out, grad_lse, grad_entropy if ctx.wants & ENTROPY else None)
        bias_learns = tensors[BIAS] is not None and ctx.needs_input_grad[BIAS]
        known = RowResults(out, lse, max_logit, log_total, entropy)
        found = differentiated(tensors, ctx.numbers, known, grads, bias_learns)
        return (*found, *[None] * (len(ctx.numbers) + 1))

    def no_second(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            f"headwise's {engine} engine has no second derivative; "
            "use engine='reference', which has all derivatives"
        )

    def apart(*given: Any) -> tuple[Tensor, ...]:
        return _apart(forward(*given))

    computed = define(engine, f"({CALL}, int wants) -> ({_ROOM})", apart, _forward_shapes)
    operator = define(
        f"{engine}_backward",
        f"({CALL}, Tensor out, Tensor lse, Tensor max_logit, Tensor log_total, Tensor entropy, "
        "Tensor grad_out, Tensor? grad_lse, Tensor? grad_entropy, bool bias_learns) -> Tensor[]",
        packed_backward,
        _backward_shapes,
    )
    torch.library.register_autograd(computed, gradient, setup_context=_setup, lib=LIBRARY)
    torch.library.register_autograd(operator, no_second, lib=LIBRARY)
    ops = torch.ops.headwise
    flops.register(getattr(ops, engine), getattr(ops, f"{engine}_backward"))
    return Operators(forward, computed, differentiated, library_on)


def _or_safe(
    engine: str, run: Callable[..., Any], place: int, learns: tuple[bool, ...]
) -> Callable[..., Any]:
    """Return `run`, whose calls the SAFE engine computes if their kernels fail.

    A failing call is left to its caller if that plans again. `learns`: the calls that fail with it,
    those without gradients (False) and those with gradients (True).
    """

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
        return _RUNS[SAFE][place](q, k, v, terms, *rest)

    return call


def direct(run: Callable[..., Any], operator: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run`, or the operator if something must see it.

    Calling an operator takes longer than a short kernel.
    """

    def call(q: Tensor, *given: Any) -> Any:
        return (operator if noticed(q, *given) else run)(q, *given)

    return call


def noticed(*given: object) -> bool:
    """Return whether gradients, compilers, modes or transforms must see a call as an operator."""
    return intercepted(*given) or learns(given)


def intercepted(*given: object) -> bool:
    """Return whether compilers, modes or transforms must see a call as an operator."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() > 0 or forward_ad._current_level >= 0:
        return True
    if torch._C._get_tracing_state() is not None:
        return True
    for x in given:
        if isinstance(x, Tensor):
            if x.is_meta or x.is_neg():
                return True
            if type(x) is not Tensor and type(x) is not Parameter:
                return True
    return False


def _learnable(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, bias_learns: bool
) -> tuple[Tensor | None, ...]:
    bias = terms.bias if bias_learns else None
    return q, k, v, terms.additive, bias, terms.slopes, terms.relative, terms.sinks


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return _apart(room(q, v, given[_TERMS]))


def _apart(sums: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Replace repeated tensors by empty ones: an operator may not return one tensor twice."""
    first = {id(x): place for place, x in reversed(list(enumerate(sums)))}
    return tuple(
        x if first[id(x)] == place else torch.empty_like(x) for place, x in enumerate(sums)
    )


def _backward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in _learnable(q, k, v, Terms(*given[:_TERMS]), given[-1])
        if x is not None
    ]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.wants = inputs[TENSORS:-1], inputs[-1]
    ctx.mark_non_differentiable(output[2], *output[4:])
    ctx.set_materialize_grads(False)
    sums = Sums(*output)
    known = (sums.out, sums.lse, sums.max_logit, sums.log_total, sums.entropy)
    ctx.save_for_backward(*inputs[:TENSORS], *known)
