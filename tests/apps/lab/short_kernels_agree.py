"""Triton's interpreter, in a process of its own: kernels of stacks against plain PyTorch."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.apps.train import stacking


def both_ways(layer: nn.Module, x: Tensor, *inputs: Tensor, **options: object) -> float:
    """The largest difference between kernels and PyTorch, in the output and all gradients."""
    torch.manual_seed(1)
    x.requires_grad_()
    weight, found = torch.randn_like(x), []
    for kernels in (True, False):
        stacking.kernels_serve = lambda *a, kernels=kernels: kernels
        out = layer(x, *inputs, **options)
        every = [x, *layer.parameters()]
        found.append((out, *torch.autograd.grad((out * weight).sum(), every)))
    return max(float((a - b).detach().abs().max()) for a, b in zip(*found, strict=True))


def main() -> None:
    """Print each layer that agrees."""
    assert stacking.kernels_work(torch.device("cpu"))
    torch.manual_seed(0)
    few = hw.mask.lengths(torch.tensor([5, 7, 1, 3]))
    causal, additive = hw.mask.causal(), hw.nn.Additive()
    cases = (
        ({}, few),
        ({"mask": causal}, None),
        ({"score": hw.Dot(1.0)}, few),
        ({"score": additive}, few),
        ({"score": additive, "mask": causal}, None),
        ({"head_dim": 4, "value_dim": 8}, few),
    )
    for options, mask in cases:
        pair = [hw.nn.MultiHeadAttention(32, 4, **options) for _ in range(2)]
        context = () if mask is None else (torch.randn(4, 7, 32),)
        worst = both_ways(stacking.stacked(pair), torch.randn(4, 7, 32), *context, mask=mask)
        print(options, "agrees" if worst < 1e-4 else worst)
    norms = [nn.LayerNorm(24) for _ in range(2)]
    for parameter in [p for norm in norms for p in norm.parameters()]:
        nn.init.normal_(parameter)
    worst = both_ways(stacking.stacked(norms), torch.randn(4, 11, 24))
    print("norm", "agrees" if worst < 1e-4 else worst)


if __name__ == "__main__":
    main()
