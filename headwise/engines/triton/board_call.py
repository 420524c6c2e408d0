"""Statistics added to the board of a watch by one kernel, where there is a GPU for it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from headwise.engines import failures
from headwise.engines.failures import Family, KernelError
from headwise.engines.triton.engine import TRITON


def add_by_kernel(
    board: Tensor,
    slot: Tensor,
    values: Sequence[Tensor | None],
    highest: Tensor,
    padding: Tensor | None,
    proof: Tensor | None,
    maxima: Sequence[int],
    minima: Sequence[int],
) -> bool:
    """Add a call's statistics (B, H, N) to the slot (1,) of a board (slots, columns, heads).

    Returns False, and adds nothing, if the kernel does not serve this call.
    """
    device = board.device
    if device.type not in TRITON.devices or not _usable(device):
        return False
    from headwise.engines.triton.host import recording_call

    alike = Family(TRITON.name, "recorded statistics", device, highest.dtype, (), (), False)
    if alike in failures.failed() or not recording_call.takes(values, highest):
        return False
    try:
        recording_call.add_to_board(board, slot, values, highest, padding, proof, maxima, minima)
    except KernelError as failure:
        failures.record(alike, failure)
        return False
    return True


@cache
def _usable(device: torch.device) -> bool:
    return TRITON.absent(device) is None
