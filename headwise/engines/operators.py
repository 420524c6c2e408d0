"""An engine's forward and backward as PyTorch operators, with shapes, gradients and FLOP counts.

`torch.compile`, `torch.export` and FlopCounterMode see two nodes, whichever engine they come from.
The operators are defined by schema, because the wrapper of `torch.library.custom_op` checks every
call for aliases and loads all of torch's compiler. If nothing needs to see the operator, its
implementation is called directly, and with gradients as one node of autograd (`learning`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Terms, without_autocast
from headwise.core.row_sums import ENTROPY, RowResults, RowTotals, empty_results, unpacked
from headwise.engines import failures, flops
from headwise.engines.calls import intercepted, learns
from headwise.engines.failures import KernelError, family_of_terms
from headwise.engines.gradients import (
    BackwardInputs,
    Gradients,
    RowGradients,
    without_gradients,
)
from headwise.engines.learning import BIAS, FOR_BACKWARD, TENSORS, LearningCall, Sources
from headwise.engines.library_backward import LibraryBackward
from headwise.engines.second_derivatives import refuse

SAFE = "streaming"


def guarded(
    engine: str, run: Callable[..., Any], instead: Callable[..., Any], learns: tuple[bool, ...]
) -> Callable[..., Any]:
    """Return `run`, an engine's function of q, k, v, terms, …; `instead` serves if a kernel fails.

    Calls like it are planned for another engine from then on: those without gradients (False in
    `learns`) and with (True).
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
        return instead(q, k, v, terms.without_band(q.shape[2], k.shape[2]), *rest)

    return call


Forward = Callable[[Tensor, Tensor, Tensor, Terms, int], RowResults]
Backward = Callable[[Tensor, Tensor, Tensor, Terms, BackwardInputs], Gradients]

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
LEARNABLE = (0, 1, 2, 3, BIAS, 8, 9, 10)  # arguments of the forward that have a gradient

_ENGINES: dict[str, tuple[Forward, Backward]] = {}  # their own functions
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


def refuse_second(backward: Any, engine: str) -> None:
    """Have the operator of an engine's backward say that it has no derivative."""

    def no_second(ctx, *grads):  # type: ignore[no-untyped-def]
        refuse(engine)

    torch.library.register_autograd(backward, no_second, lib=LIBRARY)


def differentiable(
    forward: Any, backward: Any, learns: tuple[int, ...], engine: str, bias: int | None = None
) -> None:
    """Give an operator's first result a gradient, which the operator `backward` takes.

    `backward` takes the inputs of `forward`, its results, that gradient, and with the place of a
    bias whether the bias learns. It lists the gradients of the inputs at the places `learns`,
    without those that are None.
    """

    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.inputs = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.places = [place for place, x in enumerate(inputs) if isinstance(x, Tensor)]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[place] for place in ctx.places), *output)

    def gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        inputs, count = list(ctx.inputs), len(ctx.places)
        result: list[Tensor | None] = [None] * len(inputs)
        if grad is None:
            return tuple(result)
        for place, x in zip(ctx.places, ctx.saved_tensors[:count], strict=True):
            inputs[place] = x
        bias_learns = bias is not None and inputs[bias] is not None and ctx.needs_input_grad[bias]
        places = [x for x in learns if inputs[x] is not None and (x != bias or bias_learns)]
        more = () if bias is None else (bias_learns,)
        found = backward(*inputs, *ctx.saved_tensors[count:], grad.contiguous(), *more)
        for place, each in zip(places, found, strict=True):
            result[place] = each
        return tuple(result)

    torch.library.register_autograd(forward, gradient, setup_context=setup, lib=LIBRARY)
    refuse_second(backward, engine)


