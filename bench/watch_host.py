"""The processor's time of calls and of watched layers, on tensors that are next to nothing.

    python -m bench.watch_host
    TRITON_INTERPRET=1 python -m bench.watch_host    the Triton engine's host code, without a GPU

On a GPU the processor has to stay ahead of the kernels: what it takes for a call is what the call
costs as soon as its kernels are short. Under Triton's interpreter kernels are left out, so that
only the code around their launches is timed, and PyTorch's CPU kernel computes gradients in the
place of cuDNN's.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from bench import described
from bench.pairs import Way, alternated
from bench.watched_steps import BESIDE, FIVE, INSIDE, UNWATCHED, Size, WatchedLlama
from headwise.api import statistics as statistics_of
from headwise.core.options import Options
from headwise.engines import library_backward
from headwise.engines.library_kernels import CpuKernel
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.limits import interpreting

CAUSAL = hw.mask.causal()
TINY = Size(8, 32, 4, 2, 16, 32, 50, 1, 16, 9, 20)
Run = Callable[[], object]


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", help="the name of a row: print where its time goes")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with kernels_left_out():
        found = {**calls(given.device), **layers(given.device)}
        if given.profile is not None:
            profile(*found[given.profile])
            return
        report(found, given)


def report(found: dict[str, tuple[Way, int]], given: argparse.Namespace) -> None:
    """Print microseconds per call, and those that watching adds to a layer."""
    least: dict[str, float] = {}
    for many in {many for _, many in found.values()}:
        ways = {name: way for name, (way, each) in found.items() if each == many}
        times = 20 if many == 1 else 5
        # A new watch listens to all modules in its first passes.
        milliseconds = alternated(ways, given.rounds, times, min, time.process_time, warm=3)
        least |= {name: ms / many * 1e3 for name, ms in milliseconds.items()}
    unwatched = None
    for name, (_, many) in found.items():
        if unwatched is not None:
            print(f"{name + ', adds to a layer':<58}{least[name] - unwatched:>6.0f} µs")
            continue
        print(f"{name + (', a layer' if many > 1 else ''):<58}{least[name]:>6.0f} µs")
        unwatched = least[name] if name == UNWATCHED else None


def calls(device: str) -> dict[str, tuple[Way, int]]:
    """Calls of 4 query and 2 key heads, n 16, d 16."""
    shapes = ((4, 16, 16), (2, 16, 16), (2, 16, 16))
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (torch.randn(1, *x, device=device, dtype=dtype) for x in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    engine: dict[str, Any] = {"engine": "triton"} if interpreting() else {}
    grad = torch.randn(1, 4, 16, 16, device=device, dtype=dtype)

    def plain() -> Tensor:
        return F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)

    def attended() -> Tensor:
        return hw.attention(*leaves, mask=CAUSAL, **engine)

    def observed(stats: tuple[str, ...] | None) -> Tensor:
        return hw.observe(*leaves, mask=CAUSAL, stats=stats, **engine)[0]

    def both(run: Callable[[], Tensor]) -> Run:
        return lambda: torch.autograd.grad(run(), leaves, grad)

    found: dict[str, Run] = {
        "F.scaled_dot_product_attention, with gradients": plain,
        "F.scaled_dot_product_attention, forward and backward": both(plain),
        "attention": lambda: hw.attention(q, k, v, mask=CAUSAL, **engine),
        "attention, with gradients": attended,
        "attention, forward and backward": both(attended),
        "observe, five": lambda: hw.observe(q, k, v, mask=CAUSAL, stats=FIVE, **engine),
        "observe, five, with gradients": lambda: observed(FIVE),
        "observe, five, forward and backward": both(lambda: observed(FIVE)),
        "observe, all, with gradients": lambda: observed(None),
        "observe, rows=4": lambda: hw.observe(q, k, v, mask=CAUSAL, rows=4, **engine),
        "statistics, rows=4": lambda: statistics_of(q, k, v, Options(mask=CAUSAL), rows=4),
    }
    return {name: (Way(run), 1) for name, run in found.items()}


def layers(device: str) -> dict[str, tuple[Way, int]]:
    """Forwards and backwards of an eight-layer Llama, n 16, per layer; the step's end included."""
    llama = WatchedLlama(TINY, device)
    rows = {name: {"rows": 4} if "rows" in options else {} for name, options in BESIDE.items()}
    return {
        name: (llama.way(name, **rows.get(name, {})), TINY.layers)
        for name in (UNWATCHED, *BESIDE, *INSIDE)
    }


def profile(way: Way, many: int) -> None:
    """Print the functions that take the most time of their own, per call or layer."""
    import cProfile
    import pstats

    times = 2000 // many
    with way.around():
        for _ in range(3):
            way.step()
        with cProfile.Profile() as found:
            for _ in range(times):
                way.step()
    pstats.Stats(found).sort_stats("tottime").print_stats(45)
    print(f"divide by {times * many}")


class InItsPlace(CpuKernel):
    """PyTorch's CPU kernel, which does not look at the totals that no kernel has written."""

    def rounds_too_much(self, lse: Tensor) -> bool:
        return False


@contextmanager
def kernels_left_out() -> Iterator[None]:
    """Under Triton's interpreter, let the Triton engine serve every call and run no kernel."""
    if not interpreting():
        yield
        return
    from headwise.engines.triton.host import launches

    def nothing(*_: object) -> None:
        """Launch nothing."""

    before = launches._launched, library_backward.kernel_on
    launches._launched = lambda kernel, grid, kind, given, *_: (nothing, given)
    in_its_place = InItsPlace()
    library_backward.kernel_on = lambda device, only: in_its_place
    TRITON.devices = ("cuda", "cpu")
    try:
        yield
    finally:
        launches._launched, library_backward.kernel_on = before
        TRITON.devices = ("cuda",)


if __name__ == "__main__":
    main()
