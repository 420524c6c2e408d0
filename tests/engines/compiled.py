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
from headwise.engines.triton.host.hopper_call import GROUP, TILES, HopperTile
from headwise.engines.triton.host.hopper_tiles import layout
from headwise.engines.triton.host.moments_call import CUTS
from headwise.engines.triton.kernels.hopper_forward import EVERYWHERE, REGISTERS, forward
from headwise.engines.triton.kernels.hopper_items import HopperMask, HopperSizes
from headwise.engines.triton.kernels.hopper_softmax import numbers_of_cap

MASKS = {  # banded, intervals per row in a table
    "none": (False, 0), "band": (True, 0), "uneven": (True, 1), "documents": (True, 1),
    "sinks": (True, 2),
}  # fmt: skip
VARIANTS = [
    {"widths": widths, "mask": mask, "observed": observed, "capped": capped, "valued": valued}
    for widths in ((64, 64), (128, 128), (192, 128), (256, 256))
    for mask in MASKS
    for observed in (False, True)
    for capped in (False, True)
    for valued in (True, False)
    if valued or (observed and not capped and widths[0] <= 128)
    if not capped or widths[0] == widths[1] < 192
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


def compiled(
    widths: tuple[int, int],
    mask: str,
    observed: bool,
    capped: bool,
    valued: bool,
    shape: HopperTile | None = None,
) -> Any:
    """Compile a variant for the tile of the table, or for another one."""
    (width, value_width), (banded, pieces) = widths, MASKS[mask]
    shape = TILES[widths] if shape is None else shape
    first = 128 if width == 192 else width

    def tiles(rows: int, width: int) -> TensorDescriptor:
        x = torch.empty(1, 2, 1024, width, dtype=torch.bfloat16)
        block = [1, 1, rows, width]
        return TensorDescriptor(
            x, list(x.shape), list(x.stride()), block, layout(x.dtype, *block[2:])
        )

    row, whole = torch.empty(2048), torch.empty(1, 2, 1024, 64, dtype=torch.bfloat16)
    asked = row if observed else None
    in_blocks = mask in ("band", "uneven") and not capped and width in CUTS  # some moments
    sums = dict.fromkeys(("log_total", *ROW_SUMS, "logit_mean", "logit_var"), asked)
    written = RowResults(None, row, row, **sums, visible=None if in_blocks else asked)
    every = CUTS[width].block if in_blocks else EVERYWHERE.value
    numbers = torch.empty(2048, dtype=torch.int32)
    read = HopperMask(numbers, None, numbers, whole) if pieces else HopperMask()
    if mask == "uneven":
        read = HopperMask(table=numbers)
    sizes = HopperSizes(
        1024, 1024, 2, 1, value_width, 0, 1, 0, 16, *[1024] * 9, 0.07, 0.1,
        numbers_of_cap(0.01) if capped else None,
    )  # fmt: skip
    out = None
    if valued:
        out = whole if shape.direct else tiles(GROUP, value_width)
    split = width > first
    return forward.warmup(
        tiles(GROUP, first), tiles(shape.keys, first),
        tiles(shape.keys, value_width) if valued else None,
        tiles(GROUP, width - first) if split else None,
        tiles(shape.keys, width - first) if split else None,
        out, written, None, read, *sizes,
        shape.groups, shape.stages, banded, pieces, every if observed else 0,
        shape.direct or not valued, num_warps=4, maxnreg=REGISTERS[shape.groups], grid=(1,),
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
