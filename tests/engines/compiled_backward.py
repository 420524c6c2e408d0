"""Compile the Hopper backward without a GPU, and print the memory that each variant takes.

`python -m tests.engines.compiled_backward`: see `tests.engines.compiled`. It compiles with whatever
Triton is imported, so `PYTHONPATH=.:FOLDER` tests another version than the installed one.
`python -m tests.engines.compiled_backward 5` takes every fifth variant.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from typing import Any

import torch

import headwise as hw
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs
from headwise.engines.triton.host.backward_choice import takes
from headwise.engines.triton.host.hopper_backward_call import differentiate_hopper
from tests.engines.compiled import usage
from tests.engines.compiled_triton import COMPILED, stand_in

LENGTH = 600
CAUSAL = hw.mask.causal()
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "documents": CAUSAL & hw.mask.documents(torch.arange(LENGTH) // 100),
    "two intervals": CAUSAL & (hw.mask.window(150) | hw.mask.prefix(4)),
}
VARIANTS: list[dict[str, Any]] = [
    {"width": width, "mask": mask, "entropy": entropy, "capped": capped, "ordered": False}
    for width, mask, entropy, capped in product(
        (128, 64), ("causal", "documents", "two intervals"), (False, True), (False, True)
    )
] + [
    {"width": width, "mask": mask, "entropy": False, "capped": False, "ordered": True}
    for width, mask in product((128, 64), MASKS)
]


def compiled(width: int, mask: str, entropy: bool, capped: bool, ordered: bool) -> dict[str, int]:
    """Compile every kernel of a backward, and return what the large one takes."""
    torch.use_deterministic_algorithms(ordered)
    q, k, v = (torch.randn(2, 2, LENGTH, width).half() for _ in range(3))
    given = Options(mask=MASKS[mask], softcap=20.0 if capped else None)
    terms = pose("attention", q, k, v, given).terms(banded=True)
    row = torch.randn(2, 2, LENGTH)
    totals = RowTotals(row, row, row)
    call: Any = (q, k, v, terms, BackwardInputs(q, totals, row, q, row, row if entropy else None))
    assert takes(q, k, v, terms, q.dtype), "the kernel does not take this variant"
    differentiate_hopper(*call)
    return usage(COMPILED["backward"])


if __name__ == "__main__":
    stand_in()
    chosen = VARIANTS[:: int(sys.argv[1]) if sys.argv[1:] else 1]
    print(json.dumps([variant | compiled(**variant) for variant in chosen]))
