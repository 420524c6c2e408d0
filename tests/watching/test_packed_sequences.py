"""Sequences packed into a row: every statistic is that of the attention, written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_flash_attention_utils import (
    _is_packed_sequence,
    prepare_fa_kwargs_from_position_ids,
)

import headwise as hw
import headwise.transformers
from tests.watching.foreign import implementation, model_of, written_out

LENGTHS = (4, 1, 6)
TOKENS = sum(LENGTHS)
POSITIONS = torch.cat([torch.arange(n) for n in LENGTHS])[None]
BEGINS = (torch.arange(TOKENS) - POSITIONS)[0]  # the first token of each token's sequence
ENDS = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
PACKED: dict[str, Any] = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS.clone()}
PACKED |= dict.fromkeys(("max_length_q", "max_length_k"), 6)
IDS = torch.arange(TOKENS)[None] * 7 % 90 + 3


def flash(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> Any:
    """Flash attention as transformers calls it for packed sequences, each by PyTorch's kernel."""
    assert attention_mask is None
    if cu_seq_lens_q is None and _is_packed_sequence(position_ids, len(query)):
        (cu_seq_lens_q, _), _ = prepare_fa_kwargs_from_position_ids(position_ids)
    rows, length = query.shape[0], query.shape[2]
    ends = [rows * length] if cu_seq_lens_q is None else cu_seq_lens_q[1:].tolist()
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))  # (tokens, H, D)
    parts, first = [], 0
    for end in ends:
        part = [x[first:end].transpose(0, 1)[None] for x in (q, k, v)]
        i, j = torch.arange(end - first)[:, None], torch.arange(end - first)
        seen = j <= i if sliding_window is None else (j <= i) & (j > i - sliding_window)
        options = {"attn_mask": seen, "scale": scaling, "enable_gqa": True}
        parts.append(nn.functional.scaled_dot_product_attention(*part, **options)[0])
        first = end
    return torch.cat(parts, 1).transpose(0, 1).unflatten(0, (rows, length)), None


@pytest.fixture
def _flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # transformers looks for a package of that name
    lookup = "transformers.modeling_utils.lazy_import_flash_attention"
    monkeypatch.setattr(lookup, lambda *_: None, raising=False)
    AttentionInterface.register("flash_on_cpu", flash)
    theirs = AttentionMaskInterface._global_mapping["flash_attention_2"]
    AttentionMaskInterface.register("flash_on_cpu", theirs)
    yield
    del AttentionInterface._global_mapping["flash_on_cpu"]
    del AttentionMaskInterface._global_mapping["flash_on_cpu"]


def check(seen: hw.Watch, truth: list[Any], begins: Tensor) -> None:
    assert not seen.unread
    for layer, call in zip(seen.layers, truth, strict=True):
        expected = call.statistics(torch.zeros(1), across=False)
        weights = call.weights
        expected["sink_mass"] = weights.gather(-1, begins.expand(weights.shape[:3])[..., None])
        for name, value in expected.items():
            found = layer.observation.values[name]
            torch.testing.assert_close(
                found, value.reshape(found.shape), rtol=1e-4, atol=1e-5, msg=f"{layer.name} {name}"
            )


WAYS = {
    "positions": {"position_ids": POSITIONS},
    "both": {"position_ids": POSITIONS, **PACKED},
    "lengths": PACKED,
}
FAMILIES = ["llama", "mistral", "gemma2", "gpt2"]


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("attention", ["eager", "sdpa", "headwise", "flash_on_cpu"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_are_read_as_they_are_computed(
    family: str, attention: str, way: str
) -> None:
    if family == "gemma2" and attention in ("sdpa", "flash_on_cpu"):
        pytest.skip("it has a cap, which this function would leave out")
    model = model_of(family)
    plain = {"input_ids": IDS, "use_cache": False}
    apart = attention in ("headwise", "flash_on_cpu") or way != "lengths"
    positions = {"position_ids": POSITIONS}
    if apart and way == "lengths" and family == "gpt2":
        pytest.skip("its positions are learned, and would start again in the truth only")
    truth = written_out(model, plain | (positions if apart else {}))
    with implementation(model, attention), torch.no_grad(), hw.watch(model) as seen:
        model(**plain, **WAYS[way])
    check(seen, truth, BEGINS if apart else torch.zeros_like(BEGINS))


@pytest.mark.usefixtures("_flash")
@pytest.mark.parametrize("attention", ["headwise", "flash_on_cpu"])
def test_lengths_of_several_rows(attention: str) -> None:
    """Two rows, the second of which is one sequence."""
    ends = torch.cat((ENDS, ENDS[-1:] + TOKENS))
    given = PACKED | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
    model = model_of("llama")
    with implementation(model, attention), torch.no_grad(), hw.watch(model) as seen:
        model(IDS.repeat(2, 1), use_cache=False, **given)
    rows = (model_of("llama"), {"input_ids": IDS, "use_cache": False})
    for row, positions in enumerate((POSITIONS, torch.arange(TOKENS)[None])):
        truth = written_out(rows[0], rows[1] | {"position_ids": positions})
        for layer, call in zip(seen.layers, truth, strict=True):
            entropy = call.statistics(torch.zeros(1), False)["entropy"][0]
            torch.testing.assert_close(
                layer.observation.entropy[row], entropy, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cu_seq_lens_k": ENDS + 1}, "packed queries and keys are of different lengths"),
        (dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ENDS[:-1]), "have 5 tokens, and it has"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(change: dict[str, Tensor], said: str) -> None:
    model = model_of("llama")
    with implementation(model, "headwise"), pytest.raises(ValueError, match=said):
        model(IDS, use_cache=False, **PACKED | change)


def test_a_sequence_in_two_rows_is_refused() -> None:
    ends = torch.tensor([0, 4, 2 * TOKENS], dtype=torch.int32)
    given = PACKED | dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), ends)
    refused = pytest.raises(ValueError, match="go on from one row of the batch to the next")
    with implementation(model_of("llama"), "headwise") as model, refused:
        model(IDS.repeat(2, 1), use_cache=False, **given)
