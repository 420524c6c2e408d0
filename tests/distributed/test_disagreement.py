"""Ranks that differ, fail, stay away or die: an error on every rank names them, and none waits."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from headwise.core.options import Options
from headwise.distributed import head_attention
from headwise.distributed.call_header import checked_part
from headwise.distributed.key_blocks import KeyBlocks, RunGradients
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

SECONDS = 20  # the timeout of a group that runs into it


@pytest.mark.parametrize("k", [torch.zeros(4, 5, 8), None, "keys"], ids=["3 axes", "None", "text"])
def test_what_has_not_four_axes_is_refused_in_words(k: Any) -> None:
    q = torch.zeros(2, 4, 5, 8)
    with pytest.raises(ValueError, match=r"hw\.distributed\.observe takes q, k and v with"):
        checked_part("observe", (q, k, q), Options())


def attend(mesh: DeviceMesh, odd: int, change: str) -> object:
    """A call in which one rank does something else."""
    other = change if mesh.get_local_rank() == odd else ""
    q = torch.randn(2, 4, 5, 8, requires_grad=True)
    k = torch.randn(2, 4, 5, 8).to(torch.float64 if other == "dtype" else torch.float32)
    options: dict[str, object] = {"mask": hw.mask.causal(), "softcap": 30.0}
    if other == "softcap":
        options["softcap"] = 20.0
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
        ("softcap", "rank 1 differs in softcap: 20 there, 30 elsewhere"),
        ("function", "rank 1 differs in the function: it is in unshard, the others in attention"),
        ("backward", "rank 1 differs in the function: it is in unshard, the others in backward"),
    ],
)
def test_a_rank_that_differs_is_named_on_every_rank(
    processes: Processes, change: str, named: str
) -> None:
    for fine, error in processes.attempt(attend, 3, 1, change):
        assert not fine
        assert error.startswith("ValueError"), error
        assert named in error


def ones(*shape: int, **options: Any) -> Tensor:
    return torch.ones(*shape, **options)


WINDOW = hw.mask.causal() & hw.mask.window(3)
PADDED = [hw.mask.lengths(torch.tensor(ends)) for ends in ([15, 15], [15, 9])]
SPAN = {"start": (0, torch.tensor([4, 9]))}

CHANGES: dict[str, tuple[tuple[object, object, str], ...]] = {
    "q": ((ones(2, 4, 5, 8), ones(3, 4, 5, 8), "q: float32 (3, 4, ·, 8) there, float32 (2, 4"),),
    "k": ((ones(2, 4, 5, 8), ones(2, 2, 5, 8), "k: float32 (2, 2, ·, 8) there, float32 (2, 4"),),
    "v": (
        (ones(2, 4, 5, 8), ones(2, 4, 5, 6), "v: float32 (2, 4, ·, 6) there"),
        (ones(2, 4, 5, 8), ones(2, 4, 5, 8, requires_grad=True), ") with requires_grad there"),
    ),
    "score": (
        (None, hw.Dot(0.5), "score: Dot(scale=0.5) there, Dot(scale=0.3535"),
        (hw.Cosine(2.0), hw.Cosine(3), "score: Cosine(temperature=3) there, "),
        (hw.Cosine(ones(4)), hw.Cosine(ones(1)), "score: Cosine(temperature=float32 (1,)) there"),
        *(
            (kind(weight), kind(2 * weight), "the weight of score: [2.0, 2.0, ")
            for kind, weight in ((hw.Additive, ones(8)), (hw.General, ones(4, 8, 8)))
        ),
    ),
    "mask": (
        (hw.mask.causal(), WINDOW, "mask: (causal() & window(3)) there, causal() elsewhere"),
        (hw.mask.causal(), hw.mask.causal(1), "mask: causal(offset=1) there, causal() elsewhere"),
        (*PADDED, "mask: lengths(tensor (2,)) int64 (2,) #"),
    ),
    "bias": (
        (None, hw.ALiBi(4), "bias: ALiBi(slopes=float32 (4,)) there, None elsewhere"),
        (hw.ALiBi(ones(4)), hw.ALiBi(2 * ones(4)), "the slopes of bias: [2.0, 2.0, 2.0, 2.0] th"),
        (ones(1, 15), ones(4, 5, 15), "bias: float32 (1, 4, ·, 15) there, float32 (1, 1, ·, 15)"),
        (ones(1, 15), ones(1, 15).double(), "bias: float64 (1, 1, ·, 15) there"),
        *(
            (hw.RelativeBuckets(ones(8, 4)), other, said)
            for other, said in (
                (hw.RelativeBuckets(ones(8, 4), max_distance=9), "max_distance=9) there"),
                (hw.RelativeBuckets(ones(8, 4) / 3), "the table of bias: [0.333"),
            )
        ),
    ),
    "softcap": ((30, 20.0, "softcap: 20 there, 30 elsewhere"), (30.0, None, "softcap: None there")),
    "sinks": (
        (ones(4), None, "sinks: None there, float32 (4,) elsewhere"),
        (ones(4), ones(4) + 1e-7, "sinks: [1.0000001192092896, 1.00"),
        (ones(4), ones(4, requires_grad=True), "sinks: float32 (4,) with requires_grad there"),
    ),
    "dropout": (
        (0.1, hw.Dropout(0.2), "dropout: Dropout(rate=0.2, seed=None, first=(0, 0)) there"),
        (0.1, hw.Dropout(0.1, 1), "dropout: Dropout(rate=0.1, seed=1, first=(0, 0)) there"),
        (hw.Dropout(0.1, 1), hw.Dropout(0.1, 1, (0, 4)), "first=(0, 4)) there"),
    ),
    "engine": (("auto", "streaming", "engine: streaming there, auto elsewhere"),),
    "layout": (
        (None, hw.distributed.head_tail(), "layout: HeadTail() there, Contiguous() elsewhere"),
        (
            hw.distributed.balanced(hw.mask.causal()), hw.distributed.balanced(WINDOW),
            "layout: Balanced(mask=(causal() & window(3))) there",
        ),
    ),
    "move": (("ring", "gather", "move: gather there, ring elsewhere"),),
    "stats": ((["entropy"], ["lse"], "stats: (lse) there, (entropy) elsewhere"),),
    "sink_keys": ((1, 2, "sink_keys: 2 there, 1 elsewhere"),),
    "spans": (
        (None, {"start": (0, 4)}, "spans: {start: (0, 4)} there, {} elsewhere"),
        ({"start": (0, 4)}, {"start": (0, 5)}, "spans: {start: (0, 5)} there, {start: (0, 4)} el"),
        (SPAN, {"start": (0, SPAN["start"][1] + 1)}, "int64 (2,) [5, 10])} there"),
        ({"start": (0, 4)}, {"first": (0, 4)}, "spans: {first: (0, 4)} there"),
    ),
}  # fmt: skip
"""For each option: what two ranks have, what the third has, and what is said of it."""
EITHER = {"rows"}  # each rank samples rows of its own


def test_every_option_is_compared() -> None:
    options = set(inspect.signature(hw.distributed.observe).parameters) - {"mesh"}
    assert options == set(CHANGES) | EITHER


def differing(mesh: DeviceMesh, option: str, at: int, move: str) -> str:
    """The error of a call in which the second rank has another option, and a call after it."""
    usual, other, _ = CHANGES[option][at]
    given: dict[str, Any] = dict.fromkeys("qkv", torch.ones(2, 4, 5, 8))
    change = {option: other if mesh.get_local_rank() == 1 else usual}
    if option == "q" and mesh.get_local_rank() == 1:
        change |= dict.fromkeys("kv", other)
    elif option == "k" and mesh.get_local_rank() == 1:
        change["v"] = other
    with pytest.raises(ValueError, match="rank 1 differs in") as error:
        hw.distributed.observe(**given | {"mesh": mesh, "move": move} | change)
    hw.distributed.observe(**given, mesh=mesh)
    return str(error.value)


@pytest.mark.parametrize("option", CHANGES)
def test_an_option_that_differs_is_named_with_its_values(processes: Processes, option: str) -> None:
    for at, (*_, said) in enumerate(CHANGES[option]):
        move = "ulysses" if option == "engine" else "auto"
        for error in processes.run(differing, 3, option, at, move):
            assert said in error
            assert "\n  in hw.distributed" in error


@pytest.mark.parametrize("move", ["ranges", "ring", "gather", "ulysses"])
def test_sinks_that_differ_are_named_however_keys_move(processes: Processes, move: str) -> None:
    for error in processes.run(differing, 3, "sinks", 1, move):
        assert "rank 1 differs in sinks: [1.0000001192092896, " in error


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
                patch.setattr(RunGradients, "add_run", out_of_memory)
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


def briefly(mesh: DeviceMesh, over: Path) -> object:
    """A call that the second of two ranks never makes, in a group with a short timeout."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=SECONDS))
    if mesh.get_local_rank() == 0:
        try:
            attend(DeviceMesh.from_group(group, "cpu"), 1, "")
        finally:
            over.touch()
    while mesh.get_local_rank() == 1 and not over.exists():
        time.sleep(0.05)
    return None


@pytest.mark.slow  # waits that long
def test_a_rank_that_stays_away_is_named_when_the_timeout_is_over(
    processes: Processes, tmp_path: Path
) -> None:
    fine, error = processes.attempt(briefly, 4, tmp_path / "over")[0]
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
