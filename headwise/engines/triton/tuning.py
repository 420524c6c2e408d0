"""`headwise doctor --tune`: measures a few tile shapes on the GPU at hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from headwise.core.options import Options
from headwise.core.patterns import Causal, Window
from headwise.core.problem import pose
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.host.cards import card
from headwise.engines.triton.host.tile_shapes import KERNELS, Shape, default, remember, use
from headwise.engines.triton.host.tile_shapes import shape as shape_of

WIDTHS = (64, 128, 256)
TOKENS = 16384  # enough to fill the largest chip
_TRIED = {
    "forward": (
        Shape(64, 64, 4, 3), Shape(64, 128, 4, 3), Shape(128, 64, 4, 3), Shape(128, 64, 8, 3),
        Shape(128, 128, 8, 2),
    ),
    "narrow": (Shape(64, 64, 4, 3), Shape(64, 128, 4, 3), Shape(128, 64, 8, 3)),
    "capped": (Shape(64, 64, 4, 2), Shape(64, 128, 4, 3), Shape(128, 64, 8, 2)),
    "queries": (
        Shape(64, 64, 4, 2), Shape(128, 32, 4, 3), Shape(128, 64, 4, 3), Shape(128, 64, 8, 2),
    ),
    "capped queries": (Shape(64, 64, 4, 3), Shape(128, 64, 4, 3), Shape(128, 64, 8, 2)),
    "capped keys": (Shape(32, 64, 4, 2), Shape(32, 128, 4, 3), Shape(64, 64, 4, 3)),
    "keys": (
        Shape(32, 64, 4, 2), Shape(32, 128, 4, 3), Shape(64, 64, 4, 3), Shape(64, 128, 8, 2),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Tuned:
    """The fastest shape found for one kernel and one head width."""

    kernel: str
    width: int
    chosen: Shape
    usual: float  # milliseconds with the table's shape
    best: float  # milliseconds with the chosen shape


def tune(
    device: torch.device, widths: tuple[int, ...] = WIDTHS, tokens: int = TOKENS
) -> Iterator[Tuned]:
    """Measure a few shapes of each kernel in bfloat16; this process uses the fastest at once."""
    here = card(device)
    for width in widths:
        shape = (max(1, tokens // 4096), max(1, 2048 // width), min(tokens, 4096), width)
        q, k, v = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        for kernel in KERNELS:
            times: dict[Shape, float] = {}  # the first is the table's, or the smaller one that fits
            for tried in dict.fromkeys((default(kernel, width, 2, here), *_TRIED[kernel])):
                use(kernel, width, 2, here, tried)
                took = _milliseconds(_RUNS.get(kernel, _step), q, k, v)
                ran = shape_of(kernel, width, 2, here)  # a smaller one, if this GPU has no room
                times[ran] = min(took, times.get(ran, math.inf))
            chosen = min(times, key=lambda x: times[x])
            use(kernel, width, 2, here, chosen)
            yield Tuned(kernel, width, chosen, next(iter(times.values())), times[chosen])


def keep(device: torch.device, found: list[Tuned]) -> Path:
    """Store the results for later processes."""
    return remember(card(device), {(x.kernel, x.width, 2): x.chosen for x in found})


def _forward(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> object:
    with torch.no_grad():
        return TRITON.attend(pose("attention", q, k, v, Options(mask=Causal(), softcap=softcap)))


def _narrow(q: Tensor, k: Tensor, v: Tensor) -> object:
    with torch.no_grad():
        return TRITON.attend(pose("attention", q, k, v, Options(mask=Window(1023))))


def _step(q: Tensor, k: Tensor, v: Tensor, softcap: float | None = None) -> object:
    out = TRITON.attend(pose("attention", q, k, v, Options(mask=Causal(), softcap=softcap)))
    return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))


_RUNS: dict[str, Callable[..., object]] = {
    "forward": _forward,
    "narrow": _narrow,
    "capped": partial(_forward, softcap=30.0),
    "capped queries": partial(_step, softcap=30.0),
    "capped keys": partial(_step, softcap=30.0),
}


def _milliseconds(run: Callable[..., object], *given: Tensor) -> float:
    """Return the median time of a few runs, after one that compiles."""
    run(*given)
    found: list[float] = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(3):
            run(*given)
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / 3)
    return statistics.median(found)
