"""Masks of every kind of intervals, for calls of two batch entries and two heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import headwise as hw
from headwise.core.place import Place

B, H = 2, 2
Make = Callable[[int, int], hw.mask.Mask | None]  # of queries and keys


def ids(m: int) -> Tensor:
    """Return documents that begin anywhere: some shorter than a tile, others longer."""
    return (torch.rand(B, m) < 0.03).cumsum(-1)


def some(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape)


MASKS: dict[str, Make] = {
    "none": lambda n, m: None,
    "causal": lambda n, m: hw.mask.causal(),
    "first rows see nothing": lambda n, m: hw.mask.causal(offset=-60),
    "last keys are hidden": lambda n, m: hw.mask.causal(offset=-30),
    "window": lambda n, m: hw.mask.causal() & hw.mask.window(70),
    "both sides": lambda n, m: hw.mask.window(50, 40, offset=60),
    "offsets": lambda n, m: hw.mask.causal([-20, 150]),
    "documents": lambda n, m: hw.mask.documents(ids(m)),
    "causal documents": lambda n, m: hw.mask.causal() & hw.mask.documents(ids(m)),
    "prefix": lambda n, m: hw.mask.causal() | hw.mask.prefix([70, 0]),
    "sinks and window": lambda n, m: hw.mask.causal() & (hw.mask.window(60) | hw.mask.prefix(4)),
    "sinks and narrow window": lambda n, m: (
        hw.mask.causal() & (hw.mask.window(3) | hw.mask.prefix(1))
    ),
    "lengths": lambda n, m: hw.mask.lengths([m - 50, 20]),
    "nothing": lambda n, m: hw.mask.lengths([0, m]),
    "padding on the left": lambda n, m: (
        hw.mask.causal() & hw.mask.between(torch.tensor([40, 170])[:, None, None], torch.tensor(m))
    ),
    "some in the middle": lambda n, m: hw.mask.between(some(60, 80, B, H, 1), torch.tensor(130)),
    "any": lambda n, m: hw.mask.between(some(-1, m, B, 1, n), some(0, m + 2, 1, H, n)),
    "any two": lambda n, m: (
        hw.mask.between(some(0, m, 1, H, n), some(0, m, B, 1, n)) | hw.mask.lengths([5, 90])
    ),
}


def hide(x: Tensor, mask: hw.mask.Mask | None, n: int) -> Tensor:
    """Return keys or values with NaN where no row sees them."""
    if mask is None:
        return x
    m, heads = x.shape[2], x.shape[1]
    place = Place(B, H, n, m, offset=m - n, device=x.device)
    seen = mask.to_dense(place).expand(B, H, n, m)
    return x.masked_fill(~seen.unflatten(1, (heads, -1)).any(2).any(2)[..., None], torch.nan)
