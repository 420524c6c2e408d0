"""Cells as they travel: the logarithm of a weight in two bytes."""

import torch
from torch import Tensor


def encoded(weights: Tensor) -> bytes:
    """Weights as little-endian float16 of log2(weight), -inf for 0, row by row.

    Two bytes of the weight itself would end at 6e-8. Its logarithm is right to 0.3 % down to 1e-5
    and to 3 % at the smallest weight that a float32 can hold.

    >>> encoded(torch.tensor([1.0, 0.5, 0.0])).hex(" ", 2)
    '0000 00bc 00fc'
    """
    cells = weights.detach().to("cpu", torch.float32).log2_().to(torch.float16)
    return cells.contiguous().view(torch.uint8).numpy().tobytes()


def decoded(cells: bytes, *shape: int) -> Tensor:
    """The weights that `encoded` was given, more or less, float32.

    >>> decoded(encoded(torch.tensor([1.0, 0.25, 0.0])), 3)
    tensor([1.0000, 0.2500, 0.0000])
    """
    return torch.frombuffer(bytearray(cells), dtype=torch.float16).float().exp2_().view(shape)


def plain(values: Tensor) -> bytes:
    """Numbers as little-endian float32."""
    return values.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()
