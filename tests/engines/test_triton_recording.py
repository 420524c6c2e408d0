"""The kernel that adds statistics to a board gives what PyTorch's operations give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.observation import STATISTICS, Observation
from headwise.core.reduction import Columns
from headwise.engines import calls, failures
from headwise.engines.triton import board_call
from headwise.engines.triton.engine import TRITON
from headwise.watching.recorder.board import Board, Slot

pytest.importorskip("triton", reason="the kernel is written in Triton")

from headwise.engines.triton.host.prepared_call import PreparedCall
from headwise.engines.triton.kernels import row_sums

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS = 2
COUNTED = [2 * 37] * HEADS  # rows of a batch that see a key


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    calls.forget()
    yield
    calls.forget()
    failures.forget()


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each call of the kernel, which serves CPUs too."""
    found: list[bool] = []
    add = board_call.add_to_board

    def spy(*given: object) -> None:
        found.append(True)
        add(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(board_call, "add_to_board", spy)
    monkeypatch.setattr(TRITON, "devices", ("cuda", "cpu"))
    return found


def observed(rows: int = 37) -> Observation:
    q, k, v = torch.randn(3, 2, HEADS, rows, 8, device=DEVICE).unbind(0)
    mask = hw.mask.causal() & hw.mask.lengths([rows, rows - 5])
    return hw.observe(q, k, v, mask=mask, engine="streaming")[1]


def two_slots(stats: tuple[str, ...] = STATISTICS) -> tuple[Slot, Slot]:
    """A slot to fill by the kernel, and one by PyTorch, each behind another one."""
    boards = [Board(Columns(stats), DEVICE) for _ in range(2)]
    for board in boards:
        board.slot(9)
    return boards[0].slot(HEADS), boards[1].slot(HEADS)


def add_both(
    slots: tuple[Slot, Slot],
    seen: Observation,
    padding: Tensor | None = None,
    proof: Tensor | None = None,
) -> None:
    slots[0].add(seen, padding, proof)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRITON, "devices", ())
        slots[1].add(seen, padding, proof)


@pytest.mark.parametrize("stats", [STATISTICS, ("entropy",), ("top_prob", "max_logit")], ids=len)
def test_the_kernel_adds_what_pytorch_adds(added: list[bool], stats: tuple[str, ...]) -> None:
    slots = two_slots(stats)
    for number, rows in enumerate((37, 37, 37, 37, 1100)):
        seen, first = observed(rows), stats[0]
        padding = torch.rand(2, rows, device=DEVICE) > 0.7 if number % 2 else None
        proof = torch.tensor(0.1 * number, dtype=torch.float64, device=DEVICE) if number else None
        if number == 2:  # a kind of attention without this statistic
            seen.values.pop(first)
        if number == 3:
            seen.values[first] = seen.values[first].clone()
            seen.values[first][1, 0, 4] = torch.nan
        add_both(slots, seen, padding, proof)
        found, wanted = (slot.board.now for slot in slots)
        torch.testing.assert_close(found, wanted, equal_nan=True, rtol=1e-12, atol=1e-12)
    assert len(added) == (4 if len(stats) == 1 else 5)  # without any statistic there is no kernel


def test_the_kernel_is_prepared_and_slots_share_it(added: list[bool]) -> None:
    board = Board(Columns(("entropy", "max_logit")), DEVICE)
    slots = [board.slot(HEADS) for _ in range(4)]
    seen = observed()
    for slot in slots * 2:
        slot.add(seen)
    prepared = [call for key, call in calls._PREPARED.items() if key[0] == "record"]
    assert len(prepared) == 2  # the number of a slot lies at one of two alignments
    for call in prepared:
        assert isinstance(call, PreparedCall)
        assert (len(call.launches), call.made) == (1, [])  # nothing is allocated
    assert len(added) == 8
    assert slots[3].read()[0].tolist() == [2 * count for count in COUNTED]


def test_statistics_that_the_kernel_cannot_read_are_added_all_the_same(added: list[bool]) -> None:
    slots, seen = two_slots(), observed()
    seen.values = {name: x.mT.contiguous().mT for name, x in seen.values.items()}
    add_both(slots, seen)
    torch.testing.assert_close(slots[0].read(), slots[1].read())
    assert slots[0].read()[0].tolist() == COUNTED
    assert not added


def test_a_kernel_that_fails_is_reported_once_and_nothing_is_lost(
    added: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __getitem__(self, grid: object) -> object:
            raise RuntimeError("PTX for sm_999")

    monkeypatch.setattr(row_sums, "add_rows", Broken())
    slot, seen = two_slots()[0], observed()
    with pytest.warns(RuntimeWarning, match="can't serve recorded statistics on this machine"):
        slot.add(seen)
    slot.add(seen)
    assert len(added) == 1
    assert slot.read()[0].tolist() == [2 * count for count in COUNTED]
