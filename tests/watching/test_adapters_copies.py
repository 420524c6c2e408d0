"""Watched models that are copied, saved, run by other threads, and in inference mode."""

from __future__ import annotations

import copy
import io
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from tests.watching.foreign import N, inputs, model_of


class Foreign(nn.Module):
    """Somebody's attention by PyTorch's function."""

    def forward(self, x: Tensor, keys: Tensor | None = None, **options: Any) -> Tensor:
        k = x if keys is None else keys
        return F.scaled_dot_product_attention(x, k, k, **options)


@pytest.mark.parametrize("which", ["ours", "gpt2", "llama", "bloom"])
@pytest.mark.parametrize("way", [copy.deepcopy])
def test_a_copy_of_a_watched_model_is_free_and_computes_the_same(which: str, way: Any) -> None:
    if which == "ours":
        gpt = hw.load("gpt")
        model, given = gpt.model, {"ids": gpt.encode("to be or not to be")}
    else:
        model, given = model_of(which), inputs(which, "right")

    def run(of: Any) -> Tensor:
        out = of(*given.values()) if which == "ours" else of(**given).logits
        return torch.as_tensor(out)

    with torch.no_grad():
        before = run(model)
        with hw.watch(model) as seen:
            run(model)
            rows = [int(layer.counted()[0]) for layer in seen.layers]
            copied = way(model)
            assert torch.equal(run(copied), before)
            assert [int(layer.counted()[0]) for layer in seen.layers] == rows
        assert torch.equal(run(copied), before)
        with hw.watch(copied) as again:
            run(copied)
    assert len(again.layers) == len(seen.layers) > 0


@pytest.mark.parametrize("family", ["gpt2", "bloom"])
def test_parts_of_a_watched_model_are_saved_without_its_watch(family: str) -> None:
    model, file = model_of(family), io.BytesIO()
    with hw.watch(model):
        torch.save(model.transformer, file)
    file.seek(0)
    part, ids = torch.load(file, weights_only=False), inputs(family, "whole")["input_ids"]
    with torch.no_grad():
        assert torch.equal(part(ids)[0], model.transformer(ids)[0])
    assert not any(module._forward_hooks for module in part.modules())


def test_a_forward_that_someone_wrapped_goes_on_through_the_wrapping() -> None:
    model, x = hw.nn.MultiHeadAttention(16, 4), torch.randn(1, 5, 16)
    plain = model(x)

    def doubled(*given: Any, **options: Any) -> Tensor:
        return 2 * type(model).forward(model, *given, **options)

    model.forward = doubled
    with hw.watch(model) as seen:
        torch.testing.assert_close(model(x), 2 * plain)
    assert model.__dict__["forward"] is doubled
    assert len(seen.layers) == 1


@pytest.mark.parametrize("model", [Foreign(), nn.MultiheadAttention(8, 2)], ids=["module", "torch"])
def test_a_watch_follows_the_thread_that_attached_it(model: nn.Module) -> None:
    x, said = torch.randn(1, 2, 5, 8), []
    given = (x,) if isinstance(model, Foreign) else (x[0],) * 3

    def run() -> None:
        try:
            model(*given)
        except ValueError as error:
            said.append((str(error), torch._C._len_torch_function_stack()))

    with hw.watch(model) as seen:
        threads = [threading.Thread(target=run) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        model(*given)
    assert len(said) == 3
    assert all("follows that thread alone" in text and left == 0 for text, left in said)
    assert len(seen.layers) == 1


def test_inference_mode_is_watched_with_masks() -> None:
    model, given = model_of("llama"), inputs("llama", "left")
    with torch.no_grad(), hw.watch(model) as wanted:
        model(**given)
    with torch.inference_mode(), hw.watch(model) as seen:
        model(**inputs("llama", "left"))
    for ours, theirs in zip(seen.layers, wanted.layers, strict=True):
        assert torch.equal(ours.observation.entropy, theirs.observation.entropy)
        assert torch.equal(ours.padding, theirs.padding)
    foreign = Foreign()
    with torch.inference_mode(), hw.watch(foreign) as alone:
        mask = torch.ones(N, N).tril().bool()
        foreign(torch.randn(1, 2, N, 8), attn_mask=mask)
    assert repr(alone.layers[0].last.call.mask) == "causal(offset=0)"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 3, 7, 9])
def test_queries_of_another_number_look_across(queries: int, masked: bool) -> None:
    kind = "cross" if queries in (3, 9) else "self"  # one alone may be the next token
    model, keys = Foreign(), torch.randn(2, 4, 7, 8)
    options = {"attn_mask": (torch.arange(7) < 5).expand(2, 1, 1, 7)} if masked else {}
    with hw.watch(model) as seen:
        model(torch.randn(2, 4, queries, 8), keys, **options)
    assert seen.layers[0].kind == kind


def test_a_part_of_a_sequence_looks_across_in_multihead_attention() -> None:
    attention, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 7, 8)
    for query, kind in ((x[:, :1], "cross"), (x[:, 2:], "cross"), (x, "self"), (x[:], "self")):
        with hw.watch(attention) as seen:
            attention(query, x, x)
        assert seen.layers[0].kind == kind
