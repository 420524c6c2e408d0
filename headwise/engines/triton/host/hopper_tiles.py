"""TMA descriptors of the Hopper kernels' tiles."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headwise.engines.triton.host.operands import Steps


@cache
def layout(dtype: torch.dtype, rows: int, width: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout of a tile."""
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, width], kind)


@cache
def unswizzled(rank: int) -> gl.NVMMASharedLayout:
    """Return a shared-memory layout in which 32-bit numbers lie as in memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=rank)


def tiles(x: Tensor, steps: Steps, rows: int, width: int) -> TensorDescriptor:
    """Return a descriptor of (B, H, N, D), as (rows, width) tiles of one head each."""
    return _descriptor(x, steps, [1, 1, rows, width], layout(x.dtype, rows, width))


def flat(x: Tensor, block: list[int]) -> TensorDescriptor:
    """Return a descriptor of contiguous 32-bit numbers."""
    return _descriptor(x, list(x.stride()), block, unswizzled(len(block)))


def _descriptor(
    x: Tensor, steps: Steps, block: list[int], kind: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Return a descriptor, skipping its own checks as `operands` does."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.base, made.shape, made.strides = x, list(x.shape), steps
    made.block_shape, made.layout = block, kind
    made.padding, made.round_f32_to_tf32 = "zero", False
    return made
