"""Ranks that differ, fail, stay away or die: an error on every rank names them, and none waits."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.distributed import head_attention
from headwise.distributed.key_blocks import KeyBlocks, RunGradients
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

SECONDS = 20  # the timeout of a group that runs into it


def attend(mesh: DeviceMesh, odd: int, change: str) -> object:
    """A call in which one rank does something else."""
    rank = mesh.get_local_rank()
    other = change if rank == odd else ""
    shape = (3 if other == "batch" else 2, 4, 5, 8)
    q = torch.randn(shape, requires_grad=True)
    k = torch.randn(shape).to(torch.float64 if other == "dtype" else torch.float32)
    options: dict[str, object] = {"mask": hw.mask.causal(), "softcap": 30.0}
    if other == "softcap":
        options["softcap"] = 20.0
    elif other == "mask":
        options["mask"] = hw.mask.causal() & hw.mask.documents(torch.zeros(1, 15))
    elif other == "layout":
        options["layout"] = hw.distributed.head_tail()
    elif other == "seed":
        options["dropout"] = hw.Dropout(0.1, 1)
    if change == "short bias":  # on every rank: its own keys only
        options["bias"] = torch.zeros(5, 5)
    elif other == "function":
        return hw.distributed.unshard(q, mesh, dim=2)
    elif other == "dies":
        os._exit(1)
    out = hw.distributed.attention(q, k, k, mesh=mesh, **options)
    if change == "backward":
        if other:
            hw.distributed.unshard(q, mesh, dim=2)
        else:
            out.sum().backward()
    return None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("batch", "rank 1 differs in the batch: 3 there, 2 elsewhere"),
        ("softcap", "rank 1 differs in softcap; here, on rank {}, it is"),
        ("mask", "rank 1 differs in mask; here, on rank {}, it is"),
        ("layout", "rank 1 differs in layout"),
        ("seed", "rank 1 differs in dropout"),
        ("function", "rank 1 differs in the function: it is in unshard, the others in attention"),
        ("backward", "rank 1 differs in the function: it is in unshard, the others in backward"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(
    processes: Processes, change: str, named: str
) -> None:
    for rank, (fine, error) in enumerate(processes.attempt(attend, 3, 1, change)):
        assert not fine
        assert error.startswith("ValueError"), error
        assert named.format(rank) in error


def test_a_rank_that_fails_before_the_call_tells_the_others(processes: Processes) -> None:
    found = processes.attempt(attend, 3, 2, "dtype")
    for fine, error in found[:2]:
        assert not fine
        assert "RankError: rank 2 of 3 failed before the call: ValueError: q, k and v" in error
    assert found[2][1].startswith("ValueError: q, k and v have different dtypes")


def test_a_bias_without_the_keys_of_the_others_is_refused_everywhere(processes: Processes) -> None:
    for fine, error in processes.attempt(attend, 2, 1, "short bias"):
        assert not fine
        assert "its last axis is 1 or the 10 keys of all ranks together" in error


def out_of_memory(*_: object) -> object:
    raise MemoryError("no room")


def breaking(mesh: DeviceMesh, move: str, at: str) -> tuple[str, float]:
    """The error of a call in which the second rank fails to compute, and the sum of the next."""
    q = torch.ones(1, 4, 5, 8, requires_grad=True)
    given = {"mesh": mesh, "mask": hw.mask.causal(), "move": move}
    with pytest.MonkeyPatch.context() as patch:
        if mesh.get_local_rank() == 1:
            compute = head_attention._computed
            if at == "forward":
                patch.setattr(KeyBlocks, "_part", out_of_memory)
                patch.setattr(head_attention, "_computed", out_of_memory)
            elif move != "ulysses":
                patch.setattr(RunGradients, "of", out_of_memory)
            else:

                def hooked(*args: object) -> list[torch.Tensor]:
                    (out,) = compute(*args)
                    out.register_hook(out_of_memory)
                    return [out]

                patch.setattr(head_attention, "_computed", hooked)
        with pytest.raises(Exception) as error:
            hw.distributed.attention(q, q, q, **given).sum().backward()
    out = hw.distributed.attention(q, q, q, **given)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    return f"{type(error.value).__name__}: {error.value}", float(q.grad.sum())


@pytest.mark.parametrize("at", ["forward", "backward"])
@pytest.mark.parametrize("move", ["ring", "ranges", "ulysses"])
def test_a_rank_that_fails_while_it_computes_is_named(
    processes: Processes, move: str, at: str
) -> None:
    found = processes.run(breaking, 3, move, at)
    for rank, (said, _) in enumerate(found):
        other = "RankError: rank 1 of 3 failed while it computed: MemoryError: no room"
        assert said == ("MemoryError: no room" if rank == 1 else other)
    # and the next call is sound: every row gives its values a gradient of one, twice
    assert sum(total for _, total in found) == pytest.approx(2 * 3 * 4 * 5 * 8)


def by_heads(mesh: DeviceMesh) -> object:
    """One head for two ranks, by an engine that is not here."""
    q = torch.randn(1, 1, 4, 8)
    return hw.distributed.attention(q, q, q, mesh=mesh, move="ulysses", engine="hopper")


def test_a_rank_without_heads_hears_of_an_engine_that_can_not_serve(processes: Processes) -> None:
    for fine, error in processes.attempt(by_heads, 2):
        assert not fine
        assert "engine='hopper' can't serve this call" in error


def test_the_ranks_go_on_after_an_error(processes: Processes) -> None:
    processes.attempt(attend, 3, 1, "softcap")
    assert processes.run(attend, 3, 1, "") == [None] * 3


def briefly(mesh: DeviceMesh) -> object:
    """A call that the second of two ranks never makes, in a group with a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    if mesh.get_local_rank() == 0:
        attend(DeviceMesh.from_group(group, "cpu"), 1, "")
    elif mesh.get_local_rank() == 1:
        time.sleep(SECONDS + 1)
    return None


@pytest.mark.slow  # waits that long
def test_a_rank_that_stays_away_is_named_when_the_timeout_is_over(processes: Processes) -> None:
    fine, error = processes.attempt(briefly, 4)[0]
    assert not fine
    assert error.startswith("RankError: rank 1 of 2 did not answer rank 0"), error


@pytest.fixture
def short_lived() -> Iterator[Processes]:
    found = Processes(2)
    yield found
    found.close()


def test_a_rank_that_dies_ends_the_call_on_the_other(short_lived: Processes) -> None:
    short_lived.run(attend, 2, 1, "")  # they are connected
    (fine, error), lost = short_lived.attempt(attend, 2, 1, "dies")
    assert lost == (False, "the process ended")
    assert not fine
    assert error.startswith("RankError: rank 1 of 2 did not answer rank 0"), error
