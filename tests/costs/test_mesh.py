"""The cost of one rank, without any processes."""

from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw

LLAMA: dict[str, Any] = {
    "model_type": "llama", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 4, "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip


def cost(mesh: dict[str, int] | None = None, **options: Any) -> hw.Cost:
    return hw.cost(LLAMA, **{"batch": 8, "queries": 64, **options}, mesh=mesh)


def pairs_of(found: hw.Cost) -> int:
    """FLOPs between queries and keys."""
    return sum(each.flops * each.count for each in found.forward if each.kind == "attention")


def test_data_parallelism_divides_the_batch() -> None:
    whole, rank = cost(), cost({"dp": 4})
    assert rank.params == whole.params
    assert rank.flops * 4 == whole.flops
    assert rank.kv_cache * 4 == whole.kv_cache


def test_fsdp_shards_parameters_and_the_batch() -> None:
    whole, rank = cost(), cost({"fsdp": 4})
    assert rank.params * 4 == whole.params
    assert rank.flops * 4 == whole.flops
    assert cost({"fsdp": 2, "dp": 2}).flops == rank.flops


def test_fsdp_gives_the_first_rank_the_larger_part() -> None:
    """As FSDP2 does: each parameter is cut along its first axis."""
    rank = hw.cost(nn.Linear(10, 6), batch=4, queries=1, mesh={"fsdp": 4})
    assert rank.params == 2 * 10 + 2


def test_tensor_parallelism_is_a_model_with_fewer_heads() -> None:
    """A rank computes what a model of its heads, hidden width and vocabulary would."""
    rank = cost({"tp": 4})
    part = {**LLAMA, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "intermediate_size": 24, "vocab_size": 32}  # fmt: skip
    alone = hw.cost(part, batch=8, queries=64)
    for name in ("params", "flops", "backward_flops", "kv_cache", "activations", "special"):
        assert getattr(rank, name) == getattr(alone, name), name


def test_key_heads_are_copied_when_there_are_more_ranks() -> None:
    rank, whole = cost({"tp": 8}), cost()
    assert rank.kv_cache * 4 == whole.kv_cache, "four key heads on eight ranks: one each"
    attention = next(kernel for kernel in rank.forward if kernel.kind == "attention")
    assert (attention.shape.heads, attention.shape.kv_heads) == (1, 1)


def test_context_parallelism_reports_the_busiest_rank() -> None:
    ranks, s = 4, 64
    rank = cost({"cp": ranks})
    last = sum(range(s - s // ranks + 1, s + 1))  # the rows of the last rank see the most
    assert pairs_of(rank) == 3 * 8 * 4 * 64 * last
    assert rank.kv_cache * ranks == cost().kv_cache
    even = cost({"cp": ranks}, layout="head_tail")
    assert pairs_of(even) * ranks == 3 * 8 * 4 * 64 * (s * (s + 1) // 2), "all ranks the same"


def test_all_axes_together() -> None:
    whole, rank = cost(batch=16), cost({"dp": 2, "fsdp": 2, "tp": 2, "cp": 2}, batch=16)
    dense = sum(
        kernel.flops_dense * kernel.count for kernel in rank.forward if kernel.kind == "matmul"
    )
    all_of_it = sum(
        kernel.flops_dense * kernel.count for kernel in whole.forward if kernel.kind == "matmul"
    )
    assert dense * 16 == all_of_it


def test_ranks_hold_what_torch_gives_them() -> None:
    """A rank's columns and rows are those of ColwiseParallel and RowwiseParallel."""
    attn = hw.nn.MultiHeadAttention(64, 8, kv_heads=4)
    columns = (attn.query, attn.key, attn.value)
    held = sum(layer.weight.numel() + layer.bias.numel() for layer in columns) // 4
    held += attn.out.weight.numel() // 4 + attn.out.bias.numel()
    assert hw.cost(attn, queries=16, mesh={"tp": 4}).params == held


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tp": 3}, "heads of 8 does not divide over 3"),
        ({"dp": 3}, "batch of 8 does not divide over 3"),
        ({"dp": 4, "fsdp": 4}, "batch of 8 does not divide over 16"),
        ({"cp": 5}, "length of 64 does not divide over 5"),
        ({"pp": 2}, "no axis 'pp'"),
        ({"tp": 0}, "must be a positive number of ranks"),
        ({"tp": 2.0}, "must be a positive number of ranks"),
        (4, "must be a dictionary"),
    ],
)
def test_meshes_that_do_not_fit_are_refused_in_words(mesh: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(mesh)


def test_key_heads_that_neither_divide_nor_fit_are_refused() -> None:
    fields = {**LLAMA, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 96}
    with pytest.raises(ValueError, match="4 key heads neither divide over 6 ranks"):
        hw.cost(fields, queries=8, mesh={"tp": 6})


def test_a_device_mesh_is_read_by_its_names() -> None:
    class Mesh:
        mesh_dim_names = ("dp", "tp")
        shape = (2, 4)

    assert hw.cost(LLAMA, batch=8, queries=8, mesh=Mesh()).params == cost({"dp": 2, "tp": 4}).params


def test_no_process_is_started() -> None:
    assert not torch.distributed.is_initialized()
