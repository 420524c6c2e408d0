"""Any problem, block by block, in memory that grows with n: output and statistics in one pass.

The loop is `Partial` and `merge`. Forward and backward are operators of their own, so that
`torch.compile`, `torch.export` and FlopCounterMode meet two nodes and no Python.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.engines.loops import Backward, Forward
from headwise.problem import Problem, Terms
from headwise.sums import Sums, room


def refuses(problem: Problem, observed: bool) -> str | None:
    """Why this engine can't serve the problem; None: it can."""
    return None


def attend(problem: Problem) -> Tensor:
    """out (B, Hq, N, Dv)."""
    return run(problem, 0).out


def run(problem: Problem, wants: int) -> Sums:
    """The output and the sums that `wants` names."""
    return Sums(*_forward(problem.q, problem.k, problem.v, *problem.terms(), wants))


@torch.library.custom_op("headwise::streaming", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    additive: Tensor | None,
    intervals: Tensor | None,
    dense: Tensor | None,
    position: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    first_key: int,
    wants: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(
        additive, intervals, dense, position, bias, slopes, relative, sinks, seed,
        scale, softcap, dropout, first_key,
    )  # fmt: skip
    return tuple(Forward(q, k, v, terms, wants).run())


@_forward.register_fake
def _(q, k, v, *terms_and_wants):  # type: ignore[no-untyped-def]
    return tuple(room(q, v, terms_and_wants[-1]))


@torch.library.custom_op("headwise::streaming_backward", mutates_args=())
def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    additive: Tensor | None,
    intervals: Tensor | None,
    dense: Tensor | None,
    position: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    relative: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    softcap: float,
    dropout: float,
    first_key: int,
    out: Tensor,
    lse: Tensor,
    entropy: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
) -> list[Tensor]:
    terms = Terms(
        additive, intervals, dense, position, bias, slopes, relative, sinks, seed,
        scale, softcap, dropout, first_key,
    )  # fmt: skip
    loop = Backward(q, k, v, terms, out, lse, entropy, grad_out, grad_lse, grad_entropy)
    loop.run()
    grads = (
        (loop.grad_q, q),
        (loop.grad_k, k),
        (loop.grad_v, v),
        (loop.grad_additive, additive),
        (loop.grad_bias, bias),
        (loop.grad_slopes, slopes),
        (loop.grad_relative, relative),
        (loop.grad_sinks, sinks),
    )
    return [grad.to(x.dtype) for grad, x in grads if grad is not None and x is not None]


@_backward.register_fake
def _(q, k, v, additive, intervals, dense, position, bias, slopes, relative, sinks, *rest):  # type: ignore[no-untyped-def]
    given = (q, k, v, additive, bias, slopes, relative, sinks)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given if x is not None]


_LEARNABLE = (0, 1, 2, 3, 7, 8, 9, 10)  # arguments of the forward that have a gradient


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, numbers = inputs[:12], inputs[12:16]
    ctx.numbers = numbers
    ctx.mark_non_differentiable(output[2], *output[4:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0], output[1], output[3])


def _gradient(ctx, grad_out, grad_lse, _max, grad_entropy, *_):  # type: ignore[no-untyped-def]
    *tensors, out, lse, entropy = ctx.saved_tensors
    grads: list[Tensor | None] = [None] * 17
    if grad_out is None and grad_lse is None and grad_entropy is None:
        return tuple(grads)
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    found = iter(_backward(*tensors, *ctx.numbers, out, lse, entropy, grad_out, grad_lse, grad_entropy))
    for place in _LEARNABLE:
        if tensors[place] is not None:
            grads[place] = next(found)
    return tuple(grads)


_forward.register_autograd(_gradient, setup_context=_setup)


def _no_second(ctx, *grads):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        "headwise's streaming engine has no second derivative; engine='reference' has all of them"
    )


_backward.register_autograd(_no_second)
