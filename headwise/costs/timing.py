"""The time that a list of kernels takes on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headwise.core.place import Place
from headwise.costs.kernel import AttentionShape, Kernel
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.speeds import Speeds
from headwise.costs.visible import count_pairs
from headwise.engines.decoding import is_decoding

FEW = 4
"""With at most so many queries attention reads keys and values rather than computing; on a GPU also
with those that headwise's kernels for decoding take."""

PRODUCTS = ("matmul", "convolution")


def seconds(kernels: Sequence[Kernel], device: Device) -> float:
    """The time of kernels that run one after another.

    Each kernel takes as long as its work, or as its traffic to and from memory if that is longer,
    and a launch. Work is counted as executed: whole tiles of pairs, and exponentials beside matrix
    products.
    """
    return sum(kernel.count * kernel_seconds(kernel, device) for kernel in kernels)


def kernel_seconds(kernel: Kernel, device: Device) -> float:
    """The time of one run of a kernel."""
    shape = kernel.shape
    if isinstance(shape, AttentionShape) and not shape.additive:
        speeds = device.speeds(kernel.dtype)
        return speeds.launch + _attention(kernel, shape, speeds, device.units or 1)
    if kernel.kind in PRODUCTS:
        speeds = device.speeds(kernel.dtype)
        work, traffic = kernel.flops_executed * speeds.flop, kernel.bytes_moved * speeds.flop_byte
    else:
        speeds = _any(device, kernel.dtype)
        work, traffic = kernel.special * speeds.special, kernel.bytes_moved * speeds.byte
    return speeds.launch + (max(work, traffic) if speeds.overlap else work + traffic)


def _attention(kernel: Kernel, shape: AttentionShape, speeds: Speeds, units: int) -> float:
    speed = speeds.of_width((shape.head_dim + shape.value_dim) / 2)
    if kernel.backward:
        return _busy(shape, speeds, units) * _executed(shape, speeds) * speed.backward_pair
    if _few(shape, speeds):
        return shape.pairs * speed.decode_pair + kernel.bytes_read * speed.decode_byte
    rows = shape.batch * shape.heads * shape.queries
    work = _executed(shape, speeds) * speed.pair + rows * speed.row
    return max(work * _busy(shape, speeds, units), kernel.bytes_moved * speeds.byte)


def _few(shape: AttentionShape, speeds: Speeds) -> bool:
    """True if reading keys and values takes the time; a GPU has kernels for that."""
    if speeds.overlap and is_decoding(
        torch.Size((shape.batch, shape.heads, shape.queries, shape.head_dim)),
        torch.Size((shape.batch, shape.kv_heads, shape.keys, shape.head_dim)),
    ):
        return True
    return shape.queries <= FEW


def _executed(shape: AttentionShape, speeds: Speeds) -> int:
    """Pairs in the tiles that this device's kernels visit."""
    if shape.mask is None:
        return shape.executed_pairs
    queries, keys = shape.queries, shape.keys
    place = Place(shape.batch, shape.heads, queries, keys, offset=keys - queries)
    found = count_pairs(shape.mask, place, speeds.tile)
    # A rank of context parallelism has queries from elsewhere: its tiles were counted with it.
    return found.executed if found.visible == shape.pairs else shape.executed_pairs


def _busy(shape: AttentionShape, speeds: Speeds, units: int) -> float:
    """How much longer it takes if there are fewer blocks of queries than units to compute them."""
    blocks = shape.batch * shape.heads * -(-shape.queries // speeds.tile[0])
    return max(1.0, units / blocks)


def _any(device: Device, dtype: str) -> Speeds:
    """Speeds of work without matrix products, which takes its bytes in every dtype."""
    known = (dtype, *device.measured, *device.matrix)
    return device.speeds(next(each for each in known if each in device.matrix))
