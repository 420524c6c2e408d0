"""A watch on a mesh has the figures of all ranks, joined when a step ends."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.watching.ranks.joined_steps import JoinedSteps
from tests.distributed.processes import Processes
from tests.distributed.test_split_models import LENGTH, inputs, layer

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

STEPS, SPARSE = 3, hw.sparse.TopK(2)


def model() -> torch.nn.Module:
    """Two layers, each position by itself in between."""
    return torch.nn.Sequential(layer(), torch.nn.Tanh(), layer())


def data_parallel(mesh: DeviceMesh, folder: str, quiet: bool) -> dict[str, object]:
    """Each rank has a part of the batch; in the second step one of them sees nothing."""
    watched, rank = model(), mesh.get_local_rank()
    watch = hw.watch(watched, mesh=mesh, alarms=True, sparse=SPARSE)
    with watch, watch.record(Path(folder)):
        for step in range(STEPS):
            if not (quiet and step == 1 and rank == 0):
                watched((step + 1) * inputs()[rank : rank + 1])
            watch.step()
    return {"series": [dict(enumerate(entry.table)) for entry in watch.series]}


def context_parallel(mesh: DeviceMesh) -> dict[str, object]:
    """Each rank has a part of the sequence."""
    layout = hw.distributed.head_tail()
    attn = layer()
    hw.distributed.context_parallel(attn, mesh, layout=layout)
    x = hw.distributed.shard(inputs(), mesh, dim=1, layout=layout)
    positions = hw.distributed.shard(torch.arange(LENGTH), mesh, dim=0, layout=layout)
    found = {}
    with pytest.raises(ValueError, match="split between processes"), hw.knock_out(attn, (0, 0, 0)):
        attn(x, positions=positions)
    for rows in (None, 4):
        with hw.watch(attn, mesh=mesh, rows=rows) as seen:
            attn(x, positions=positions)
            seen.step()
        found[rows] = list(seen.heads())
    found["map"] = seen.map(0, 0).pool(4)  # of the last pass, whatever rows were sampled
    return found


def alone(batch: int = 2) -> list[list[dict[str, object]]]:
    watched = model()
    with hw.watch(watched, sparse=SPARSE) as watch:
        for step in range(STEPS):
            watched((step + 1) * inputs()[:batch])
            watch.step()
    return [list(entry.table) for entry in watch.series]


def same(row: dict[str, object], other: dict[str, object]) -> None:
    for name, value in other.items():
        assert row[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_data_parallel_figures_are_those_of_the_whole_batch(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    found = processes.run(data_parallel, 2, str(tmp_path / "run"), False)
    for entry, whole in zip(found[0]["series"], alone(), strict=True):
        for number, row in enumerate(whole):
            same(entry[number], row)
    assert found[1]["series"] == found[0]["series"]
    run = hw.watching.open_run(tmp_path / "run")  # one rank wrote it
    assert run.steps == [0, 1, 2]
    assert len(run.heads()) == 8


def test_a_rank_that_saw_nothing_in_a_step_adds_nothing(
    processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    found = processes.run(data_parallel, 2, str(tmp_path / "run"), True)
    watched = model()
    with hw.watch(watched) as watch:
        watched(2 * inputs()[1:2])
    for number, row in enumerate(watch.heads()):
        same(found[0]["series"][1][number], row)


def test_context_parallel_figures_are_those_of_the_whole_sequence(processes: Processes) -> None:
    found = processes.run(context_parallel, 2)
    attn = layer()
    with hw.watch(attn) as seen:
        attn(inputs())
    for part in found:
        for row, whole in zip(part[None], seen.heads(), strict=True):
            same(row, whole)
        torch.testing.assert_close(part["map"], seen.map(0, 0).pool(4))
        assert 0 < part[4][0]["entropy_mean"] < 3


def unequal(mesh: DeviceMesh) -> str:
    """One rank watches another model."""
    watched = model() if mesh.get_local_rank() else layer()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with hw.watch(watched, mesh=mesh) as watch:
            watched(inputs())
            watch.step()
    return " ".join(str(each.message) for each in said)


def test_ranks_with_different_models_are_told(processes: Processes) -> None:
    for said in processes.run(unequal, 3):
        assert "rank 0 differs in watched layers: 1 there, 2 elsewhere" in said


class Collectives(TorchDispatchMode):
    """The messages of torch.distributed that a block sends: collectives and single ones."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def counted(mesh: DeviceMesh) -> list[tuple[int, int]]:
    """The collectives of each step: while the model runs, and when the step ends."""
    watched, found = model(), []
    with hw.watch(watched, mesh=mesh) as watch:
        for _ in range(STEPS):
            with Collectives() as inside:
                watched(inputs()).sum().backward()
            with Collectives() as ending:
                watch.step()
            found.append((len(inside.names), len(ending.names)))
    return found


def test_a_step_is_one_collective_and_none_in_the_model(processes: Processes) -> None:
    for found in processes.run(counted, 3):
        assert found[0][0] == 0  # the first step exchanges names too
        assert found[1:] == [(0, 1)] * (STEPS - 1)


def failing(mesh: DeviceMesh, at: int, stats: bool) -> list[str]:
    """One rank fails when a step ends, or watches other statistics."""
    watched, rank, said = model(), mesh.get_local_rank(), []
    options = {"stats": ("entropy",)} if stats and rank == 1 else {}
    whole = JoinedSteps._parts
    with hw.watch(watched, mesh=mesh, strict=True, **options) as watch:
        for step in range(STEPS):
            watched(inputs())
            if (step, rank) == (at, 1) and not stats:
                JoinedSteps._parts = broken
            try:
                watch.step()
                said.append("")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
            finally:
                JoinedSteps._parts = whole
    return said


def broken(*_: object) -> dict[str, object]:
    raise MemoryError("no room")


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_that_fails_when_a_step_ends_is_named(processes: Processes, at: int) -> None:
    for rank, said in enumerate(processes.run(failing, 3, at, False)):
        for step, error in enumerate(said):
            if step != at:
                assert error == ""
            elif rank == 1:
                assert error == "MemoryError: no room"
            else:
                assert error == "RankError: rank 1 of 3 failed in hw.watch: MemoryError: no room"


def test_ranks_with_other_statistics_are_named(processes: Processes) -> None:
    for said in processes.run(failing, 3, 0, True):
        assert all("rank 1 differs in stats: entropy there" in error for error in said)
