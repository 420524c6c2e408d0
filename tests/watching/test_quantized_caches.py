"""Caches that round keys and values: figures and maps are those of the weights that were used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache, cache_utils

import headwise as hw
import headwise.transformers
from tests.watching.foreign import implementation, model_of

PROMPT, NEW = torch.arange(3, 13)[None], 6
OPTIONS = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


def rounded(x: Tensor, levels: int = 3) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-9) / levels
    return (x / scale).round() * scale


class Rounding(DynamicCache):
    """Rounds what it stores: a token is seen as it is once, and rounded from then on."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **options: Any) -> Any:
        found = super().update(keys, values, layer, *more, **options)
        stored = self.layers[layer]
        stored.keys, stored.values = rounded(stored.keys), rounded(stored.values)
        return found


class LateRounding(DynamicCache):
    """Keeps the last three tokens as they are, and rounds those before them."""

    def update(self, keys: Tensor, values: Tensor, layer: int, *more: Any, **options: Any) -> Any:
        found = super().update(keys, values, layer, *more, **options)
        stored = self.layers[layer]
        for name in ("keys", "values"):
            held = getattr(stored, name)
            setattr(stored, name, torch.cat((rounded(held[:, :, :-3]), held[:, :, -3:]), 2))
        return found


def quantized(backend: str, package: str | None = None, **options: Any) -> Callable[[Any], Any]:
    def made(model: Any) -> Any:
        if package is not None:
            pytest.importorskip(package)
        try:
            return cache_utils.QuantizedCache(backend, model.config, **options)
        except ValueError as error:  # of a transformers that does not have it yet
            pytest.skip(str(error))

    return made


SMALL = {"nbits": 4, "q_group_size": 8, "residual_length": 4}
CACHES: dict[str, Callable[[Any], Any]] = {
    "rounding": lambda model: Rounding(config=model.config),
    "late rounding": lambda model: LateRounding(config=model.config),
    "fp8": quantized("fp8"),
    "quanto": quantized("quanto", "optimum.quanto", **SMALL),
    "hqq": quantized("hqq", "hqq", axis_key=1, axis_value=1, **SMALL),
}


def used(model: Any, cache: str) -> tuple[Tensor, list[Tensor]]:
    """The tokens, and the weights (1, H, N, M) that each layer used, by the eager function."""
    with torch.no_grad():
        made = model.generate(
            PROMPT, past_key_values=CACHES[cache](model), output_attentions=True,
            return_dict_in_generate=True, **OPTIONS,
        )  # fmt: skip
    layers = list(zip(*made.attentions, strict=True))
    keys = layers[0][-1].shape[-1]
    return made.sequences, [
        torch.cat([F.pad(x, (0, keys - x.shape[-1])) for x in steps], 2) for steps in layers
    ]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "headwise"])
@pytest.mark.parametrize(
    ("cache", "family"), [*((cache, "llama") for cache in CACHES), ("rounding", "gpt2")]
)
def test_figures_are_those_of_the_weights_that_were_used(
    cache: str, family: str, attention: str
) -> None:
    model = model_of(family)
    tokens, truth = used(model, cache)
    with implementation(model, attention), torch.no_grad(), hw.watch(model) as seen:
        found = model.generate(PROMPT, past_key_values=CACHES[cache](model), **OPTIONS)
    assert torch.equal(found, tokens)
    assert not seen.unread
    for layer, weights in zip(seen.layers, truth, strict=True):
        entropy = torch.special.entr(weights).sum(-1)
        found = layer.observation
        torch.testing.assert_close(found.entropy, entropy, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.top_prob, weights.amax(-1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.sink_mass, weights[..., 0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="a cache forgot or rounded them"):  # no one has them now
        seen.map(0, 0)


@pytest.mark.parametrize("attention", ["eager", "sdpa", "headwise"])
@pytest.mark.parametrize("cache", CACHES)
def test_the_map_of_a_step_has_the_weights_that_were_used(cache: str, attention: str) -> None:
    model = model_of("llama")
    tokens, truth = used(model, cache)
    held = CACHES[cache](model)
    with implementation(model, attention), torch.no_grad():
        for at in range(PROMPT.shape[1] - 1, tokens.shape[1] - 1):
            first = at == PROMPT.shape[1] - 1
            given = tokens[:, : at + 1] if first else tokens[:, at : at + 1]
            with hw.watch(model) as seen:
                model(given, past_key_values=held)
            for layer, weights in enumerate(truth):
                row = torch.cat([seen.map(layer, head)[0, 0, -1] for head in range(4)])
                expected = weights[0, :, at, : at + 1].flatten()
                torch.testing.assert_close(row.flatten(), expected, rtol=1e-4, atol=1e-5)


def test_the_cache_of_headwise_keeps_its_maps() -> None:
    """It rounds a token once, when it is written, so that every row has seen the same keys."""
    torch.manual_seed(0)
    attn = hw.nn.MultiHeadAttention(32, 4, kv_heads=2, mask=hw.mask.causal())
    x, cache = torch.randn(1, 9, 32), hw.nn.Int8Cache()
    with torch.no_grad(), hw.watch(attn) as seen:
        for part in x.split([5, 1, 2, 1], 1):
            attn(part, cache=cache)
        q = attn.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        truth = hw.attention_map(q, cache.read()[0], mask=hw.mask.causal()).to_tensor()
    plain = hw.attention_map(
        q, attn.key(x).unflatten(-1, (2, 8)).transpose(1, 2), mask=hw.mask.causal()
    ).to_tensor()
    (layer,) = seen.layers
    entropy = torch.special.entr(truth).sum(-1)
    torch.testing.assert_close(layer.observation.entropy, entropy, rtol=1e-4, atol=1e-5)
    found = torch.cat([seen.map(0, head).to_tensor() for head in range(4)], 1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-6)
    assert float((found - plain).detach().abs().max()) > 1e-5
