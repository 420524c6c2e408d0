"""A forward and a backward as two operators that PyTorch knows: their shapes and gradients.

`torch.compile`, `torch.export` and FlopCounterMode meet two nodes, whichever engine made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from headwise import flops
from headwise.problem import Terms, without_autocast
from headwise.sums import ENTROPY, Sums, room

Forward = Callable[[Tensor, Tensor, Tensor, Terms, int], Sums]

_LEARNABLE = (0, 1, 2, 3, 7, 8, 9, 10)  # arguments of the forward that have a gradient


class Gradients(NamedTuple):
    """One for each of a call's learnable tensors; None where the call has no such tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    additive: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    relative: Tensor | None
    sinks: Tensor | None


Backward = Callable[..., Gradients]  # (q, k, v, terms, out, lse, entropy, and their gradients)


def operators(
    engine: str, run: Forward, differentiate: Backward
) -> Callable[..., tuple[Tensor, ...]]:
    """Register headwise::<engine> and headwise::<engine>_backward; the first is returned."""

    @torch.library.custom_op(f"headwise::{engine}", mutates_args=())
    def forward(
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
        with without_autocast(q.device):
            return run(q, k, v, terms, wants)

    @forward.register_fake
    def _(q, k, v, *terms_and_wants):  # type: ignore[no-untyped-def]
        return tuple(room(q, v, terms_and_wants[-1]))

    @torch.library.custom_op(f"headwise::{engine}_backward", mutates_args=())
    def backward(
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
        asked = (out, lse, entropy, grad_out, grad_lse, grad_entropy)
        with without_autocast(q.device):
            found = differentiate(q, k, v, terms, *asked)
        given = (q, k, v, additive, bias, slopes, relative, sinks)
        return [
            grad.to(x.dtype).contiguous()  # as the shapes below promise
            for grad, x in zip(found, given, strict=True)
            if grad is not None and x is not None
        ]

    @backward.register_fake
    def _(q, k, v, additive, intervals, dense, position, bias, slopes, relative, sinks, *rest):  # type: ignore[no-untyped-def]
        given = (q, k, v, additive, bias, slopes, relative, sinks)
        return [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            for x in given
            if x is not None
        ]

    def gradient(ctx, grad_out, grad_lse, _max, grad_entropy, *_):  # type: ignore[no-untyped-def]
        *tensors, out, lse, entropy = ctx.saved_tensors
        grad_entropy = grad_entropy if ctx.wants & ENTROPY else None  # there is none to flow into
        grads: list[Tensor | None] = [None] * 17
        if grad_out is None and grad_lse is None and grad_entropy is None:
            return tuple(grads)
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        asked = (out, lse, entropy, grad_out, grad_lse, grad_entropy)
        found = iter(backward(*tensors, *ctx.numbers, *asked))
        for place in _LEARNABLE:
            if tensors[place] is not None:
                grads[place] = next(found)
        return tuple(grads)

    def no_second(ctx, *grads):  # type: ignore[no-untyped-def]
        raise NotImplementedError(
            f"headwise's {engine} engine has no second derivative; "
            "engine='reference' has all of them"
        )

    forward.register_autograd(gradient, setup_context=_setup)
    backward.register_autograd(no_second)
    ops = torch.ops.headwise
    flops.register(getattr(ops, engine), getattr(ops, f"{engine}_backward"))
    return forward


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    tensors, numbers = inputs[:12], inputs[12:16]
    ctx.numbers, ctx.wants = numbers, inputs[16]
    ctx.mark_non_differentiable(output[2], *output[4:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, output[0], output[1], output[3])