class Operators:
    """An engine's forward and its gradients, called directly where nothing must see an operator.

    They are registered as headwise::<engine> and headwise::<engine>_backward. On devices of the
    type `library_on`, one of PyTorch's kernels computes the gradients if it can, unless the
    engine's own are `ahead` of it.
    """

    def __init__(
        self,
        engine: str,
        run: Forward,
        differentiate: Backward,
        library_on: str,
        ahead: Callable[[Tensor, Tensor, Tensor, Terms], bool] = lambda *_: False,
    ) -> None:
        self.engine, self.library_on, self.ahead = engine, library_on, ahead
        _ENGINES[engine] = run, differentiate
        self.run: Forward = guarded(
            engine, run, lambda *given: _ENGINES[SAFE][0](*given), (False, True)
        )
        self.differentiate: Backward = guarded(
            engine, differentiate, lambda *given: _ENGINES[SAFE][1](*given), (True,)
        )
        PARTS[engine] = self.results, partial(self.gradients, None)
        backward = f"{engine}_backward"
        self.forward = define(engine, FORWARD, self._packed_forward, _forward_shapes)
        self.backward = define(backward, BACKWARD, self._packed_backward, gradient_shapes)
        torch.library.register_autograd(
            self.forward, self._gradient, setup_context=_setup, lib=LIBRARY
        )
        refuse_second(self.backward, engine)
        ops = torch.ops.headwise
        flops.register(getattr(ops, engine), getattr(ops, backward))

    def __call__(self, *given: Any, library: LibraryBackward | None = None) -> RowResults:
        """Return the results of an operator's arguments: q, k, v, those of `Terms`, and `wants`."""
        if intercepted(*given):
            return RowResults(*unpacked(self.forward(*given)))  # type: ignore[arg-type]
        if not learns(given):
            return self.results(*given)
        rest = given[TENSORS:]

        def run(*tensors: Any) -> RowResults:
            return self.results(*tensors, *rest)

        return RowResults(*self.learning(run, _IN_ORDER, rest[:-1], library)(*given[:TENSORS]))

    def learning(
        self,
        run: Callable[..., Any],
        sources: Sources,
        numbers: tuple[Any, ...],
        library: LibraryBackward | None = None,
    ) -> LearningCall:
        """Return a call with gradients, whose forward is `run`."""
        library = LibraryBackward(self.library_on) if library is None else library
        return LearningCall(run, sources, numbers, partial(self.gradients_by_place, library))

    def results(self, q: Tensor, k: Tensor, v: Tensor, *given: Any) -> RowResults:
        """Return the results of a call."""
        with without_autocast(q.device):
            return self.run(q, k, v, Terms(*given[:_TERMS]), given[_TERMS])

    def gradients(
        self, library: LibraryBackward | None, q: Tensor, k: Tensor, v: Tensor, *given: Any
    ) -> list[Tensor]:
        """Return the gradients of the tensors that learn, from PyTorch's kernel if it can.

        Without `library` the engine computes them, as wide as out.
        """
        terms = Terms(*given[:_TERMS])
        out, lse, max_logit, log_total, entropy, grad_out, *others = given[_TERMS:]
        with without_autocast(q.device):
            alone = others[0] is None and others[1] is None  # only out has a gradient
            asked = alone and out.dtype == q.dtype and not self.ahead(q, k, v, terms)
            if library is not None and asked:
                three = library.gradients(q, k, v, terms, out, lse, grad_out)
                if three is not None:
                    return list(three)
            totals = RowTotals.known(lse, max_logit, log_total)
            inputs = BackwardInputs(out, totals, entropy, grad_out, *others)
            found = self.differentiate(q, k, v, terms, inputs)
        return [
            grad.to(x.dtype if library is not None else torch.promote_types(x.dtype, out.dtype))
            for grad, x in zip(found, learnable(q, k, v, terms, given[-1]), strict=True)
            if grad is not None and x is not None
        ]

    def gradients_by_place(
        self,
        library: LibraryBackward,
        tensors: Sequence[Tensor | None],
        numbers: tuple[Any, ...],
        known: Sequence[Tensor | None],
        grads: RowGradients,
        bias_learns: bool,
    ) -> list[Tensor | None]:
        """Return a gradient for each of an operator's tensors, or None.

        `known` are the first FOR_BACKWARD of the forward's results.
        """
        result: list[Tensor | None] = [None] * TENSORS
        if all(grad is None for grad in grads):
            return result
        grad_out = torch.zeros_like(known[0]) if grads.out is None else grads.out  # type: ignore[arg-type]
        asked = (*tensors, *numbers, *known, grad_out, *grads[1:], bias_learns)
        if intercepted(*tensors[:3], grad_out) or learns(asked):
            found = iter(self.backward(*asked))
        else:
            found = iter(self.gradients(library, *asked))
        for place in LEARNABLE:
            if tensors[place] is not None and (place != BIAS or bias_learns):
                result[place] = next(found)
        return result

    def _packed_forward(self, *given: Any) -> tuple[Tensor, ...]:
        return self.results(*given).packed()

    def _packed_backward(self, *given: Any) -> list[Tensor]:
        """Compute the backward operator, whose results are laid out as `gradient_shapes` says."""
        found = self.gradients(LibraryBackward(self.library_on), *given)
        return [grad.contiguous() for grad in found]

    def _gradient(self, ctx, *grads_of_results):  # type: ignore[no-untyped-def]
        """Return the gradients of the forward operator's arguments."""
        tensors, known = ctx.saved_tensors[:TENSORS], unpacked(ctx.saved_tensors[TENSORS:])
        grads = RowGradients.of(grads_of_results)
        grads = grads if ctx.wants & ENTROPY else grads._replace(entropy=None)
        bias_learns = tensors[BIAS] is not None and ctx.needs_input_grad[BIAS]
        library = LibraryBackward(self.library_on)
        found = self.gradients_by_place(library, tensors, ctx.numbers, known, grads, bias_learns)
        return (*found, *[None] * (len(ctx.numbers) + 1))


def learnable(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, bias_learns: bool
) -> tuple[Tensor | None, ...]:
    """Return the arguments at the places LEARNABLE that may have a gradient."""
    bias = terms.bias if bias_learns else None
    return q, k, v, terms.additive, bias, terms.slopes, terms.relative, terms.sinks


def _forward_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> tuple[Tensor, ...]:
    return empty_results(q, v, given[_TERMS]).packed()


def gradient_shapes(q: Tensor, k: Tensor, v: Tensor, *given: Any) -> list[Tensor]:
    """Return gradients of `learnable` without numbers."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in learnable(q, k, v, Terms(*given[:_TERMS]), given[-1])
        if x is not None
    ]


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.numbers, ctx.wants = inputs[TENSORS:-1], inputs[-1]
    ctx.mark_non_differentiable(*without_gradients(output))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:TENSORS], *output[:FOR_BACKWARD])
