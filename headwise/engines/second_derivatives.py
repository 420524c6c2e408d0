"""Second derivatives, which only `reference` has: the others say so when one is asked for.

PyTorch's fused kernels name a private operator that has no derivative, and not what to do about it.
"""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor
from torch.autograd.graph import Node

FUSED = "ScaledDotProduct"  # how the names of the fused kernels' nodes of autograd begin


def refuse(engine: str) -> Never:
    """Raise the error of an engine whose gradients are to be differentiated."""
    raise NotImplementedError(
        f"headwise's {engine} engine has no second derivative; use engine='reference' of "
        "hw.attention or hw.observe, which has all derivatives"
    )


def differentiated_once(out: Tensor) -> Tensor:
    """Return what one of PyTorch's kernels computed; its second derivative is refused in words."""
    # Compilers see no hooks, and of transforms the plan knows how often they differentiate.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return out
    node: Node | None = out.grad_fn
    if node is not None and node.name().startswith(FUSED):
        node.register_hook(_followed)
    return out


def _followed(grads: Any, _: Any) -> Any:
    """Return the gradients of a kernel's inputs, as the results of a node that refuses."""
    if not torch.is_grad_enabled():  # no graph of this backward is made
        return None
    return tuple(None if x is None else _Refusing.apply(x) for x in grads)  # type: ignore[no-untyped-call]


class _Refusing(torch.autograd.Function):
    """The same tensor, which can't be differentiated."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Never:
        refuse("sdpa")
