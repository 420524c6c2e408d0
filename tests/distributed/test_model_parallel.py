"""Watching and clipping under tensor and pipeline parallelism: as in one process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import headwise as hw
from headwise.watching.ranks.layer_numbers import LayerPart, numbered
from tests.distributed.processes import Processes
from tests.watching.latent import Latent
from tests.watching.test_tied_weights import EXACT
from tests.watching.test_tied_weights import inputs as tied_inputs

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

HEADS, LAYERS, STEPS = 4, 3, 2
PLAN = {
    "query": ColwiseParallel(), "key": ColwiseParallel(), "value": ColwiseParallel(),
    "out": RowwiseParallel(),
}  # fmt: skip


class Layers(nn.Module):
    """Layers of attention, or a stage of them under the names of the whole model."""

    def __init__(self, wanted: range = range(LAYERS)) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [hw.nn.MultiHeadAttention(32, HEADS, kv_heads=2) for _ in range(LAYERS)]
        for number, attn in enumerate(made):
            nn.init.normal_(attn.query.weight, std=0.5 * (number + 1))
        self.layers = nn.ModuleDict({str(i): made[i] for i in wanted})
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for attn in self.layers.values():
            x = x + attn(x)
        return x


def inputs(step: int) -> Tensor:
    numbers = torch.Generator().manual_seed(step)
    return torch.randn(2, 9, 32, generator=numbers, dtype=torch.float64)


@lru_cache
def grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def rows(table: object) -> list[dict[str, object]]:
    return [dict(row) for row in table]


def tensor_parallel(mesh: DeviceMesh, folder: str) -> dict[str, object]:
    """Heads over two ranks, the batch over the other two."""
    both = grid("dp", "tp")
    model = Layers()
    for attn in model.layers.values():
        parallelize_module(attn, both["tp"], PLAN)
    entry = both["dp"].get_local_rank()
    watch = hw.watch(model, mesh=both, alarms=True)
    with watch, watch.record(Path(folder)):
        for step in range(STEPS):
            model(inputs(step)[entry : entry + 1])
            watch.step()
    found = {"series": [rows(x.table) for x in watch.series], "alarms": watch.alarms}
    first = 2 * both["tp"].get_local_rank()
    found["map"] = watch.map(1, first + 1).to_tensor()
    try:
        watch.map(1, (first + 2) % HEADS)
    except ValueError as error:
        found["elsewhere"] = str(error)
    with hw.watch(model, mesh=both, layers=1, heads=3) as watch:
        model(inputs(0)[entry : entry + 1])
        watch.step()
    found["some"] = [(row["layer"], row["head"]) for row in watch.heads()]
    return found


def alone() -> hw.watching.Watch:
    model = Layers()
    with hw.watch(model, alarms=True) as watch:
        for step in range(STEPS):
            model(inputs(step))
            watch.step()
    return watch


def same(found: list[dict[str, object]], truth: object) -> None:
    assert len(found) == len(truth)
    for row, whole in zip(found, truth, strict=True):
        for name, value in whole.items():
            assert row[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_tensor_parallel_heads_have_their_numbers(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    truth = alone()
    found = processes.run(tensor_parallel, 4, str(tmp_path / "run"))
    for rank, part in enumerate(found):
        for entry, whole in zip(part["series"], truth.series, strict=True):
            same(entry, whole.table)
        assert part["some"] == [(1, 3)]
        assert "its heads on this rank are" in part["elsewhere"]
        mine = truth.map(1, 2 * (rank % 2) + 1, batch=rank // 2).to_tensor()
        torch.testing.assert_close(part["map"], mine)
    assert [str(x) for x in found[0]["alarms"]] == [str(x) for x in truth.alarms]
    run = hw.watching.open_run(tmp_path / "run")
    same(rows(run.heads()), truth.heads())


def mattered(model: nn.Module) -> hw.watching.Watch:
    """A watch of what mattered to a scalar."""
    with hw.watch(model, effects=True) as seen:
        out = model(inputs(0))
        (out * torch.sin(torch.arange(out.numel())).view_as(out)).sum().backward()
    return seen


def mattered_here(mesh: DeviceMesh) -> list[dict[str, object]]:
    model = Layers()
    for attn in model.layers.values():
        parallelize_module(attn, mesh, PLAN)
    return rows(mattered(model).edges(500))


def test_the_edges_of_all_ranks_are_those_of_one_process(processes: Processes) -> None:
    parts = processes.run(mattered_here, 2)
    assert [{row["head"] for row in part} for part in parts] == [{0, 1}, {2, 3}]
    found = sorted((row for part in parts for row in part), key=lambda row: -abs(row["effect"]))
    for mine, whole in zip(found[:500], mattered(Layers()).edges(500), strict=True):
        assert abs(mine["effect"] - whole["effect"]) < 1e-9
        place = ("layer", "head", "batch", "query", "key")
        assert [mine[x] for x in place] == [whole[x] for x in place]


def read_at_once(mesh: DeviceMesh, told: bool, how: str) -> dict[str, object]:
    """Figures of a plan, read before a step has ended, with or without the mesh."""
    model, whole = Layers(), grid("dp", "tp") if how == "fsdp" else mesh
    for attn in model.layers.values():
        parallelize_module(attn, whole["tp"] if how == "fsdp" else mesh, PLAN)
        if how == "fsdp":
            fully_shard(attn, mesh=whole["dp"])
    if how == "compiled":
        model = torch.compile(model, backend="eager")
    with hw.watch(model, mesh=whole if told else None) as watch:
        model(inputs(0))
        first = 2 * (mesh.get_local_rank() % 2)
        found = {"heads": rows(watch.heads()), "map": watch.map(1, first + 1).to_tensor()}
        found["types"] = [(row["layer"], row["head"]) for row in watch.types()]
        watch.step()
        found["series"] = rows(watch.series[0].table)
    return found


@pytest.mark.parametrize(
    ("how", "ranks", "told"),
    [("plan", 2, True), ("plan", 2, False), ("compiled", 2, False), ("fsdp", 4, True)],
)
def test_heads_have_their_numbers_before_a_step_has_ended(
    processes: Processes, how: str, ranks: int, told: bool
) -> None:
    model = Layers()
    with hw.watch(model) as watch:
        model(inputs(0))
    for rank, part in enumerate(processes.run(read_at_once, ranks, told, how)):
        rank %= 2  # of those that share the heads out
        mine = [row for row in watch.heads() if row["head"] // 2 == rank]
        same(part["heads"], mine)
        same(part["series"], watch.heads() if told else mine)
        assert part["types"] == [(row["layer"], row["head"]) for row in mine]
        torch.testing.assert_close(part["map"], watch.map(1, 2 * rank + 1).to_tensor())


def latent_heads(mesh: DeviceMesh | None) -> dict[str, object]:
    """Latent attention, numbered at once, and clipped."""
    torch.manual_seed(0)
    model = Latent(absorbed=False).double()
    nn.init.normal_(model.q_b_proj.weight, std=5.0)
    if mesh is not None:
        plan = {"q_b_proj": ColwiseParallel(), "kv_b_proj": ColwiseParallel()}
        parallelize_module(model, mesh, plan)
    with hw.watch(model) as watch:
        model(inputs(0))
        found: dict[str, object] = {"heads": rows(watch.heads())}
        clips = hw.qk_clip(model, watch, limit=3.0)
    found["clips"] = [(clip.head, clip.factor) for clip in clips]
    weights = (model.q_b_proj.weight, model.kv_b_proj.weight, model.kv_a_proj_with_mqa.weight)
    found["weights"] = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in weights]
    return found


def test_latent_heads_are_numbered_and_clipped_as_in_one_process(processes: Processes) -> None:
    truth = latent_heads(None)
    for rank, part in enumerate(processes.run(latent_heads, 4)):
        same(part["heads"], [row for row in truth["heads"] if row["head"] == rank])
        torch.testing.assert_close(part["weights"], truth["weights"])
    assert len(truth["clips"]) == 4


EDGE = (1, 3, (0, 4))


def experiments(mesh: DeviceMesh | None) -> dict[str, object]:
    """What experiments give, with or without a plan that shares out the heads."""
    model = Layers()
    for attn in model.layers.values() if mesh is not None else ():
        parallelize_module(attn, mesh, PLAN)
    with torch.no_grad(), hw.watch(model, heads=(1, 3)) as watch:
        with watch.knock_out([EDGE]):
            out = model(inputs(0))
        with hw.steer(model, [(*EDGE, 3.0), (0, None, 2, 0.5, (3, 6))]):
            steered = model(inputs(0))
        with hw.sparsify(model, hw.sparse.TopK((1, 2, 3, 4))):
            sparse = model(inputs(0))
        table = rows(watch.importance(lambda: model(inputs(0)).square().sum()))
        with pytest.raises(ValueError, match="has no head 4"), watch.knock_out([(1, 4, 0)]):
            model(inputs(0))
    return {"out": out, "importance": table, "steered": steered, "sparse": sparse}


def test_experiments_take_the_numbers_of_the_whole_layer(processes: Processes) -> None:
    truth = experiments(None)
    for rank, part in enumerate(processes.run(experiments, 2)):
        for name in ("out", "steered", "sparse"):
            torch.testing.assert_close(part[name], truth[name])
        same(part["importance"], [x for x in truth["importance"] if x["head"] // 2 == rank])


def sharded_heads(mesh: DeviceMesh) -> dict[str, object]:
    """A plan whose projections return DTensors: sinks and dropout are those of all heads."""
    plan = {name: ColwiseParallel(use_local_output=False) for name in ("query", "key", "value")} | {
        "out": RowwiseParallel(input_layouts=Shard(-1))
    }
    attn = with_sinks()
    parallelize_module(attn, mesh, plan)
    with hw.watch(attn, mesh=mesh) as watch:
        out = attn(inputs(0))
        watch.step()
    out.square().sum().backward()
    return {"out": out.detach(), "heads": rows(watch.heads()), "grad": attn.sinks.grad}


def dropping(sharded: DeviceMesh | None) -> tuple[Tensor, Tensor]:
    """The output and the input's gradient of a layer that drops weights, with or without a plan."""
    torch.manual_seed(2)
    attn = hw.nn.MultiHeadAttention(32, HEADS, kv_heads=2, dropout=0.4).double()
    if sharded is not None:
        parallelize_module(attn, sharded, PLAN)
    x = inputs(0).requires_grad_()
    torch.manual_seed(3)  # a seed is drawn from the same generator on every rank
    out = attn(x)
    out.square().sum().backward()
    return out.detach(), x.grad


