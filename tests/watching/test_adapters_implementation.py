"""attn_implementation="headwise": transformers' models on our engines, watched in the same pass."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BigBirdPegasusConfig,
    BigBirdPegasusModel,
    LlamaConfig,
)

import headwise as hw
import headwise.transformers
from headwise.watching.adapters import implementation as ours
from headwise.watching.adapters.mask_tensor import MaskTensor, UnwrittenMask
from headwise.watching.adapters.traced_rules import TracedRule
from tests.watching.foreign import B, N, implementation, inputs, model_of


def test_watching_needs_no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import of it would fail
    x = torch.randn(3, 8)
    with hw.watch(attention := torch.nn.MultiheadAttention(8, 2)) as seen:
        attention(x, x, x)
    assert len(seen.layers) == 1


def test_models_are_made_and_saved_and_loaded_with_it(tmp_path: object) -> None:
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=48,
        vocab_size=99,
    )
    made = AutoModelForCausalLM.from_config(config).eval()
    made.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="headwise").eval()
    given = inputs("llama", "left")
    rows = given["attention_mask"].bool()
    with torch.no_grad():
        ours_, theirs = model(**given).logits, made(**given).logits
    torch.testing.assert_close(ours_[rows], theirs[rows], rtol=1e-4, atol=1e-5)


def test_a_model_that_adds_the_mask_itself_hides_what_is_hidden() -> None:
    config = BigBirdPegasusConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=99,
        attention_type="original_full",
        attn_implementation="eager",
    )
    model, given = BigBirdPegasusModel(config).eval(), inputs("llama", "right")
    states = {}
    for attention in ("eager", "headwise"):
        with implementation(model, attention), torch.no_grad():
            states[attention] = model.get_encoder()(**given)[0][given["attention_mask"].bool()]
    torch.testing.assert_close(states["headwise"], states["eager"])


ADDED: list[Callable[[Tensor, Any], Tensor]] = [
    lambda s, m: s + m,
    lambda s, m: m + s,
    lambda s, m: s.add(m),
    lambda s, m: s + m[:, :, :, :3],
    lambda s, m: s + m.to(s.dtype),
    lambda s, m: s + m[:, :, :, :3].expand(2, 4, 3, 3),
]  # fmt: skip


@pytest.mark.parametrize("way", ADDED)
def test_a_mask_that_is_added_hides(way: Any) -> None:
    seen, scores, device = torch.ones(2, 1, 3, 3).tril().bool(), torch.randn(2, 4, 3, 3), "cpu"
    mask = MaskTensor(hw.mask.causal(), (2, 1, 3, 3), torch.device(device))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(scores: Tensor, seen: Tensor) -> Tensor:
        causal, place = TracedRule(None, 1, None), (torch.device(device), torch.float32)
        mask = UnwrittenMask(causal, 0, (2, 1, 3, 3), None, lambda: seen, *place)
        assert mask.to(device).contiguous() is mask
        added: Tensor = way(scores, mask)
        return added

    for added in (way(scores, mask), compiled(scores, seen)):
        assert torch.equal(added.softmax(-1) > 0, seen.expand(2, 4, 3, 3))


def test_a_mask_is_longer_by_what_a_model_joins_to_it() -> None:
    mask = MaskTensor(hw.mask.causal(), (2, 1, 3, 3), torch.device("cpu"))
    more = torch.tensor([0.0, -torch.inf]).expand(2, 1, 3, 2)
    p = torch.cat([mask, more.to(mask.dtype)], -1).softmax(-1)
    seen = torch.cat([torch.ones(3, 3).tril(), torch.tensor([[1, 0]]).expand(3, 2)], -1).bool()
    assert torch.equal(p > 0, seen.expand(2, 1, 3, 5))


def test_without_a_mask_every_key_is_seen_whatever_the_module_says() -> None:
    module, x = torch.nn.Identity(), torch.randn(2, 4, 5, 8)
    module.is_causal = True
    out, _ = ours.attend(module, x, x, x, None)
    torch.testing.assert_close(out.transpose(1, 2), hw.attention(x, x, x))


def test_a_mask_of_other_keys_is_refused() -> None:
    mask, x = (
        MaskTensor(hw.mask.causal(), (2, 1, 5, 5), torch.device("cpu")),
        torch.randn(2, 4, 5, 8),
    )
    longer = torch.cat([x, x], 2)
    with pytest.raises(ValueError, match=r"mask is of 5 keys, and its attention has 10.*'eager'"):
        ours.attend(torch.nn.Identity(), x, longer, longer, mask)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt_oss", "gemma2"])
def test_gradients_are_those_of_eager_attention(family: str) -> None:
    grads = {}
    for attention in ("eager", "headwise"):
        model = copy.deepcopy(model_of(family))
        given = inputs(family, "right")
        with implementation(model, attention):
            out = model(**given)[0][given["attention_mask"].bool()]
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            (out * weights).sum().backward()
        grads[attention] = [p.grad for p in model.parameters() if p.grad is not None]
    largest = max(float(grad.abs().max()) for grad in grads["eager"])
    for theirs, found in zip(grads["eager"], grads["headwise"], strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-5 * largest)


def test_watched_it_is_observed_in_the_pass_that_computes_it() -> None:
    model, given = model_of("llama"), inputs("llama", "right")
    calls: list[str] = []
    with implementation(model, "headwise"), hw.watch(model) as seen:
        recorder, inside = seen._recorder, seen._recorder.inside
        recorder.inside = lambda *a, **k: (calls.append(a[0]), inside(*a, **k))[1]
        model(**given)
    assert calls == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert len(seen.layers) == 2


# transformers 4 warns for every implementation that it does not know, and asks for them anyway.
@pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supported:UserWarning")
def test_output_attentions_are_the_weights() -> None:
    model, given = model_of("llama"), inputs("llama", "right")
    with torch.no_grad():
        theirs = model(**given, output_attentions=True).attentions
        with implementation(model, "headwise"):
            found = model(**given, output_attentions=True).attentions
    rows = given["attention_mask"].bool()[:, None].expand(-1, 4, -1)
    assert len(found) == 2
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a[rows], b[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.output_attentions=True. is not supported:UserWarning")
def test_more_weights_than_anyone_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "WEIGHTS", 100)
    model, given = copy.deepcopy(model_of("llama")), inputs("llama", "whole")
    with (
        implementation(model, "headwise"),
        pytest.raises(ValueError, match=r"asks for \(3, 4, 9, 9\) weights.*seen.map"),
    ):
        model(**given, output_attentions=True)


def test_dropout_drops_in_training_and_statistics_stay() -> None:
    model = copy.deepcopy(model_of("bert"))
    given = inputs("bert", "right")
    for layer in model.encoder.layer:
        layer.attention.self.dropout.p = 0.5
    with implementation(model, "headwise"), torch.no_grad():
        still = model(**given)[0]
        with hw.watch(model) as quiet:
            model(**given)
        model.train()
        torch.manual_seed(0)
        with hw.watch(model) as seen:
            dropped = model(**given)[0]
    assert not torch.allclose(dropped, still)
    assert seen.layers[0].observation.entropy.shape == (B, 4, N)
    assert quiet.layers[0].observation.sees.all()
