"""The time that a list of kernels takes on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from headwise.costs.kernel import Kernel


class Rates(Protocol):
    """The speeds of a device, per second."""

    @property
    def matmul(self) -> float: ...  # FLOPs of matrix products in the kernels' dtype
    @property
    def bandwidth(self) -> float: ...  # bytes
    @property
    def special(self) -> float: ...  # exponentials


def seconds(kernels: Sequence[Kernel], device: Rates) -> float:
    """The roofline: each kernel takes as long as the slowest of its three resources."""
    return sum(
        kernel.count
        * max(
            kernel.flops_executed / device.matmul,
            kernel.bytes_moved / device.bandwidth,
            kernel.special / device.special,
        )
        for kernel in kernels
    )
