"""PyTorch's backward kernels, which differentiate any forward that returned out and lse.

A fused backward needs q, k, v, out and lse, whoever computed them. So a forward with statistics can
be followed by the backward of cuDNN or FlashAttention, which is faster than an engine's own. These
kernels take plain dot products over all keys or the causal triangle, and only out may receive a
gradient (`library_kernels`). A user who switches a kernel off gets the engine's own
backward: `torch.backends.cuda.enable_cudnn_sdp(False)`, or `enable_flash_sdp(False)`.
"""

from __future__ import annotations

import os
from functools import cache

import torch
from torch import Tensor

from headwise.core.problem import Terms
from headwise.engines import failures
from headwise.engines.library_kernels import (
    CPU,
    CUDNN,
    FLASH,
    KernelFit,
    LibraryKernel,
    Three,
    private_operator,
)

HOPPER_GENERATION = 9  # from here on cuDNN's backward is the fastest


def kernel_on(device: torch.device, only: str) -> LibraryKernel | None:
    """Return the fastest backward kernel for a device of the type `only`; None for other types."""
    if device.type != only:
        return None
    if only == "cpu":
        return CPU
    return CUDNN if _generation(device) >= HOPPER_GENERATION else FLASH


@cache
def _generation(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


class LibraryBackward:
    """The library's backward for all calls of one description, on devices of the type `only`.

    Asking a kernel whether it takes a call costs as much as calling it, so it is asked once, and
    again when one of PyTorch's switches has changed.
    """

    def __init__(self, only: str) -> None:
        self.only = only
        self._known: dict[tuple[object, ...], KernelFit | None] = {}

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, terms: Terms, out: Tensor, lse: Tensor, grad: Tensor
    ) -> Three | None:
        """Return the gradients of q, k and v from that of out; None if no kernel computes them."""
        kernel = kernel_on(q.device, self.only)
        if kernel is None:
            return None
        key = (kernel, *switches(kernel))
        if key not in self._known:
            self._known[key] = kernel.fit(q, k, v, terms)
        fit = self._known[key]
        if fit is None or kernel.rounds_too_much(lse):
            return None
        try:
            return kernel.gradients(fit, (q, k, v), terms.scale, out, lse, grad)
        except RuntimeError as error:
            failed = failures.failure(kernel.operator, error)
            if not isinstance(failed, failures.KernelError):
                raise
            failures.record(kernel.family(q, v), failed)
            return None


def switches(kernel: LibraryKernel) -> tuple[object, ...]:
    """Return what a kernel's answer depends on besides the call."""
    return (
        private_operator(kernel.operator, kernel.arguments),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_flash_sdp_enabled(),
        os.environ.get("TORCH_CUDNN_SDPA_AVOID_RECOMPILE"),
        len(failures.failed()),
    )


def described(engine: str, only: str, q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> str:
    """Return in words what differentiates a call that an engine computes, and why."""
    kernel = kernel_on(q.device, only)
    if kernel is None:
        return f"{engine}'s own"
    reason = kernel.refuses(q, k, v, terms)
    if reason is not None:
        return f"{engine}'s own: {kernel.name} {reason}"
    return f"{kernel.name}; {engine}'s own where lse or entropy has a gradient too"
