"""The indexer's loss of a split sequence is that of one process, with its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.distributed.split_models import MeshCalls
from headwise.handover import splitting
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LENGTH = 23
AXES = {"q": 2, "k": 2, "index_q": 2, "index_k": 1, "index_weights": 2, "bias": 2, "selected": 1}
IDS = torch.tensor([[0] * 9 + [1] * 14, [0] * 15 + [1] * 8])
MASKS = {
    "causal": hw.mask.causal(),
    "documents": hw.mask.causal() & hw.mask.documents(IDS),
    "padding": hw.mask.causal() & hw.mask.lengths([LENGTH, 5]),
    "dense": hw.mask.dense(
        torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.5
    ),
}


def inputs() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=numbers, dtype=torch.float64)

    return {
        "q": normal(2, 4, LENGTH, 8), "k": normal(2, 2, LENGTH, 8),
        "index_q": normal(2, 3, LENGTH, 4).requires_grad_(),
        "index_k": normal(2, LENGTH, 4).requires_grad_(),
        "index_weights": normal(2, 3, LENGTH).requires_grad_(),
    }  # fmt: skip


def options(name: str) -> dict[str, object]:
    numbers = torch.Generator().manual_seed(2)
    more: dict[str, object] = {"mask": MASKS[name], "sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])}
    if name == "documents":
        more["bias"] = torch.randn(2, 1, LENGTH, LENGTH, generator=numbers, dtype=torch.float64)
    if name == "padding":
        more["selected"] = torch.randint(-1, LENGTH, (2, LENGTH, 7), generator=numbers)
    if name == "dense":
        more |= {"score": hw.General(torch.randn(8, 8, generator=numbers, dtype=torch.float64))}
    return more


def split(mesh: DeviceMesh, name: str, layout: str) -> dict[str, Tensor]:
    chosen = getattr(hw.distributed, layout)()

    def own(name: str, x: object) -> object:
        if name not in AXES:
            return x
        part = hw.distributed.shard(x.detach(), mesh, dim=AXES[name], layout=chosen)
        return part.requires_grad_(x.requires_grad)

    given = {name: own(name, x) for name, x in (inputs() | options(name)).items()}
    if name == "causal":  # as a layer of a model that context_parallel splits would call it
        with splitting(MeshCalls(mesh, chosen, "auto")):
            loss = hw.index_loss(**given)
    else:
        loss = hw.distributed.index_loss(**given, mesh=mesh, layout=chosen)
    loss.backward()
    found = {"loss": loss.detach()}
    for each in ("index_q", "index_k", "index_weights"):
        found[each] = hw.distributed.unshard(given[each].grad, mesh, dim=AXES[each], layout=chosen)
    return found


@pytest.mark.parametrize(
    ("name", "layout", "ranks"),
    [("causal", "contiguous", 2), ("documents", "head_tail", 3), ("padding", "head_tail", 2),
     ("dense", "contiguous", 3)],
)  # fmt: skip
def test_the_loss_and_its_gradients(
    processes: Processes, name: str, layout: str, ranks: int
) -> None:
    whole = inputs()
    loss = hw.index_loss(**whole, **options(name))
    loss.backward()
    for found in processes.run(split, ranks, name, layout):
        torch.testing.assert_close(found["loss"], loss.detach(), rtol=1e-10, atol=1e-12)
        for each in ("index_q", "index_k", "index_weights"):
            torch.testing.assert_close(found[each], whole[each].grad, rtol=1e-9, atol=1e-11)


def broken(mesh: DeviceMesh) -> str:
    given = {
        name: hw.distributed.shard(x.detach(), mesh, dim=AXES[name]) for name, x in inputs().items()
    }
    if mesh.get_local_rank() == 1:
        given["index_weights"] = given["index_weights"][:, :1]
    try:
        hw.distributed.index_loss(**given, mesh=mesh)
    except (ValueError, hw.distributed.RankError) as error:
        return str(error)
    return ""


def test_a_rank_whose_tensors_do_not_fit_is_named_on_every_rank(processes: Processes) -> None:
    for said in processes.run(broken, 2):
        assert "index_weights has shape" in said
