"""The board: figures accumulate in one tensor in place, eager or as an operator."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import headwise as hw
from headwise.core.observation import STATISTICS, Observation
from headwise.core.reduction import Columns
from headwise.watching.recorder.board import Board, Slot

CPU = torch.device("cpu")


def observed(queries: int = 9, heads: int = 4, batch: int = 2) -> Observation:
    q, k, v = torch.randn(3, batch, heads, queries, 8).unbind(0)
    mask = hw.mask.causal() & hw.mask.lengths([queries, queries - 2][:batch])
    return hw.observe(q, k, v, mask=mask)[1]


def figures(slot: Slot, stats: tuple[str, ...] = STATISTICS) -> dict[str, Tensor]:
    return slot.board.columns.figures(slot.read(), sampled=False, stats=stats)


def test_a_slot_holds_the_figures_of_one_call() -> None:
    board, seen = Board(Columns(STATISTICS), CPU), observed()
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 7:] = True
    slot, padded = board.slot(4), board.slot(4)
    slot.add(seen)
    padded.add(seen, padding)
    for found, wanted in ((slot, seen.heads()), (padded, seen.heads(padding))):
        got = figures(found)
        assert list(got) == list(wanted)
        for name, value in wanted.items():
            torch.testing.assert_close(got[name], value)


def test_calls_add_up_by_their_rows() -> None:
    board, calls = Board(Columns(STATISTICS), CPU), [observed(9), observed(5), observed(20)]
    slot = board.slot(4)
    for seen in calls:
        slot.add(seen)
    joined = {name: torch.cat([seen.values[name] for seen in calls], 2) for name in calls[0].values}
    whole = Observation(joined, torch.cat([seen.highest for seen in calls], 2))
    for name, value in whole.heads().items():
        torch.testing.assert_close(figures(slot)[name], value)


def test_what_is_missing_adds_nothing_and_nan_is_seen() -> None:
    board, slot_stats = Board(Columns(("entropy", "distance", "max_logit")), CPU), ("max_logit",)
    slot, seen = board.slot(4), observed()
    seen.values = {"max_logit": seen.values["max_logit"].clone()}
    slot.add(seen)
    seen.values["max_logit"][0, 2, 3] = torch.nan
    slot.add(seen)
    found = figures(slot, slot_stats)
    assert list(found) == ["max_logit_mean", "max_logit_max"]
    assert found["max_logit_max"].isnan().tolist() == [False, False, True, False]


def test_a_board_grows_and_keeps_what_it_holds() -> None:
    board = Board(Columns(("entropy",)), CPU)
    seen = observed()
    slots = []
    for heads in (4, 4, 70, *[4] * 40):
        slots.append(board.slot(heads))
        if heads == 4:
            slots[-1].add(seen)
    assert board.now.shape == (48, 4, 70)
    for slot in slots:
        assert slot.read()[0].tolist() == ([14 + 2 + 2] * 4 if slot.heads == 4 else [0] * 70)


def test_a_step_that_ends_leaves_a_copy_and_an_empty_board() -> None:
    board, seen = Board(Columns(("entropy", "max_logit")), CPU), observed()
    slot, address = board.slot(4), board.now.data_ptr()
    slot.add(seen)
    before = slot.read().clone()
    copy = board.take()
    assert copy.arrived
    assert torch.equal(copy.read()[0, :, :4], before)
    assert torch.equal(slot.ended(), before)
    assert slot.read()[0].tolist() == [0] * 4
    slot.add(seen)
    assert torch.equal(slot.read(), before)
    assert board.now.data_ptr() == address


def test_rows_without_keys_count_for_nothing() -> None:
    board, none = Board(Columns(STATISTICS), CPU), torch.zeros(1, 2, 0, 8)
    slot = board.slot(2)
    slot.add(hw.observe(none, torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8))[1])
    assert all(x.isnan().all() for name, x in figures(slot).items() if name.endswith("_mean"))
    assert figures(slot)["max_logit_max"].isnan().all()


def test_another_number_of_heads_is_refused() -> None:
    board = Board(Columns(STATISTICS), CPU)
    with pytest.raises(ValueError, match="it has 4 heads in this call and had 8 before"):
        board.slot(8).add(observed())


def test_the_operator_compiles_and_equal_slots_share_a_graph() -> None:
    board, seen = Board(Columns(STATISTICS), CPU), observed()
    slots, eager = [board.slot(4) for _ in range(3)], Board(Columns(STATISTICS), CPU).slot(4)
    values, columns = [seen.values[name] for name in STATISTICS], board.columns
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def record(now: Tensor, place: Tensor, values: list[Tensor], highest: Tensor) -> Tensor:
        torch.ops.headwise.record(
            now, place, values, highest, None, None, list(columns.maxima), list(columns.minima)
        )
        return highest + 1

    for slot in slots:
        place = board.places[slot.number : slot.number + 1]
        record(board.now, place, values, seen.highest)
    eager.add(seen)
    for slot in slots:
        torch.testing.assert_close(slot.read(), eager.read())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_the_operator_follows_the_rules_of_operators() -> None:
    board, seen = Board(Columns(("entropy", "max_logit")), CPU), observed()
    values = [seen.values["entropy"], None]
    given = (board.now, board.places[:1], values, seen.highest, None, None, [1], [0])
    torch.library.opcheck(torch.ops.headwise.record.default, given)


def test_figures_are_recorded_where_a_mode_counts_operations() -> None:
    torch.manual_seed(0)
    model, x = hw.nn.MultiHeadAttention(16, heads=2), torch.randn(2, 9, 16)
    found = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        with torch.no_grad(), hw.watch(model) as seen, mode:
            model(x, mask=hw.mask.causal())
        found.append(list(seen.heads()))
    for plain, counted in zip(*found, strict=True):
        assert dict(counted) == pytest.approx(dict(plain))
    assert all(row["entropy_mean"] > 0 for row in found[1])
