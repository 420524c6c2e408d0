"""Statistics added to the board of a watch by one kernel, where there is a GPU for it."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from headwise.core.reduction import CallRows
from headwise.engines import calls, failures
from headwise.engines.contract import Results
from headwise.engines.failures import Family, KernelError
from headwise.engines.triton.engine import TRITON

MOST = 1024  # rows that a program takes at once


def add_by_kernel(board: Tensor, slot: Tensor, rows: CallRows) -> bool:
    """Add a call's statistics to the slot (1,) of a board (slots, columns, heads).

    Returns False, and adds nothing, if the kernel does not serve this call.
    """
    device = board.device
    if device.type not in TRITON.devices or not usable(device):
        return False
    alike = Family(TRITON.name, "recorded statistics", device, rows.highest.dtype, (), (), False)
    if alike in failures.failed() or not _takes(rows):
        return False
    try:
        add_to_board(board, slot, rows)
    except KernelError as failure:
        failures.record(alike, failure)
        return False
    return True


@cache
def usable(device: torch.device) -> bool:
    """Return whether Triton can launch kernels on this device."""
    return TRITON.absent(device) is None


def _takes(rows: CallRows) -> bool:
    """Return whether the kernel can read these statistics."""
    values, highest = rows.values, rows.highest
    if highest.numel() == 0 or highest.dtype != torch.float32 or all(x is None for x in values):
        return False
    shape, dtype = highest.shape, highest.dtype
    return all(
        x is None or (x.dtype == dtype and x.shape == shape and x.is_contiguous())
        for x in (*values, highest)
    )


def add_to_board(board: Tensor, slot: Tensor, rows: CallRows) -> None:
    """Launch the kernel."""
    values, highest, padding, proof, maxima, minima = rows
    present = [place for place, x in enumerate(values) if x is not None]
    found = tuple(x for x in values if x is not None)
    same = next((at for at, x in enumerate(found) if x.data_ptr() == highest.data_ptr()), None)
    given = (board, slot, *found, *(() if same is not None else (highest,)))
    if padding is not None:
        padding = padding.contiguous().view(torch.uint8)
        given += (padding,)
    if proof is not None:
        proof = proof.to(board.device, torch.float64)
        given += (proof,)
    key = (
        "record", board.shape, board.device, highest.shape, tuple(present), same, padding is None,
        proof is None, tuple(maxima), tuple(minima), *[x.data_ptr() % 16 for x in given],
    )  # fmt: skip
    prepared = calls.known(key)
    if prepared is not None:
        prepared(*given)
        return
    from headwise.engines.triton.host.launches import Launches, recorded
    from headwise.engines.triton.host.operands import on
    from headwise.engines.triton.kernels.row_sums import add_rows

    def launch(launches: Launches) -> Results:
        batch, heads, count = highest.shape
        signs = dict.fromkeys(maxima, 1) | dict.fromkeys(minima, -1)
        extremes = {place: 1 + len(values) + at for at, place in enumerate(signs)}
        with on(board.device):
            launches.start(
                add_rows, (heads, 1 + len(found), 1), None,
                (board, slot, found, tuple(1 + place for place in present),
                tuple(extremes.get(place, 0) for place in present),
                tuple(signs.get(place, 1) for place in present),
                highest if same is None else found[same], padding, proof,
                batch, heads, count, board.shape[1], board.shape[2]), 4, 1, COUNT=len(found),
                BLOCK=min(MOST, max(32, 1 << (count - 1).bit_length())),
            )  # fmt: skip
        return ()

    calls.keep(key, recorded(launch, given)[1])
