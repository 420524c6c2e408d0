"""Masks of others in our words: intervals where they are that, dense where they are not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

import headwise as hw
from headwise.core.mask_reading import PlacedIntervals, read_mask, split_mask, traced_mask
from headwise.core.mask_rules import by_rows
from headwise.core.patterns import Dense
from headwise.core.place import Place
from headwise.mask import Mask
from headwise.watching.adapters.implementation import mask as mask_function
from headwise.watching.adapters.mask_tensor import MaskTensor
from headwise.watching.adapters.scaled_dot_product import MaskMemo, band

B, N = 2, 12
PACKED = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3, [0] * 2 + [1] * 10])
RULES: dict[str, Callable[..., Any]] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(4),
    "chunked": chunked_causal_mask_function(5, torch.tensor([0, 3])),
    "packed": and_masks(causal_mask_function, packed_sequence_mask_function(PACKED)),
}
BLOCKS = torch.tensor([[-1, -1, 0, 0, 0, -1, -1, -1, 1, 1, -1, -1]] * 2)
UNKNOWN: dict[str, Callable[..., Any]] = {
    "prefix": lambda b, h, q, k: (k <= q) | (k < 4),
    "holes": lambda b, h, q, k: (k <= q) & (k % 3 != 1),
}
if hasattr(masking_utils, "bidirectional_mask_function"):  # transformers 4 has none of these
    RULES["bidirectional"] = masking_utils.bidirectional_mask_function
    RULES["window both ways"] = masking_utils.sliding_window_bidirectional_mask_function(3)
    blocks = masking_utils.blockwise_overlay(BLOCKS)
    UNKNOWN["blocks"] = or_masks(causal_mask_function, blocks)
PADDING = {
    "none": None,
    "left": torch.arange(N) >= torch.tensor([[0], [3]]),
    "right": torch.arange(N) < torch.tensor([[12], [8]]),
    "inside": torch.arange(N) % 5 != torch.tensor([[2], [9]]),
}


def dense(mask: Mask, queries: int, keys: int) -> Tensor:
    place = Place(B, 1, queries, keys, offset=keys - queries)
    return mask.to_dense(place).expand(B, 1, queries, keys)


def made(rule: Callable[..., Any], padding: Tensor | None, **place: Any) -> MaskTensor:
    return mask_function(
        batch_size=B, mask_function=rule, attention_mask=padding, use_vmap=False, **place
    )


@pytest.mark.parametrize("place", [(12, 12, 0, 0), (3, 12, 9, 0), (1, 12, 11, 0), (2, 5, 9, 6)])
@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("rule", [*RULES, *UNKNOWN])
def test_rules_of_transformers_are_kept_to_the_pair(
    rule: str, padding: str, place: tuple[int, int, int, int]
) -> None:
    queries, keys, q_offset, kv_offset = place
    rules = {**RULES, **UNKNOWN}
    keys_at = {"kv_length": keys, "kv_offset": kv_offset}
    where = {"q_length": queries, "q_offset": q_offset, **keys_at}
    theirs = where
    if "q_length" not in inspect.signature(sdpa_mask).parameters:  # before transformers 5.4
        theirs = {"cache_position": torch.arange(queries) + q_offset, **keys_at}
    wanted = sdpa_mask(
        batch_size=B,
        mask_function=rules[rule],
        attention_mask=PADDING[padding],
        allow_is_causal_skip=False,
        **theirs,
    )
    found = made(rules[rule], PADDING[padding], **where)
    assert found.shape == (B, 1, queries, keys)
    assert torch.equal(found.seen(), wanted.expand(B, 1, queries, keys))
    if rule in RULES and padding != "inside":
        assert found.mask.pieces > 0


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("rule", RULES)
def test_the_signature_before_transformers_5_4_gives_the_same_mask(rule: str, padding: str) -> None:
    now = made(RULES[rule], PADDING[padding], q_length=3, kv_length=12, q_offset=9)
    before = made(RULES[rule], PADDING[padding], cache_position=torch.arange(9, 12), kv_length=12)
    assert torch.equal(before.written_out(), now.written_out())


@pytest.mark.parametrize("rule", RULES)
def test_known_rules_look_at_no_pair(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(**_: Any) -> Tensor:
        raise AssertionError("a pair was looked at")

    monkeypatch.setattr(masking_utils, "sdpa_mask", looked)
    made(RULES[rule], PADDING["left"], q_length=N, kv_length=N, q_offset=0)


def test_plain_rules_have_plain_names() -> None:
    place = {"q_length": N, "kv_length": N, "q_offset": 0}
    assert repr(made(RULES["causal"], None, **place).mask) == "causal(offset=0)"
    window = repr(made(RULES["window"], None, **place).mask)
    assert window == "(causal(offset=0) & window(3, offset=0))"
    if "bidirectional" in RULES:
        assert repr(made(RULES["bidirectional"], None, **place).mask) == "lengths(12)"


def test_a_long_sequence_takes_memory_for_its_rows_only() -> None:
    n = 100_000  # a mask of all pairs would take 10 GB
    padding = torch.arange(n) >= torch.tensor([[0], [n // 2]])
    found = made(RULES["window"], padding, q_length=n, kv_length=n, q_offset=0)
    assert isinstance(found.mask, PlacedIntervals)
    assert found.mask.start(Place(B, 1, n, n)).flatten().tolist() == [0, n // 2]


@given(st.data())
def test_any_intervals_are_found_in_a_tensor(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    bound = st.lists(st.integers(0, keys), min_size=queries, max_size=queries)
    first, last = torch.tensor(data.draw(bound)), torch.tensor(data.draw(bound))
    column = torch.arange(keys)
    seen = (column >= first[:, None]) & (column < last[:, None])
    found = read_mask(seen)
    assert found.pieces > 0
    place = Place(1, 1, queries, keys, offset=keys - queries)
    assert torch.equal(found.to_dense(place).expand(1, 1, queries, keys)[0, 0], seen)


@given(st.lists(st.booleans(), min_size=12, max_size=12))
def test_any_tensor_is_read_exactly(bits: list[bool]) -> None:
    seen = torch.tensor(bits).reshape(3, 4)
    found = read_mask(seen, stands=False)
    place = Place(1, 1, 3, 4, offset=1)
    assert torch.equal(found.to_dense(place).expand(1, 1, 3, 4)[0, 0], seen)


def test_where_queries_stand_in_a_static_cache_is_read_from_the_mask() -> None:
    seen = torch.arange(20) <= torch.arange(3)[:, None] + 6
    assert read_mask(seen).alignment(Place(1, 1, 3, 20, offset=17)) == 6
    assert read_mask(seen, stands=False).alignment(Place(1, 1, 3, 20, offset=17)) is None


@pytest.mark.parametrize("hides", [False, True])
def test_a_window_of_others_counts_to_both_sides_unless_it_hides_later_keys(hides: bool) -> None:
    away = torch.arange(9) - torch.arange(5)[:, None] - 2
    seen = (away.abs() < 3) & ((away <= 0) | (not hides))
    found = band(hides, 2, 3)
    assert found is not None
    assert torch.equal(found.to_dense(Place(1, 1, 5, 9, offset=4))[0, 0], seen)


def test_rows_that_do_not_step_from_key_to_key_stand_nowhere() -> None:
    seen = torch.arange(20) <= torch.tensor([[6], [9], [8]])
    assert read_mask(seen).alignment(Place(1, 1, 3, 20, offset=17)) is None


@pytest.mark.parametrize(("last", "stands"), [([4, 5, 6], 4), ([4, 5, 5], 17), ([4, 6, 7], 17)])
def test_compiled_code_finds_where_queries_stand_without_looking(
    last: list[int], stands: int
) -> None:
    seen = torch.arange(20) <= torch.tensor(last)[:, None]
    mask, _ = traced_mask(seen, 3)
    found = mask.alignment(Place(1, 1, 3, 20, offset=17))
    assert isinstance(found, torch.Tensor)
    assert found.tolist() == [stands]


def test_what_is_added_is_split_into_mask_and_bias() -> None:
    lowest = torch.finfo(torch.bfloat16).min
    seen, bias = split_mask(torch.tensor([[0.0, lowest], [0.5, -torch.inf]], dtype=torch.bfloat16))
    assert seen is not None
    assert bias is not None
    assert seen.tolist() == [[True, False], [True, False]]
    assert bias.tolist() == [[0.0, 0.0], [0.5, 0.0]]
    seen, bias = split_mask(torch.tensor([[-1e4, 0.0], [-1e9, -9e3]]))  # as people write it by hand
    assert seen is not None
    assert bias is not None
    assert seen.tolist() == [[False, True], [False, True]]
    assert bias.tolist() == [[0.0, 0.0], [0.0, -9e3]]
    assert split_mask(torch.zeros(2, 2)) == (None, None)


def test_a_mask_is_read_once_for_all_layers_and_again_when_it_changed() -> None:
    memory, mask, asked = MaskMemo(), torch.ones(3, 3).bool(), []
    for _ in range(3):
        memory.recall(lambda: asked.append("made") or hw.mask.causal(), mask)
    assert len(asked) == 1
    mask[0, 1] = False
    memory.recall(lambda: asked.append("made") or hw.mask.causal(), mask)
    memory.recall(lambda: asked.append("made") or hw.mask.causal(), mask, "otherwise")
    assert len(asked) == 3


def test_rules_of_flex_attention_are_asked_a_few_rows_at_a_time() -> None:
    device = torch.device("cpu")
    window = by_rows(lambda b, h, i, j: (j <= i) & (j > i - 3), (1, 1, 9, 9), device, True, None)
    assert repr(window) == "(causal(offset=0) & window(2, offset=0))"
    holes = by_rows(lambda b, h, i, j: j % 2 == h, (1, 2, 4, 4), device, True, None)
    assert isinstance(holes, Dense)


def test_a_mask_in_the_dress_of_a_tensor_survives_what_models_do_with_one() -> None:
    given = made(RULES["window"], PADDING["left"], q_length=N, kv_length=N, q_offset=0)
    plain = torch.zeros(B, 1, N, N).masked_fill(~given.seen(), torch.finfo(torch.float32).min)
    assert given.contiguous() is given
    assert given.ndim == len(given.shape) == given.dim() == 4
    assert isinstance(given.to("cpu"), MaskTensor)
    half = given.to(torch.float16)
    assert isinstance(half, MaskTensor)
    assert torch.equal(half + 0, torch.zeros(()).half().masked_fill(~given.seen(), -65504.0))
    assert torch.equal(given[:, :, :, :5] + 0, plain[:, :, :, :5])
    assert torch.equal(torch.where(given < 0, 0.0, -1.0), torch.where(plain < 0, 0.0, -1.0))
    assert torch.equal(-given, -plain)
    assert given.dtype == torch.float32
    assert given.device == plain.device


def test_nothing_is_remembered_of_tensors_that_are_gone_or_do_not_count_their_changes() -> None:
    memory, mask = MaskMemo(), torch.ones(3, 3).bool()
    made = read_mask(mask.detach())
    memory.recall(lambda: made, mask)
    assert len(memory._made) == 1
    del mask
    assert memory._made == []
    with torch.inference_mode():
        uncounted = torch.zeros(2)
        found = [memory.recall(lambda: float(uncounted.sum()), uncounted)]
        uncounted.add_(1)
        found.append(memory.recall(lambda: float(uncounted.sum()), uncounted))
    assert found == [0.0, 2.0]
