"""Compile the Hopper kernel without a GPU, and print the memory that each variant takes.

`python -m tests.engines.compiled`: Triton's compiler and NVIDIA's assembler need no device, only
the name of the one that they compile for. `python -m tests.engines.compiled 3` takes every third.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from headwise.core.row_sums import ROW_SUMS, RowResults
from headwise.engines.triton.host.hopper_call import ROWS, TILES
from headwise.engines.triton.host.hopper_tiles import layout
from headwise.engines.triton.host.moments_call import CUTS
from headwise.engines.triton.kernels.hopper_forward import REGISTERS, HopperSizes, forward
from headwise.engines.triton.kernels.hopper_softmax import numbers_of_cap

VARIANTS = [
    {"width": width, "banded": banded, "observed": observed, "capped": capped, "valued": valued}
    for width in (64, 128)
    for banded in (False, True)
    for observed in (False, True)
    for capped in (False, True)
    for valued in (True, False)
    if valued or (observed and not capped)
]


class NoGPU:
    """The part of a driver that the compiler needs, for a GPU of the given generation."""

    def __init__(self, generation: int = 90) -> None:
        self.target = GPUTarget("cuda", generation, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compiled(width: int, banded: bool, observed: bool, capped: bool, valued: bool) -> Any:
    shape = TILES[width]

    def tiles(rows: int) -> TensorDescriptor:
        x = torch.empty(1, 2, 1024, width, dtype=torch.bfloat16)
        block = [1, 1, rows, width]
        return TensorDescriptor(
            x, list(x.shape), list(x.stride()), block, layout(x.dtype, *block[2:])
        )

    row = torch.empty(2048)
    rest = row if observed and banded and not capped else None
    asked = row if observed else None
    sums = dict.fromkeys(("log_total", *ROW_SUMS), asked)
    written = RowResults(None, row, row, **sums, logit_mean=rest, logit_var=rest)
    rows, keys = tiles(ROWS // 2), tiles(shape.keys)
    sizes = HopperSizes(
        1024, 1024, 2, 1, 0, 1, 0, 16, 0.07, 0.1, numbers_of_cap(0.01) if capped else None
    )
    return forward.warmup(
        rows, keys, keys if valued else None, rows if valued else None, written, None, *sizes,
        shape.stages, banded, 0 if rest is None else CUTS[width].block, num_warps=4,
        maxnreg=REGISTERS, grid=(1,),
    )  # fmt: skip


def usage(kernel: Any) -> dict[str, int]:
    """Return the bytes of shared memory, and of the stack, to which registers are spilled."""
    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    stack = re.search(r"STACK:(\d+)", told)
    assert stack is not None, told
    return {"stack": int(stack[1]), "shared": kernel.metadata.shared}


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoGPU())
    chosen = VARIANTS[:: int(*sys.argv[1:] or [1])]
    print(json.dumps([variant | usage(compiled(**variant)) for variant in chosen]))
