"""Pairs of every mask, counted row by row, are those of its dense form."""

from typing import Any

import pytest
import torch

import headwise as hw
from headwise.core.intervals import Mask
from headwise.core.patterns import Documents
from headwise.core.place import Place
from headwise.costs.visible import closed_form, count_pairs

N, B, HEADS = 23, 2, 3
IDS = torch.tensor([[0] * 5 + [1] * 11 + [2] * 7, [0] * 20 + [3] * 3])
FIRST = torch.randint(0, N, (B, HEADS, N), generator=torch.Generator().manual_seed(0))
causal, window, prefix = hw.mask.causal, hw.mask.window, hw.mask.prefix
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": causal(),
    "causal, shifted": causal(3),
    "causal, per entry": causal([2, -4]),
    "window": causal() & window(4),
    "window, both sides": window(3, 2),
    "wide window": causal() & window(100),
    "prefix": causal() | prefix(6),
    "sinks and window": causal() & (window(4) | prefix(2)),
    "lengths": hw.mask.lengths([9, 17]),
    "documents": causal() & hw.mask.documents(IDS),
    "between": hw.mask.between(FIRST, FIRST + 5),
    "dense": hw.mask.dense(torch.rand(B, 1, N, N, generator=torch.manual_seed(0)) > 0.5),
    "dense and causal": causal() & hw.mask.dense(torch.ones(N, N, dtype=torch.bool)),
    "hides all": hw.mask.lengths(0),
}
tiles = pytest.mark.parametrize("tile", [(1, 1), (4, 8), (16, 3), (128, 128)], ids=str)


def brute(mask: Mask | None, place: Place, tile: tuple[int, int]) -> tuple[int, int]:
    """Visible pairs, and the pairs of tiles with at least one of them."""
    shape = (place.batch, place.heads, place.queries, place.keys)
    dense = torch.ones(shape) if mask is None else mask.to_dense(place).expand(shape)
    executed = 0
    for entry in dense.reshape(-1, *shape[2:]).bool():
        for i in range(0, shape[2], tile[0]):
            for j in range(0, shape[3], tile[1]):
                part = entry[i : i + tile[0], j : j + tile[1]]
                executed += part.numel() if part.any() else 0
    return int(dense.sum()), executed


@tiles
@pytest.mark.parametrize("name", MASKS)
def test_pairs_are_those_of_the_dense_mask(name: str, tile: tuple[int, int]) -> None:
    mask, place = MASKS[name], Place(B, HEADS, N, N)
    found = count_pairs(mask, place, tile)
    visible, executed = brute(mask, place, tile)
    assert found.visible == visible
    assert found.dense == B * HEADS * N * N
    if name == "between":  # rows of a tile see keys far apart, and a kernel walks in between
        assert executed <= found.executed <= found.dense
    else:
        assert found.executed == executed
    if mask is not None:
        shown = mask.to_dense(place).expand(B, HEADS, N, N)
        assert found.touched == int(shown.any(2).any(1).sum())


@pytest.mark.parametrize("queries", [1, 5, N])
@pytest.mark.parametrize("name", [name for name in MASKS if not name.startswith("dense")])
def test_pairs_of_the_last_queries(name: str, queries: int) -> None:
    """Decoding: the queries are the last tokens."""
    mask = MASKS[name]
    if isinstance(mask, Documents) or name == "between":
        pytest.skip("made for as many queries as keys")
    place = Place(B, HEADS, queries, N, offset=N - queries)
    assert count_pairs(mask, place, (4, 4)).visible == brute(mask, place, (4, 4))[0]


@pytest.mark.parametrize("queries", [1, 7, 20])
@pytest.mark.parametrize("keys", [20, 33])
@pytest.mark.parametrize("width", [None, 1, 4, 20, 50])
def test_closed_forms_give_the_counts(queries: int, keys: int, width: int | None) -> None:
    mask = causal() if width is None else causal() & window(width - 1)
    written = closed_form(mask, queries, keys)
    if written is None:
        assert width is not None, "only chunks of a prompt with a window"
        assert 1 < queries < keys
        return
    place = Place(1, 1, queries, keys, offset=keys - queries)
    python = written.replace("−", "-").replace(")(", ")*(")
    for pair in ("s(", "t(", "w("):
        python = python.replace(pair, f"{pair[0]}*(")
    python = python.replace("sw", "s*w").replace("st", "s*t").replace("s²", "s*s")
    value = eval(python, {"s": queries, "t": keys, "w": width})
    assert value == count_pairs(mask, place, (1, 1)).visible


def test_a_model_counts_its_own_masks() -> None:
    """Windows where a model has them, chunks and documents, and the mask of a call on top."""
    fields = {
        "model_type": "gemma3_text", "num_hidden_layers": 6, "sliding_window": 16,
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 128, "vocab_size": 100,
    }  # fmt: skip
    s = 50
    pytest.importorskip("transformers")

    def flops(**options: Any) -> list[tuple[int, int]]:
        kernels = hw.cost(fields, queries=s, **options).forward
        return [(each.count, each.flops) for each in kernels if each.kind == "attention"]

    near, all_keys = s * 16 - 16 * 15 // 2, s * (s + 1) // 2
    assert flops() == [(5, 4 * 2 * 32 * near), (1, 4 * 2 * 32 * all_keys)]
    ids = torch.tensor([[0] * 20 + [1] * 30])
    packed = 20 * 21 // 2 + 30 * 31 // 2
    assert flops(mask=hw.mask.documents(ids))[1] == (1, 4 * 2 * 32 * packed)


def test_chunks_end_where_they_end() -> None:
    """Llama 4: a token sees the earlier ones of its chunk of eight."""
    fields = {
        "model_type": "llama4_text", "num_hidden_layers": 4, "attention_chunk_size": 8,
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
        "intermediate_size": 96, "intermediate_size_mlp": 96, "vocab_size": 100,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    pytest.importorskip("transformers")
    cost = hw.cost(fields, queries=20)
    (chunked, _) = (kernel for kernel in cost.forward if kernel.kind == "attention")
    assert (chunked.count, chunked.flops) == (3, 4 * 64 * (2 * (8 * 9 // 2) + 4 * 5 // 2))
    kept = cost.parts["model"].parts["layers.0"].kv_cache
    assert kept == 3 * 2 * 7 * 32 * 2, "as in DynamicCache"


def test_pairs_of_a_long_sequence_take_no_square() -> None:
    place = Place(1, 32, 1 << 20, 1 << 20)
    found = count_pairs(causal() & window(4095), place, (128, 128))
    assert found.visible == 32 * ((1 << 20) * 4096 - 4096 * 4095 // 2)


def test_a_mask_for_another_length_is_refused() -> None:
    attn = hw.nn.MultiHeadAttention(64, 4)
    with pytest.raises(ValueError, match="one id per key"):
        hw.cost(attn, queries=30, mask=hw.mask.documents(IDS[0]))
