"""Statistics added to the board of a watch by one kernel, where there is a GPU for it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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


class Record(NamedTuple):
    """One launch of the kernel: the tensors that it takes, and what launches alike have alike."""

    key: calls.Key
    given: tuple[Tensor, ...]  # the board, the slot, the statistics, and the three below
    places: tuple[int, ...]  # of the statistics among the columns
    highest: Tensor | None  # max_logit, unless it is among the statistics
    padding: Tensor | None
    proof: Tensor | None


def described(board: Tensor, slot: Tensor, rows: CallRows) -> Record:
    """Describe the launch that adds a call's statistics."""
    values, top, padding, proof, maxima, minima = rows
    places = tuple([place for place, x in enumerate(values) if x is not None])
    found = tuple([x for x in values if x is not None])
    same = next((at for at, x in enumerate(found) if x.data_ptr() == top.data_ptr()), None)
    highest = top if same is None else None
    padding = None if padding is None else padding.contiguous().view(torch.uint8)
    proof = None if proof is None else proof.to(board.device, torch.float64)
    given = (board, slot, *found, *(x for x in (highest, padding, proof) if x is not None))
    key = (
        "record", board.shape, board.device, top.shape, places, same, padding is None,
        proof is None, tuple(maxima), tuple(minima), *[x.data_ptr() % 16 for x in given],
    )  # fmt: skip
    return Record(key, given, places, highest, padding, proof)


def add_to_board(board: Tensor, slot: Tensor, rows: CallRows) -> None:
    """Launch the kernel."""
    record = described(board, slot, rows)
    prepared = calls.known(record.key)
    if prepared is not None:
        prepared(*record.given)
        return
    from headwise.engines.triton.host.launches import Launches, recorded
    from headwise.engines.triton.host.operands import on
    from headwise.engines.triton.kernels.row_sums import add_rows

    places = record.places
    found = record.given[2 : 2 + len(places)]
    highest = record.highest
    if highest is None:
        highest = next(x for x in found if x.data_ptr() == rows.highest.data_ptr())

    def launch(launches: Launches) -> Results:
        batch, heads, count = rows.highest.shape
        signs = dict.fromkeys(rows.maxima, 1) | dict.fromkeys(rows.minima, -1)
        extremes = {place: 1 + len(rows.values) + at for at, place in enumerate(signs)}
        with on(board.device):
            launches.start(
                add_rows, (heads, 1 + len(found), 1), None,
                (board, slot, found, tuple(1 + place for place in places),
                tuple(extremes.get(place, 0) for place in places),
                tuple(signs.get(place, 1) for place in places),
                highest, record.padding, record.proof,
                batch, heads, count, board.shape[1], board.shape[2]), 4, 1, COUNT=len(found),
                BLOCK=min(MOST, max(32, 1 << (count - 1).bit_length())),
            )  # fmt: skip
        return ()

    calls.keep(record.key, recorded(launch, record.given)[1])
