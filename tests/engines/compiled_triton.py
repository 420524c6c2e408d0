"""Compile the Triton kernels without a GPU: `python -m tests.engines.compiled_triton`.

The interpreter accepts code that the compiler refuses, such as a name that changes its type in a
loop. Calls are made as usual, but a launch only compiles; the names of the kernels are printed.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

import headwise as hw
from headwise.core.reduction import CallRows
from headwise.engines.triton import stored_call
from headwise.engines.triton.board_call import add_to_board
from headwise.engines.triton.engine import Triton
from headwise.engines.triton.host import cards, launches
from tests.engines.compiled import NoGPU

COLUMNS = 512  # of tensor memory, on GPUs that have it
COMPILED: set[str] = set()


class Launched:
    """A compiled kernel whose launch does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given: None


def compile_only(kernel: Any, grid: Any) -> Any:
    def launch(*given: Any, **options: Any) -> Launched:
        needs = kernel.warmup(*given, grid=grid, **options).metadata
        name, shared = kernel.fn.__name__, cards.card(torch.device("cpu")).shared
        COMPILED.add(name)
        columns = getattr(needs, "tmem_size", None) or 0
        for found, limit, what in (
            (needs.shared, shared, "shared memory"),
            (columns, COLUMNS, "tensor memory"),
        ):
            if found > limit:  # as a launch would
                raise OutOfResources(found, limit, f"{what} of {name}")
        return Launched()

    return launch


def stand_in(generation: int = 90, shared: int = 232448) -> None:
    """Let calls compile for a GPU of this generation, with `shared` bytes of shared memory."""
    triton.runtime.driver.set_active(NoGPU(generation))
    JITFunction.__getitem__ = compile_only
    torch.cuda.current_device = lambda: 0
    launches.launcher = lambda compiled, grid: compiled[grid]
    Triton.absent = lambda self, device: None
    # tensors lie on a CPU, and nothing is interpreted
    stored_call._dtypes = lambda device: (torch.bfloat16, torch.float16)
    cards._INTERPRETED = cards.Card(f"sm_{generation}", *divmod(generation, 10), shared)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def make_calls() -> None:
    """Make one call of each kind that has its own kernels."""
    leaves = [normal(1, heads, 300, 64).requires_grad_() for heads in (2, 1, 1)]
    bias = torch.zeros(300, 300, requires_grad=True)
    buckets = hw.RelativeBuckets(torch.zeros(8, 2, requires_grad=True))
    for options in ({"mask": hw.mask.causal()}, {"bias": bias, "softcap": 9.0}, {"bias": buckets}):
        out, seen = hw.observe(*leaves, engine="triton", **options)
        (out.sum() + seen.entropy.sum()).backward()
    with torch.no_grad():
        step = normal(1, 4, 1, 64), normal(1, 2, 2048, 64), normal(1, 2, 2048, 64)
        hw.attention(*step, mask=hw.mask.causal(), engine="triton")
        amap = hw.attention_map(*leaves[:2])
        amap.pool(8), amap.received(), amap.top(4), amap[0, 0, :4, :4]
    q, k, v = (normal(1, 2, 300, 64).requires_grad_() for _ in range(3))
    weight = normal(2, 64).requires_grad_()
    hw.attention(q, k, v, score=hw.Additive(weight), engine="triton").sum().backward()
    board, slot = torch.zeros(4, 6, 8, dtype=torch.float64), torch.zeros(1, dtype=torch.int64)
    values, proof = torch.zeros(3, 2, 4, 9), torch.zeros((), dtype=torch.float64)
    for more in ((None, None), (torch.zeros(2, 9, dtype=torch.bool), proof)):
        add_to_board(board, slot, CallRows([*values, None], values[1], *more, [0], [1]))


if __name__ == "__main__":
    stand_in()
    make_calls()
    print(json.dumps(sorted(COMPILED)))
