"""Timing on a GPU, for the sections of `bench.gpu`.

Each figure is the median over rounds in which the contenders alternate, so that a drifting clock
affects all of them. Outputs are allocated inside the timer, as in a user's call.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS, MODEL = 16384, 2048  # tokens in all; heads times width
Run = Callable[[], object]
Row = dict[str, object]


def interleaved(runs: dict[str, Run], rounds: int = 7, slice_ms: float = 15.0) -> dict[str, float]:
    """Milliseconds of each contender: the median over rounds in which they alternate."""
    able, times = {}, {}
    for name, run in runs.items():
        try:
            with around(run):
                for _ in range(3):
                    run()
                torch.cuda.synchronize()
            able[name], times[name] = run, []
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:90]}", file=sys.stderr)
    calls = {name: max(1, round(slice_ms / max(_once(run), 1e-3))) for name, run in able.items()}
    for _ in range(rounds):
        for name, run in able.items():
            times[name].append(_once(run, calls[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _once(run: Run, calls: int = 1) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with around(run):
        start.record()
        for _ in range(calls):
            run()
        stop.record()
        torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


@dataclass(frozen=True)
class Fused:
    """PyTorch's attention with one of its kernels, which is chosen outside the timer."""

    backend: SDPBackend
    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool = False

    def __call__(self) -> Tensor:
        grouped = self.q.shape[1] != self.k.shape[1]
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=self.causal, enable_gqa=grouped
        )


def around(run: Run) -> AbstractContextManager[object]:
    """The context that a contender needs while it is timed."""
    return sdpa_kernel(run.backend) if isinstance(run, Fused) else nullcontext()


def replayed(run: Run, calls: int = 5) -> Run:
    """The same work without the CPU's part: a CUDA graph of several calls."""
    graph = torch.cuda.CUDAGraph()
    with around(run):
        run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
    return graph.replay


def tensors(n: int, width: int, heads: int | None = None, learn: bool = False) -> list[Tensor]:
    """q, k, v in bfloat16: as many batch entries as make up TOKENS, or one with so many heads."""
    shape = (1, heads, n, width) if heads else (max(1, TOKENS // n), MODEL // width, n, width)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learn)
        for _ in range(3)
    ]


def backward_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Run:
    """The backward pass alone, of a forward pass that runs once."""
    with around(forward):
        out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def rate(ms: float, n: int, causal: bool, backward: bool = False) -> float:
    """TFLOP/s by the usual count: 4·n²·d forward, half of it if causal, 2.5 times it backward."""
    flops = 4 * TOKENS * n * MODEL * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return flops / ms / 1e9


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def say(row: Row) -> Row:
    print("  ", *(f"{x} {y}" for x, y in row.items()), sep="  ", flush=True)
    return row