def test_dropout_of_a_plan_drops_what_one_process_drops(processes: Processes) -> None:
    truth = dropping(None)
    for found in processes.run(dropping, 2):
        torch.testing.assert_close(found, truth)


def with_sinks() -> nn.Module:
    torch.manual_seed(2)
    return hw.nn.MultiHeadAttention(
        32, HEADS, kv_heads=2, sinks=True, mask=hw.mask.causal(), dropout=hw.Dropout(0.2, 3)
    ).double()


def test_a_plan_with_dtensors_between_its_layers(processes: Processes) -> None:
    attn = with_sinks()
    with hw.watch(attn) as watch:
        out = attn(inputs(0))
    out.square().sum().backward()
    found = processes.run(sharded_heads, 2)
    for part in found:
        torch.testing.assert_close(part["out"], out.detach(), rtol=1e-9, atol=1e-9)
        same(part["heads"], watch.heads())
    torch.testing.assert_close(found[0]["grad"] + found[1]["grad"], attn.sinks.grad)


def pipeline(mesh: DeviceMesh, local_names: bool) -> dict[str, object]:
    """The first two layers on one rank, the last on the other; both with two halves of a batch."""
    both = grid("pp", "dp")
    stage, entry = both["pp"].get_local_rank(), both["dp"].get_local_rank()
    model = Layers(range(2) if stage == 0 else range(2, LAYERS))
    if local_names and stage:
        model.layers = nn.ModuleDict({"0": model.layers["2"]})
    before = Layers(range(2))
    watch = hw.watch(model, mesh=both, layers=None if local_names else (0, 2))
    with watch:
        for step in range(STEPS):
            x = inputs(step)[entry : entry + 1]
            model(before(x) if stage else x)
            watch.step()
    return {
        "series": [rows(x.table) for x in watch.series],
        "own": [x.number for x in watch.layers],
    }


