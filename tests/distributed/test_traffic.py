"""Keys move as the formula says: windows and documents move what they need, not the sequence."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw
from tests.distributed.processes import Processes

pytestmark = pytest.mark.xdist_group("ranks")  # one worker, one set of processes

LENGTH, BATCH, HEADS, KV_HEADS, WIDTH, VALUES = 60, 2, 4, 2, 8, 6
IDS = torch.tensor([[0] * 14 + [1] * 17 + [2] * 29])
MASKS = {
    "none": None,
    "causal": hw.mask.causal(),
    "window": hw.mask.causal() & hw.mask.window(5),
    "both sides": hw.mask.window(4, 3),
    "sinks and window": hw.mask.causal() & (hw.mask.window(4) | hw.mask.prefix(2)),
    "documents": hw.mask.documents(IDS),
    "padding": hw.mask.lengths(torch.tensor([13, 31])),
    "dense": hw.mask.dense(torch.eye(LENGTH).bool()),
}


def moved(mesh: DeviceMesh, mask: str, layout: str, move: str) -> tuple[int, int, int, int]:
    made = getattr(hw.distributed, layout)()

    def part(heads: int, width: int) -> torch.Tensor:
        whole = torch.randn(BATCH, heads, LENGTH, width, dtype=torch.float32)
        return hw.distributed.shard(whole, mesh, dim=2, layout=made).requires_grad_()

    q, k, v = part(HEADS, WIDTH), part(KV_HEADS, WIDTH), part(KV_HEADS, VALUES)
    with hw.distributed.traffic() as forward:
        out = hw.distributed.attention(q, k, v, mesh=mesh, mask=MASKS[mask], layout=made, move=move)
    with hw.distributed.traffic() as backward:
        out.sum().backward()
    return forward.sent, forward.received, backward.sent, backward.received


@pytest.mark.parametrize("mask", MASKS)
def test_the_bytes_that_move_are_those_of_the_formula(processes: Processes, mask: str) -> None:
    cases = [
        ("contiguous", "auto", 4), ("head_tail", "ranges", 3), ("contiguous", "ring", 3),
        ("head_tail", "gather", 2), ("head_tail", "ulysses", 2), ("contiguous", "ulysses", 3),
    ]  # fmt: skip
    for layout, move, ranks in cases:
        found = processes.run(moved, ranks, mask, layout, move)
        said = hw.distributed.explain(
            LENGTH, ranks, mask=MASKS[mask], layout=getattr(hw.distributed, layout)(), batch=BATCH,
            heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, value_width=VALUES, dtype=torch.float32,
            move=move,
        )  # fmt: skip
        assert [sent for sent, *_ in found] == list(said.sent), (mask, layout, move)
        assert [back for _, _, back, _ in found] == list(said.returned), (mask, layout, move)
        assert sum(x[0] for x in found) == sum(x[1] for x in found)
        assert sum(x[2] for x in found) == sum(x[3] for x in found)


def test_windows_and_documents_move_what_they_need() -> None:
    each = 2 * 128 * 2  # a key and a value of one head, in bfloat16
    window = hw.distributed.explain(1 << 17, 8, mask=hw.mask.causal() & hw.mask.window(1023))
    assert window.move == "ranges"
    assert window.sent == (1023 * each,) * 7 + (0,)
    ids = torch.arange(8).repeat_interleave(1 << 14)[None]
    documents = hw.distributed.explain(1 << 17, 8, mask=hw.mask.documents(ids))
    assert documents.sent == (0,) * 8
    assert documents.steps == 0
    causal = hw.distributed.explain(1 << 17, 8, mask=hw.mask.causal())
    assert causal.move == "ring"
    assert max(causal.sent) == 7 * (1 << 14) * each
    assert max(causal.kept) == 2 * (1 << 14) * each
    for move in ("ring", "ranges", "gather", "ulysses"):
        alone = hw.distributed.explain(64, 1, move=move)
        assert alone.sent == alone.returned == alone.kept == (0,), move


def test_heads_are_exchanged_where_that_moves_less_than_a_ring() -> None:
    def chosen(ranks: int, heads: int, kv_heads: int) -> hw.distributed.Movement:
        return hw.distributed.explain(
            1 << 17, ranks, mask=hw.mask.causal(), heads=heads, kv_heads=kv_heads
        )

    many = chosen(8, 32, 8)
    assert many.move == "ulysses"
    assert many.steps == 2
    assert hw.distributed.imbalance(many.pairs) == 1  # in any layout
    each = (1 << 14) * 128 * 2  # a rank's positions of one head, in bfloat16
    assert many.sent == (7 * each * (4 + 1 + 1 + 4),) * 8  # queries, keys, values and results
    assert max(many.sent) < 7 * each * 8 * 2  # what the ring sends
    assert chosen(4, 64, 4).move == "ring"  # sixteen queries would move for each key
    assert chosen(16, 32, 8).move == "ring"  # ranks would have to share key heads
    assert chosen(8, 1, 1).move == "ring"


def test_the_plan_explains_itself() -> None:
    said = str(hw.distributed.explain(4096, 4, mask=hw.mask.causal(), move="gather"))
    assert said.startswith("gather: it was requested")
    assert "the busiest rank has 1.75 times the mean of pairs" in said
    with pytest.raises(ValueError, match="move='tree' is unknown"):
        hw.distributed.explain(4096, 4, move="tree")
    with pytest.raises(ValueError, match="heads=12 is not a multiple of kv_heads=8"):
        hw.distributed.explain(4096, 4, heads=12, kv_heads=8)
