"""Attention of DTensors is that of the whole tensors, whichever axes are sharded."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import headwise as hw
from tests.distributed.cases import distances
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

BATCH, LENGTH, WIDTH = 4, 10, 8
B, H, N = Shard(0), Shard(1), Shard(2)
PER_HEAD = torch.arange(24)[None, :, None] % 5 + 3
SPANS = {"begin": (0, torch.tensor([2, 3, 5, 1])), "end": (6, 9)}


@lru_cache
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "cp"))


def whole(heads: int, kv_heads: int) -> list[Tensor]:
    torch.manual_seed(1)
    made = [torch.randn(BATCH, n, LENGTH, WIDTH, dtype=torch.float64)
            for n in (heads, kv_heads, kv_heads)]  # fmt: skip
    return [*made, torch.randn(heads, dtype=torch.float64)]  # and sinks


def options(kind: str, heads: int, sinks: object) -> dict[str, object]:
    """Options that depend on the head, on the batch entry and on the row."""
    numbers = torch.Generator().manual_seed(5)
    if kind == "alibi":
        slopes = hw.ALiBi(heads).slopes.double()
        return {"mask": hw.mask.causal(), "bias": hw.ALiBi(slopes), "sinks": sinks,
                "dropout": hw.Dropout(0.3, 11)}  # fmt: skip
    if kind == "tensor":
        bias = torch.randn(BATCH, heads, LENGTH, LENGTH, generator=numbers, dtype=torch.float64)
        texts = torch.arange(LENGTH) // torch.tensor([3, 4, 5, 11])[:, None]
        mask = hw.mask.lengths([10, 7, 9, 4]) & hw.mask.documents(texts)
        return {"mask": mask, "bias": bias, "sinks": sinks}
    weight = torch.randn(heads, WIDTH, generator=numbers, dtype=torch.float64)
    per_head = hw.mask.between(torch.zeros(1).int(), PER_HEAD[:, :heads])
    return {"mask": per_head, "score": hw.Additive(weight), "sinks": sinks}


def loss(out: object, seen: hw.Observation) -> object:
    weights = torch.arange(out.shape[1], dtype=torch.float64)[:, None]
    if isinstance(out, DTensor):
        flat = [Replicate()] * out.device_mesh.ndim
        out, entropy, lse = (
            x.redistribute(placements=flat).to_local() for x in (out, seen.entropy, seen.lse)
        )
    else:
        entropy, lse = seen.entropy, seen.lse
    return (out.square().sum(-1) * weights).sum() + (entropy * weights).sum() + lse.sum()


def sharded(
    mesh: DeviceMesh, kind: str, heads: int, kv_heads: int, placements: tuple[object, ...],
    move: str | None,
) -> dict[str, Tensor]:  # fmt: skip
    mesh = grid() if len(placements) == 2 else mesh
    q, k, v, sinks = whole(heads, kv_heads)
    given = [distribute_tensor(x, mesh, placements).requires_grad_() for x in (q, k, v)]
    sinks = distribute_tensor(sinks, mesh, [Replicate()] * mesh.ndim).requires_grad_()
    chosen = options(kind, heads, sinks)
    if move is None:
        out, seen = hw.observe(*given, **chosen, spans=SPANS)
        plain = hw.attention(*given, **chosen)
    else:
        where = {"mesh": mesh["cp"], "move": move}
        out, seen = hw.distributed.observe(*given, **chosen, **where, spans=SPANS)
        plain = hw.distributed.attention(*given, **chosen, **where)
    assert isinstance(out, DTensor)
    assert out.placements == tuple(placements)
    assert out.shape == given[0].shape
    loss(out, seen).backward()
    found = {"out": out, "plain": plain} | seen.values
    found |= {f"grad of {n}": x.grad for n, x in zip("qkvs", (*given, sinks), strict=True)}
    return {name: x.full_tensor().detach() for name, x in found.items()}


def alone(kind: str, heads: int, kv_heads: int) -> dict[str, Tensor]:
    given = [x.requires_grad_() for x in whole(heads, kv_heads)]
    out, seen = hw.observe(*given[:3], **options(kind, heads, given[3]), spans=SPANS)
    loss(out, seen).backward()
    found = {"out": out, "plain": out} | seen.values
    found |= {f"grad of {n}": x.grad for n, x in zip("qkvs", given, strict=True)}
    return {name: x.detach() for name, x in found.items()}


CASES = [
    ("alibi", 8, 4, 4, (H,), None),
    ("additive", 8, 4, 3, (H,), None),  # groups that are not whole: 3, 3 and 2 heads
    ("tensor", 4, 2, 4, (H,), None),  # fewer key heads than ranks
    ("alibi", 5, 1, 4, (H,), None),  # a rank without heads
    ("alibi", 4, 2, 4, (B,), None),
    ("tensor", 4, 2, 3, (N,), None),
    ("alibi", 4, 2, 4, (H, N), None),
    ("additive", 4, 2, 4, (H, N), "ring"),
    ("tensor", 4, 2, 4, (H, N), "ulysses"),
    ("alibi", 8, 2, 4, (H, N), "ulysses"),
    ("tensor", 4, 4, 4, (B, H), None),
    ("alibi", 8, 4, 4, (H, H), None),
    ("additive", 4, 4, 4, (Replicate(), H), None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1:4]} {case[4]}")
def test_sharded_heads_and_positions_are_those_of_one_process(
    processes: Processes, case: tuple[object, ...]
) -> None:
    kind, heads, kv_heads, ranks, placements, move = case
    truth = alone(kind, heads, kv_heads)
    for found in processes.run(sharded, ranks, kind, heads, kv_heads, placements, move):
        far = distances(found, truth)
        assert max(far.values()) <= 1e-9, far


WRONG = {  # options that do not fit the whole call, though a part of them may fit a rank's
    "sinks": ({"sinks": torch.zeros(3)}, "sinks has shape \\(3,\\)"),
    "bias": ({"bias": torch.zeros(1, 8, LENGTH, LENGTH)}, "bias has shape"),
    "spans": ({"spans": {"a": (0, torch.arange(5))}}, "the span 'a' has 5 bounds"),
    "mask": ({"mask": 3}, "mask= takes a headwise mask"),
}


def refused(mesh: DeviceMesh) -> list[str]:
    """The errors of wrong options, and the distance of a bias under a layout."""
    given = [distribute_tensor(x, mesh, [H]) for x in whole(4, 4)[:3]]
    said = []
    for wrong, _ in WRONG.values():
        with pytest.raises(ValueError) as error:
            hw.observe(*given, **wrong)
        said.append(str(error.value))
    for call in (lambda: hw.attention_map(*given[:2]), lambda: hw.partial(*given)):
        with pytest.raises(ValueError, match="takes plain tensors"):
            call()
    with pytest.raises(ValueError, match=r"use hw\.attention\n  in hw\.distributed\.attention\("):
        hw.distributed.attention(*given, mesh=mesh)
    rows = [distribute_tensor(x, mesh, [N]) for x in whole(4, 4)[:3]]
    with pytest.raises(ValueError, match=r"shape \(3,\)[^$]*in hw\.distributed\.observe\("):
        hw.distributed.observe(*rows, mesh=mesh, sinks=torch.zeros(3))
    return said


def test_options_that_do_not_fit_the_whole_are_refused_on_every_rank(processes: Processes) -> None:
    for said in processes.run(refused, 2):
        for found, (_, message) in zip(said, WRONG.values(), strict=True):
            assert re.search(message, found)


def one_differs(mesh: DeviceMesh, sinks: int) -> str:
    """The error of a sharded sequence for which one rank has other sinks."""
    rows = [distribute_tensor(x, mesh, [N]) for x in whole(4, 4)[:3]]
    own = torch.zeros(sinks).fill_(mesh.get_local_rank()) if mesh.get_local_rank() == 1 else None
    with pytest.raises((ValueError, hw.distributed.RankError)) as error:
        hw.distributed.attention(*rows, mesh=mesh, sinks=torch.zeros(4) if own is None else own)
    return str(error.value)


def test_a_rank_with_other_sinks_is_named_on_every_rank(processes: Processes) -> None:
    for said in processes.run(one_differs, 3, 4):
        assert "rank 1 differs in sinks: [1.0, 1.0, 1.0, 1.0] there, [0.0, 0.0" in said
    for rank, said in enumerate(processes.run(one_differs, 3, 3)):
        failed = "rank 1 of 3 failed before the call: ValueError: "
        assert said.startswith("" if rank == 1 else failed)
        assert "sinks has shape (3,)" in said


def laid_out(mesh: DeviceMesh) -> float:
    """The distance of a call under another layout than DTensor's, with a bias for every row."""
    q, k, v, _ = whole(4, 4)
    chosen = {"mask": hw.mask.causal(), "bias": torch.randn(LENGTH, LENGTH).double()}
    layout = hw.distributed.head_tail()
    given = [
        DTensor.from_local(hw.distributed.shard(x, mesh, dim=2, layout=layout), mesh, [N])
        for x in (q, k, v)
    ]
    out = hw.distributed.attention(*given, mesh=mesh, layout=layout, **chosen).to_local()
    truth = hw.distributed.shard(hw.attention(q, k, v, **chosen), mesh, dim=2, layout=layout)
    return float((out - truth).abs().max())


def test_a_bias_has_the_rows_of_the_layout(processes: Processes) -> None:
    assert max(processes.run(laid_out, 2)) <= 1e-9
