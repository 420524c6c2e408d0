"""Layouts cover a sequence once, share its work, and tensors come back from them as they were."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.distributed.geometry import geometry
from headwise.distributed.layouts import visible_per_row
from headwise.distributed.ranges import positions, size
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

DOCUMENTS = hw.mask.causal() & hw.mask.documents(torch.tensor([[0] * 50 + [1] * 9 + [2] * 41]))
LAYOUTS = {
    "contiguous": hw.distributed.contiguous(),
    "head_tail": hw.distributed.head_tail(),
    "balanced": hw.distributed.balanced(DOCUMENTS),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_every_position_has_one_rank(name: str, ranks: int) -> None:
    pieces = LAYOUTS[name].pieces(100, ranks)
    held = torch.cat([positions(ranges) for ranges in pieces])
    assert sorted(held.tolist()) == list(range(100))
    sizes = [size(ranges) for ranges in pieces]
    assert max(sizes) - min(sizes) <= {"contiguous": 1, "head_tail": 2, "balanced": 8}[name]
    for ranges in pieces:
        assert list(ranges) == sorted(ranges)


def test_ranks_share_the_visible_pairs() -> None:
    share = hw.distributed.pairs
    causal = hw.mask.causal()
    assert share(causal, 64, 4) == [136, 392, 648, 904]
    assert share(causal, 64, 4, LAYOUTS["head_tail"]) == [520] * 4
    assert hw.distributed.imbalance(share(DOCUMENTS, 100, 4)) > 1.4
    assert hw.distributed.imbalance(share(DOCUMENTS, 100, 4, LAYOUTS["balanced"])) < 1.1
    window = causal & hw.mask.window(3)
    assert hw.distributed.balanced(window).pieces(96, 4) == LAYOUTS["contiguous"].pieces(96, 4)


def test_a_layout_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match=r"rank 0 holds 4 positions.*it has 5"):
        hw.distributed.head_tail().of_lengths([4, 5, 4])
    with pytest.raises(ValueError, match="another length than 7"):
        hw.distributed.balanced(hw.mask.dense(torch.ones(5, 5).bool()) | DOCUMENTS).pieces(7, 2)
    with pytest.raises(ValueError, match="mask= takes a headwise mask"):
        hw.distributed.balanced("causal")


def there_and_back(mesh: DeviceMesh, name: str, length: int) -> dict[str, Tensor]:
    layout = LAYOUTS[name]
    whole = torch.arange(length * 6).reshape(2, length, 3).double().requires_grad_()
    part = hw.distributed.shard(whole, mesh, dim=1, layout=layout)
    again = hw.distributed.unshard(part, mesh, dim=-2, layout=layout)
    (again * (whole.detach() + mesh.get_local_rank())).sum().backward()
    positions = hw.distributed.shard(torch.arange(length), mesh, dim=0, layout=layout)
    return {"again": again.detach(), "grad": whole.grad, "positions": positions}


@pytest.mark.parametrize("name", LAYOUTS)
def test_unshard_undoes_shard_with_gradients_from_every_rank(
    processes: Processes, name: str
) -> None:
    length = 100
    found = processes.run(there_and_back, 3, name, length)
    whole = torch.arange(length * 6).reshape(2, length, 3).double()
    for rank, part in enumerate(found):
        assert torch.equal(part["again"], whole)
        assert (
            part["positions"].tolist() == positions(LAYOUTS[name].pieces(length, 3)[rank]).tolist()
        )
    # each rank's own part has the gradients of all three: x + (x + 1) + (x + 2)
    assert torch.equal(sum(part["grad"] for part in found), 3 * whole + 3)


def empty_parts(mesh: DeviceMesh) -> Tensor:
    part = hw.distributed.shard(torch.arange(2), mesh, dim=0)
    return hw.distributed.unshard(part, mesh, dim=0)


def test_a_sequence_may_be_shorter_than_the_ranks(processes: Processes) -> None:
    assert [x.tolist() for x in processes.run(empty_parts, 4)] == [[0, 1]] * 4


def test_a_mask_is_forgotten_with_the_batch_it_belongs_to() -> None:
    mask = hw.mask.causal() & hw.mask.documents(torch.tensor([[0] * 5 + [1] * 11]))
    gone = weakref.ref(mask)
    for layout in (hw.distributed.contiguous(), hw.distributed.balanced(mask)):
        found = geometry(mask, 1, 2, (8, 8), (8, 8), layout)
        assert geometry(mask, 1, 2, (8, 8), (8, 8), layout).needs is found.needs
    del mask, found, layout
    gc.collect()
    assert gone() is None


def test_a_row_whose_interval_is_the_wrong_way_round_sees_no_key() -> None:
    mask = hw.mask.causal() & hw.mask.window(2) & hw.mask.prefix(3)
    assert visible_per_row(mask, 8, 8).tolist() == [1, 2, 3, 2, 1, 0, 0, 0]
