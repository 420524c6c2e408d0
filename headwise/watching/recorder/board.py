"""The board of a watch: one small tensor per device that its figures accumulate in.

Nothing waits for it: a call adds its figures where they are computed, and the end of a step copies
all of them at once. The tensor keeps its address, so it can be part of compiled code and of CUDA
graphs, and its columns are sums and maxima, so that processes can join theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.core.host_copy import HostCopy
from headwise.core.observation import Observation
from headwise.core.problem import without_autocast
from headwise.core.reduction import CallRows, Columns, reduce_rows
from headwise.engines import calls
from headwise.engines.calls import needs_operator
from headwise.engines.contract import Prepared
from headwise.engines.failures import KernelError
from headwise.engines.operators import define
from headwise.engines.triton.board_call import add_by_kernel, described
from headwise.engines.triton.engine import TRITON
from headwise.watching.recorder.checkpointing import recomputing

SLOTS, HEADS = 16, 32
"""The room that a board begins with; slots are added in this number."""


def waits(device: torch.device) -> bool:
    """True if reading a number from this device waits for the work that was queued there."""
    return device.type != "cpu"


class Board:
    """The figures of a model's layers on one device, float64 (slots, columns, heads).

    The columns are those of `Columns` and one more maximum: how far a layer's output was from the
    one that its reading gives, as a share of what rounding explains; -inf if nothing was compared.
    """

    def __init__(self, columns: Columns, device: torch.device) -> None:
        self.columns, self.device = columns, device
        self.extremes = list(columns.maxima), list(columns.minima)  # read by every call
        self.used = 0
        self.now = self.ended = torch.empty(0, columns.count + 1, HEADS, dtype=torch.float64)
        self.places = torch.empty(0, dtype=torch.int64)
        self.numbers: tuple[Tensor, ...] = ()  # the number of each slot, (1,), on the device
        self.reserve(SLOTS, HEADS)

    def reserve(self, slots: int, heads: int) -> None:
        """Make room for so many slots and heads; what was recorded stays."""
        if slots <= len(self.now) and heads <= self.now.shape[2]:
            return
        slots, heads = -(-max(slots, len(self.now)) // SLOTS) * SLOTS, max(heads, self.now.shape[2])
        with torch.inference_mode(False), torch.no_grad():
            shape = (slots, self.columns.count + 1, heads)
            grown = [torch.empty(shape, dtype=torch.float64, device=self.device) for _ in range(2)]
            for new, old in zip(grown, (self.now, self.ended), strict=True):
                _empty(new, self.columns)
                if self.used:
                    new[: len(old), :, : old.shape[2]] = old
            self.now, self.ended = grown
            self.places = torch.arange(slots, device=self.device)
            self.numbers = self.places.split(1)

    def slot(self, heads: int) -> Slot:
        """A new slot for a layer with so many heads."""
        self.reserve(self.used + 1, heads)
        self.used += 1
        return Slot(self, self.used - 1, heads)

    def take(self) -> HostCopy:
        """End a step: copy all figures to the processor, without waiting, and start anew."""
        self.restart()
        return HostCopy.of(self.ended[: self.used])

    def restart(self, keep: Sequence[int] = ()) -> None:
        """Start anew, but keep the figures of some slots; `ended` has those of the step before."""
        with torch.no_grad():
            self.ended.copy_(self.now)
            _empty(self.now, self.columns)
            for number in keep:
                self.now[number] = self.ended[number]

    def copy(self) -> HostCopy:
        """The figures of the step that has not ended."""
        return HostCopy.of(self.now[: self.used])


@dataclass(frozen=True, eq=False)
class Slot:
    """The part of a board that belongs to one layer."""

    board: Board
    number: int
    heads: int

    def add(
        self, seen: Observation, padding: Tensor | None = None, proof: Tensor | None = None
    ) -> None:
        """Add the rows of a call that see a key and are not padding (B, N).

        ValueError if the call has another number of heads than the slot.
        """
        if seen.highest.shape[1] != self.heads:
            raise ValueError(
                f"it has {seen.highest.shape[1]} heads in this call and had {self.heads} before"
            )
        board, rows = self.board, self._rows(seen, padding, proof)
        place = board.numbers[self.number]
        if needs_operator(board.now, seen.highest):
            record(board.now, place, *rows)
        elif not add_by_kernel(board.now, place, rows):
            with torch.no_grad(), without_autocast(board.device):
                _add(self.read(), rows)

    def _rows(
        self, seen: Observation, padding: Tensor | None, proof: Tensor | None = None
    ) -> CallRows:
        """The statistics of a call as the board takes them."""
        board = self.board
        values = [seen.values.get(name) for name in board.columns.stats]
        return CallRows(values, seen.highest, seen.padding_of(padding), proof, *board.extremes)

    def repeated(self, seen: Observation) -> RepeatedRecord | None:
        """What adds calls like the one that was just added, without padding; None if unknown."""
        board = self.board
        if board.device.type not in TRITON.devices:
            return None
        record = described(board.now, board.numbers[self.number], self._rows(seen, None))
        launch = calls.known(record.key)
        if launch is None:
            return None
        names = [board.columns.stats[place] for place in record.places]
        return RepeatedRecord(self, board.now, launch, names, record.highest is not None)

    def read(self) -> Tensor:
        """The columns of the step that has not ended, (columns, heads), on its device."""
        return self.board.now[self.number, :, : self.heads]

    def ended(self) -> Tensor:
        """The columns of the last step that ended, (columns, heads), on its device."""
        return self.board.ended[self.number, :, : self.heads]

    def moved(self, board: Board) -> Slot:
        """A slot on another device's board, with the same content."""
        slot = board.slot(self.heads)
        for mine, theirs in ((slot.read(), self.read()), (slot.ended(), self.ended())):
            mine.copy_(theirs)
        return slot


