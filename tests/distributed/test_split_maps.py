"""Maps of split sequences are those of one process, each rank computing the weights of its keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from tests.distributed.processes import Processes
from tests.distributed.test_split_models import LENGTH, inputs, layer

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

IDS = torch.tensor([[0] * 9 + [1] * 13, [0] * 15 + [1] * 7])


def asked(amap: hw.AttentionMap) -> dict[str, Tensor]:
    """Everything that a map tells."""
    weights, keys = amap.top(3)
    return {
        "all": amap.to_tensor(), "some": amap[0, 0, 5:9, 3:17], "one": amap[0, 0, 20],
        "mean": amap.pool(5), "max": amap.pool(7, how="max"), "received": amap.received(),
        "mass": amap.mass(2, 11), "top": weights, "keys": keys, "lse": amap.lse,
        "lse of a head": amap.head(0, 0).lse,
        "tile": amap.head(0, 0).tile(0, 0, 0),
    }  # fmt: skip


def watched(mesh: DeviceMesh, name: str) -> dict[str, object]:
    layout = getattr(hw.distributed, name)()
    attn = layer()
    hw.distributed.context_parallel(attn, mesh, layout=layout)
    positions = hw.distributed.shard(torch.arange(LENGTH), mesh, dim=0, layout=layout)
    with hw.watch(attn) as seen:
        attn(
            hw.distributed.shard(inputs(), mesh, dim=1, layout=layout), positions=positions,
            mask=hw.mask.documents(IDS),
        )  # fmt: skip
    found = {"map": asked(seen.map(0, 3, batch=1))}
    try:
        seen.types()  # looks at maps on each rank alone
    except ValueError as error:
        found["refused"] = str(error)
    return found


def same(found: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    for name, value in truth.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize(("name", "ranks"), [("contiguous", 2), ("head_tail", 3)])
def test_a_watched_head_of_a_split_sequence(processes: Processes, name: str, ranks: int) -> None:
    attn = layer()
    with hw.watch(attn) as seen:
        attn(inputs(), mask=hw.mask.documents(IDS))
    truth = asked(seen.map(0, 3, batch=1))
    for part in processes.run(watched, ranks, name):
        same(part["map"], truth)
        assert "seen.map(layer, head) on every rank" in part["refused"]


def call() -> tuple[Tensor, Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, n, LENGTH, 8, generator=numbers, dtype=torch.float64) for n in (4, 2))
    return q, k, torch.randn(4, LENGTH, LENGTH, generator=numbers, dtype=torch.float64)


def made(mesh: DeviceMesh) -> dict[str, object]:
    q, k, bias = call()
    layout = hw.distributed.balanced(hw.mask.causal())
    parts = [
        hw.distributed.shard(x, mesh, dim=d, layout=layout) for x, d in ((q, 2), (k, 2), (bias, 1))
    ]
    options = {"mask": hw.mask.causal(), "sinks": torch.ones(4).double(), "score": hw.Cosine(3.0)}
    amap = hw.distributed.attention_map(
        *parts[:2], mesh=mesh, layout=layout, bias=parts[2], **options
    )
    found = {"map": asked(amap)}
    for name in ("eviction_scores", "weighted"):
        try:
            getattr(amap, name)()
        except ValueError as error:
            found[name] = str(error)
    return found


def test_a_map_with_every_option(processes: Processes) -> None:
    q, k, bias = call()
    options = {"mask": hw.mask.causal(), "sinks": torch.ones(4).double(), "score": hw.Cosine(3.0)}
    truth = asked(hw.attention_map(q, k, bias=bias, **options))
    for part in processes.run(made, 4):
        same(part["map"], truth)
        assert "use .received()" in part["eviction_scores"]
        assert "has no values" in part["weighted"]


def differing(mesh: DeviceMesh, what: str) -> None:
    """A map that the second rank makes, or asks, otherwise."""
    other = what if mesh.get_local_rank() == 1 else ""
    q = torch.ones(1, 2, 3, 4)
    options: dict[str, object] = {"mesh": mesh, "sinks": torch.ones(2)}
    options |= {"lse": torch.zeros(1, 2, 3)} if what != "lse" or other else {}
    if other in ("sinks", "softcap"):
        options[other] = {"sinks": torch.full((2,), 2.0), "softcap": 3.0}[other]
    elif other == "layout":
        options["layout"] = "no layout"
    amap = hw.distributed.attention_map(q, q, **options)
    if what == "head":
        amap = amap.head(0, int(other == "head"))
    if what == "pool":
        amap.pool(2 if other else 3)
    amap.top(2 if other == "top" else 3)


def refused(mesh: DeviceMesh, what: str) -> str:
    """The error of such a map, and a map after it."""
    with pytest.raises((ValueError, hw.distributed.RankError)) as error:
        differing(mesh, what)
    q = torch.ones(1, 2, 3, 4)
    hw.distributed.attention_map(q, q, mesh=mesh).received()
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sinks", "rank 1 differs in the values of sinks: [2.0, 2.0] there, [1.0, 1.0] elsewhere"),
        ("softcap", "rank 1 differs in softcap: 3 there, None elsewhere"),
        ("lse", "rank 1 differs in lse: given there, None elsewhere"),
        ("layout", "failed before the call: ValueError: layout='no layout' is not a layout"),
        ("head", "the 3 largest weights of head (0, 1) there, the 3 largest weights of head (0, 0"),
        ("pool", "the question: the mean of 2 by 2 cells"),
        ("top", "the question: the 2 largest weights there, the 3 largest weights elsewhere"),
    ],
)
def test_ranks_that_make_or_ask_another_map_are_named(
    processes: Processes, what: str, said: str
) -> None:
    found = processes.run(refused, 3, what)
    for rank, error in enumerate(found):
        assert said in error or (rank == 1 and error.startswith("layout='no layout'"))


def differentiated(out: Tensor, positions: Tensor) -> Tensor:
    """A scalar whose parts on the ranks add up to that of one process."""
    weights = torch.sin(torch.arange(LENGTH * out.shape[-1], dtype=out.dtype))
    return (out * weights.view(LENGTH, -1)[positions]).sum()


def mattered(mesh: DeviceMesh) -> dict[str, object]:
    layout = hw.distributed.head_tail()
    attn = layer()
    hw.distributed.context_parallel(attn, mesh, layout=layout)
    positions = hw.distributed.shard(torch.arange(LENGTH), mesh, dim=0, layout=layout)
    with hw.watch(attn, effects=True) as seen:
        x = hw.distributed.shard(inputs(), mesh, dim=1, layout=layout)
        out = attn(x, positions=positions, mask=hw.mask.documents(IDS))
        differentiated(out, positions).backward()
    found = {"effects": seen.effects(0, 3, batch=1).to_tensor()}
    return found | {"edges": [dict(row) for row in seen.edges(6)]}


def test_the_effects_of_a_split_sequence_have_its_own_positions(processes: Processes) -> None:
    attn = layer()
    with hw.watch(attn, effects=True) as seen:
        out = attn(inputs(), mask=hw.mask.documents(IDS))
        differentiated(out, torch.arange(LENGTH)).backward()
    effects, edges = seen.effects(0, 3, batch=1).to_tensor(), seen.edges(6)
    for part in processes.run(mattered, 2):
        torch.testing.assert_close(part["effects"], effects, rtol=1e-9, atol=1e-9)
        places = [(row["head"], row["batch"], row["query"], row["key"]) for row in part["edges"]]
        assert places == [(x["head"], x["batch"], x["query"], x["key"]) for x in edges]
