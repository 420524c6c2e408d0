"""Block shapes by what a kernel has to hold: a small table, measured, so that no call is tuned.

The bfloat16 choices are the best of bench/results/gpu_shapes.json, an NVIDIA H200's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A kernel's tile, rows by keys, its warps, and how many loads it keeps in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Shape(32, 32, 4, 1)  # small, so that small problems have edges and a middle


def forward_shape(width: int, itemsize: int) -> Shape:
    """Of the forward kernel, for a padded head width and the bytes of an element."""
    if itemsize == 4:
        return Shape(128, 64, 8, 2) if width <= 128 else Shape(64, 32, 8, 1)
    if width <= 64:
        return Shape(64, 128, 4, 3)
    return Shape(128, 128, 8, 3) if width <= 128 else Shape(128, 64, 8, 2)


def queries_shape(width: int, itemsize: int) -> Shape:
    """Of the kernel of the queries' gradient."""
    if itemsize == 4:
        return Shape(64, 32, 4, 1) if width <= 128 else Shape(64, 16, 4, 1)
    if width <= 64:
        return Shape(128, 64, 4, 3)
    return Shape(128, 64, 8, 3) if width <= 128 else Shape(128, 32, 8, 2)


def keys_shape(width: int, itemsize: int) -> Shape:
    """Of the kernel of the keys' and values' gradients."""
    if itemsize == 4:
        return Shape(32, 64, 4, 1) if width <= 128 else Shape(16, 64, 8, 1)
    if width <= 64:
        return Shape(32, 128, 4, 3)
    return Shape(64, 64, 4, 2) if width <= 128 else Shape(64, 64, 8, 2)
