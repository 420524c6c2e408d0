"""The limits of the Triton engine's kernels."""

from __future__ import annotations

import os

import torch

WIDEST = 256  # head width: beyond it a tile no longer fits beside its accumulators
WIDEST_ADDITIVE = 128  # beyond it a gradient no longer fits beside its tile
GRID = 65535  # programs along the second and the third axis of a grid, at most
LIBRARY_ON = "cuda"  # where PyTorch's kernels may compute the gradients; the interpreter's are ours
OLDEST = 8  # Ampere: the first with bfloat16 products and asynchronous copies


def fits_grid(q: torch.Size) -> bool:
    """Return whether a grid has room for the batch entries and heads of queries (B, Hq, N, D)."""
    return max(q[:2]) <= GRID


def interpreting() -> bool:
    """Return whether Triton's interpreter runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"