@pytest.mark.parametrize("local_names", [False, True])
def test_pipeline_stages_number_the_layers_of_the_model(
    processes: Processes, local_names: bool
) -> None:
    truth = alone()
    for rank, part in enumerate(processes.run(pipeline, 4, local_names)):
        assert part["own"] == ([0, 1], [2])[rank // 2]
        for entry, whole in zip(part["series"], truth.series, strict=True):
            table = [dict(row) for row in whole.table]
            if local_names:  # both stages call their first layer layers.0
                for row in table:
                    stage, name = divmod(row["layer"], 2)
                    row["name"] = f"pp{stage}.layers.{name}"
            else:
                table = [row for row in table if row["layer"] != 1]
            same(entry, table)


def test_stages_in_turns_are_put_in_the_order_of_their_names() -> None:
    def parts(*names: str) -> list[LayerPart]:
        return [LayerPart(name, "self", 8) for name in names]

    everyone = {(0,): parts("h.0.attn", "h.10.attn"), (1,): parts("h.9.attn", "last.attn")}
    found = numbered(("pp",), everyone, (1,))
    assert [x.name for x in found] == ["h.0.attn", "h.9.attn", "h.10.attn", "last.attn"]
    assert [list(x.own) for x in found] == [[], list(range(8)), [], list(range(8))]


def test_shares_of_heads_need_not_be_equal() -> None:
    everyone = {(0,): [LayerPart("a", "self", 3)], (1,): [LayerPart("a", "self", 2)]}
    (layer,) = numbered(("tp",), everyone, (1,))
    assert (layer.heads, layer.own) == (5, range(3, 5))
    with pytest.raises(ValueError, match="differ in the heads of a"):
        numbered(("dp",), everyone, (1,))
    twice = {(n, *share): parts for n in (0, 1) for share, parts in everyone.items()}
    assert numbered(("dp", "tp"), twice, (1, 1))[0].own == range(3, 5)
    twice[1, 0] = [LayerPart("a", "self", 4)]  # one share of two
    with pytest.raises(ValueError, match=r"differ in the heads of a: they have \[2, 3, 4\]"):
        numbered(("dp", "tp"), twice, (1, 1))


def test_a_rank_may_not_watch_a_layer_that_others_watch() -> None:
    everyone = {(0,): [LayerPart("a", "", 0)], (1,): [LayerPart("a", "self", 2, stats=("lse",))]}
    for own, heads in (((0,), range(0)), ((1,), range(2))):
        (layer,) = numbered((), everyone, own)
        assert (layer.heads, layer.own, layer.kind, layer.stats) == (2, heads, "self", ("lse",))
    unknown = {
        (0,): [LayerPart("b", "self", 2)],
        (1,): [everyone[(1,)][0], LayerPart("b", "self", 2)],
    }
    assert [x.heads for x in numbered(("dp",), unknown, (0,))] == [2, 2]  # the first never ran a
    with pytest.raises(ValueError, match="rank 1 differs in watched layers: 2 there, 1 elsewhere"):
        numbered(("dp",), everyone | {(1,): 2 * everyone[(1,)], (2,): everyone[(0,)]}, (0,))


def clipped(mesh: DeviceMesh, kind: str) -> dict[str, object]:
    """One step of each kind of parallelism, and the weights after clipping."""
    model, entries, ranks = Layers(), slice(None), None
    if kind == "fsdp":  # which cuts the weights of keys inside of a head
        for attn in model.layers.values():
            fully_shard(attn, mesh=mesh)
        fully_shard(model, mesh=mesh)
        entries = slice(mesh.get_local_rank() % 2, None, 2)
    elif kind == "tp":
        for attn in model.layers.values():
            parallelize_module(attn, mesh, PLAN)
        ranks = mesh  # of two processes out of four
    elif kind == "fsdp and tp":
        both = grid("dp", "tp")
        for attn in model.layers.values():
            parallelize_module(attn, both["tp"], PLAN)
            fully_shard(attn, mesh=both["dp"])
        entries, ranks = slice(both["dp"].get_local_rank(), None, 2), both
    elif kind == "pp":
        both = grid("pp", "dp")
        stage = both["pp"].get_local_rank()
        before = Layers(range(2)) if stage else nn.Identity()
        model = Layers(range(2, LAYERS) if stage else range(2))
        entries, ranks = slice(both["dp"].get_local_rank(), None, 2), both
    watch = hw.watch(model, mesh=ranks)
    with watch:
        x = inputs(0)[entries]
        model(before(x) if kind == "pp" else x)
        watch.step()
    clips = hw.qk_clip(model, watch, limit=LIMIT)
    assert hw.qk_clip(model, watch, limit=LIMIT) == []
    weights = dict(model.named_parameters())
    weights = {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in weights.items()}
    symmetric = [row["symmetry"] for row in watch.symmetry()] if kind != "pp" else []
    return {"clips": list(clips), "weights": weights, "symmetry": symmetric}


LIMIT = 20.0


@pytest.mark.parametrize(("kind", "ranks"), [("fsdp", 4), ("tp", 2), ("fsdp and tp", 4), ("pp", 4)])
def test_clipped_weights_are_those_of_one_process(
    processes: Processes, kind: str, ranks: int
) -> None:
    model = Layers()
    with hw.watch(model) as watch:
        model(inputs(0))
        watch.step()
    clips = hw.qk_clip(model, watch, limit=LIMIT)
    assert 0 < len(clips) < LAYERS * HEADS
    whole = dict(model.named_parameters())
    symmetry = [row["symmetry"] for row in watch.symmetry()]
    for rank, part in enumerate(processes.run(clipped, ranks, kind)):
        for name, found in part["weights"].items():
            torch.testing.assert_close(found, whole[name], rtol=1e-12, atol=1e-12)
        mine = [x for x in clips if kind != "pp" or (x.layer == 2) == (rank > 1)]
        for one, other in zip(part["clips"], mine, strict=True):
            assert (one.layer, one.head) == (other.layer, other.head)
            assert one.factor == pytest.approx(other.factor, rel=1e-12)
        share = {"tp": rank, "fsdp and tp": rank % 2}.get(kind)
        if share is not None:  # each rank has the heads that it computes
            halves = [symmetry[i : i + 2] for i in range(2 * share, LAYERS * HEADS, HEADS)]
            assert part["symmetry"] == pytest.approx([x for half in halves for x in half])
        elif kind == "fsdp":
            assert part["symmetry"] == pytest.approx(symmetry)


def clipped_together(mesh: DeviceMesh | None, tied: str) -> dict[str, Tensor]:
    """The weights of a model with tied ones after clipping; with a mesh, FSDP shards them."""
    model, x = EXACT[tied](), tied_inputs()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    with torch.no_grad(), hw.watch(model) as watch:
        model(x)
    assert hw.qk_clip(model, watch, limit=LIMIT)
    found = dict(model.named_parameters(remove_duplicate=False))
    return {n: x.full_tensor() if hasattr(x, "full_tensor") else x for n, x in found.items()}


@pytest.mark.parametrize("tied", ["one matrix for queries and keys", "shared keys of three layers"])
def test_tied_weights_that_are_sharded_are_scaled_once(processes: Processes, tied: str) -> None:
    whole = clipped_together(None, tied)
    for found in processes.run(clipped_together, 4, tied):
        for name, weight in whole.items():
            torch.testing.assert_close(found[name].detach(), weight.detach())
