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

from headwise.engines.triton import stored_call
from headwise.engines.triton.engine import Triton
from headwise.engines.triton.host import cards, launches
from tests.engines.compiled import NoGPU
from tests.engines.kernel_calls import make

COLUMNS = 512  # of tensor memory, on GPUs that have it
COMPILED: dict[str, Any] = {}  # the last version of each kernel


class Launched:
    """A compiled kernel whose launch does nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *given: None


def compile_only(kernel: Any, grid: Any) -> Any:
    def launch(*given: Any, **options: Any) -> Launched:
        made = kernel.warmup(*given, grid=grid, **options)
        needs = made.metadata
        name, shared = kernel.fn.__name__, cards.card(torch.device("cpu")).shared
        COMPILED[name] = made
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


CALLS = ("causal", "bias", "buckets", "decode", "maps", "additive", "record")
"""One of each kind that has its own kernels."""


if __name__ == "__main__":
    stand_in()
    for call in CALLS:
        make(f"{call} 64 bfloat16")
    print(json.dumps(sorted(COMPILED)))