@dataclass(frozen=True, eq=False)
class RepeatedRecord:
    """Adds calls alike to a slot by one launch; every layer does so in every step."""

    slot: Slot
    now: Tensor  # the board, which moves as it grows
    launch: Prepared
    names: list[str]  # of the statistics
    highest: bool  # max_logit is not one of them

    def add(self, seen: Observation, padding: Tensor | None) -> None:
        """Add the rows of a call; the slot does it if the launch is another one."""
        board = self.slot.board
        if padding is not None or board.now is not self.now:
            self.slot.add(seen, padding)
            return
        found = [seen.values[name] for name in self.names]
        if self.highest:
            found.append(seen.highest)
        try:
            self.launch(board.now, board.numbers[self.slot.number], *found)
        except KernelError:
            self.slot.add(seen, padding)


def _empty(board: Tensor, columns: Columns) -> None:
    """Start a board anew: nothing is counted."""
    board[:, : columns.sums].zero_()
    board[:, columns.sums :].fill_(-torch.inf)


def _add(mine: Tensor, rows: CallRows) -> None:
    """Add a call's statistics to a slot (columns, H)."""
    sums, extremes = reduce_rows(rows)
    mine[: len(sums)] += sums
    largest = mine[len(sums) : -1]
    torch.maximum(largest, extremes, out=largest)
    if rows.proof is not None:
        torch.maximum(mine[-1], rows.proof, out=mine[-1])


def _record(board: Tensor, slot: Tensor, *given: Any) -> None:
    """Add a call's statistics to the slot (1,) of a board (slots, columns, heads).

    Inside a backward a checkpoint computes them again: they were added in the forward.
    """
    rows = CallRows(*given)
    if recomputing() or add_by_kernel(board, slot, rows):
        return
    with torch.no_grad(), without_autocast(board.device):
        column = board.index_select(0, slot)
        _add(column[0, :, : rows.highest.shape[1]], rows)
        board.index_copy_(0, slot, column)


def _shapes(*_: object) -> None:
    """An operator that only writes returns nothing."""


record = define(
    "record",
    "(Tensor(a!) board, Tensor slot, Tensor?[] values, Tensor highest, Tensor? padding, "
    "Tensor? proof, int[] maxima, int[] minima) -> ()",
    _record,
    _shapes,
)
