"""Options as texts and numbers: the same where they mean the same, and not where they differ."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.distributed.descriptions import CHUNK, Values, checksum, described
from headwise.distributed.layouts import Layout
from headwise.distributed.ranges import Ranges

IDS = torch.tensor([[0, 0, 1, 1, 1]])


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        (30, 30.0, 30.5),
        (0.1, 0.1, 0.1 + 1e-16),
        ("ring", "ring", "gather"),
        ((1, None), [1, None], (1, True)),
        ({"a": (0, 4)}, {"a": (0, 4)}, {"b": (0, 4)}),
        (torch.arange(3), torch.arange(3), torch.arange(3).float()),
        (torch.arange(99) * 1.0, torch.arange(99) * 1.0, torch.arange(99) + 1e-5),
        (hw.mask.documents(IDS), hw.mask.documents(IDS + 3), hw.mask.documents(IDS.clamp_max(0))),
        (hw.mask.lengths([3, 4]), hw.mask.lengths([3, 4]), hw.mask.lengths([3, 5])),
        (hw.mask.dense(IDS == 1), hw.mask.dense(IDS > 0), hw.mask.dense(IDS == 0)),
        (hw.Dropout(0.1, 2), hw.Dropout(0.1, 2), hw.Dropout(0.1, 2, (1, 0))),
    ],
)
def test_what_means_the_same_has_one_text(one: object, same: object, other: object) -> None:
    assert described(one) == described(same)
    assert described(one) != described(other)


class Own(hw.mask.Mask):
    """A mask of a user, which says nothing of itself."""

    def __init__(self, width: int) -> None:
        self.width = width


class Halves(Layout):
    """A layout of a user."""

    def pieces(self, length: int, ranks: int) -> tuple[Ranges, ...]:
        return tuple(((rank, rank + 1),) for rank in range(ranks))


def test_classes_of_users_are_told_by_what_they_hold() -> None:
    assert described(Own(3)) == described(Own(3)) == "Own(width=3)"
    assert described(Own(3)) != described(Own(4))
    assert described(Halves()) == described(Halves())


def test_a_mask_that_was_changed_in_place_is_read_again() -> None:
    ends = torch.tensor([3, 4])
    mask = hw.mask.lengths(ends)
    before = described(mask)
    assert described(mask) is before
    ends += 1
    assert described(mask) == described(hw.mask.lengths(torch.tensor([4, 5]))) != before


def numbers(x: Tensor) -> int:
    return int(checksum(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32, torch.bool])
def test_a_sum_tells_every_value_and_its_place(dtype: torch.dtype) -> None:
    values = torch.arange(2 * CHUNK + 5).remainder(7).gt(3) if dtype is torch.bool else None
    x = torch.arange(2 * CHUNK + 5).to(dtype) if values is None else values
    assert numbers(x) == numbers(x.clone()) == numbers(torch.cat((x[:1], x))[1:])
    for at in (0, 5, CHUNK, -1):
        other = x.clone()
        other[at] = 1 - other[at].long()
        assert numbers(other) != numbers(x)
    pair = torch.tensor([0, 1], dtype=dtype)
    assert numbers(pair) != numbers(pair.flip(0))
    assert numbers(x[:0]) == 0
    assert numbers(x[::2][1:2]) == numbers(x[2:3].clone())


def test_values_are_shown_as_far_as_there_is_room() -> None:
    assert str(Values(torch.tensor([1.5, -2]))) == "[1.5, -2.0]"
    assert str(Values(torch.zeros(99))).startswith("[0.0, 0.0, ")
    assert ", …] #" in str(Values(torch.ones(99)))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_gpu_sums_up_without_waiting() -> None:
    x = torch.randn(32, 128, 128)
    on_gpu = x.cuda()
    Values(on_gpu)  # the factors are there
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = Values(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.number == Values(x).number
