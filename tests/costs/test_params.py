"""Every parameter of a module counts once, and a configuration has the class that people expect."""

from typing import Any

import pytest
import torch
from torch import nn

import headwise as hw
from tests.costs.families import CONFIGS
from tests.costs.modules import A, H
from tests.thinned import thinned

transformers = pytest.importorskip("transformers")

TORCH: dict[str, Any] = {
    "MultiheadAttention": lambda: nn.MultiheadAttention(H, A),
    "no bias": lambda: nn.MultiheadAttention(H, A, bias=False),
    "added keys": lambda: nn.MultiheadAttention(H, A, add_bias_kv=True),
    "EncoderLayer": lambda: nn.TransformerEncoderLayer(H, A, 64),
    "norm first": lambda: nn.TransformerEncoderLayer(H, A, 64, activation="gelu", norm_first=True),
    "no biases": lambda: nn.TransformerEncoderLayer(H, A, 64, bias=False),
    "DecoderLayer": lambda: nn.TransformerDecoderLayer(H, A, 64),
    "Encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(H, A), 3, nn.LayerNorm(H), enable_nested_tensor=False
    ),
    "Decoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(H, A), 2),
    "Transformer": lambda: nn.Transformer(H, A, 2, 3, 64, batch_first=True),
    "swapped": lambda: hw.nn.swap_attention(nn.TransformerEncoderLayer(H, A, 64)),
    "LayerNorm": lambda: nn.LayerNorm(H),
    "Linear": lambda: nn.Linear(H, 5),
    "Embedding": lambda: nn.Embedding(50, H),
}
PARTS: dict[str, Any] = {
    "additive score": lambda: hw.nn.Additive().build(A, 8),
    "general score": lambda: hw.nn.General().build(A, 8),
    "cosine score": lambda: hw.nn.Cosine().build(A, 8),
    "ALiBi": lambda: hw.nn.ALiBi(learned=True).build(H, A, 8),
    "buckets": lambda: hw.nn.RelativeBuckets().build(H, A, 8),
    "learned positions": lambda: hw.nn.Learned(64).build(H, A, 8),
    "rotary": lambda: hw.nn.Rotary().build(H, A, 8),
    "sinusoidal": lambda: hw.nn.Sinusoidal().build(H, A, 8),
    "ReLU": lambda: hw.nn.ReLU(48).build(H),
    "SwiGLU": lambda: hw.nn.SwiGLU(48).build(H, bias=False),
    "RMSNorm": lambda: hw.nn.RMSNorm().build(H),
    "decoder layer": lambda: hw.models.Transformer(
        hw.models.TransformerConfig(50, d_model=H, encoder_layers=1, decoder_layers=1, heads=A)
    ).decoder[0],
    "LSTM": lambda: hw.models.LSTM(hw.models.LSTMConfig(50, d_model=H)),
    "deep LSTM": lambda: hw.models.LSTM(
        hw.models.LSTMConfig(50, d_model=H, layers=2, attention=None)
    ),
}


def held(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.parametrize("name", [*TORCH, *PARTS])
def test_parameters_of_other_modules(name: str) -> None:
    module = {**TORCH, **PARTS}[name]()
    assert hw.cost(module, queries=8).params == held(module)


def built(name: str) -> Any:
    """The model of a configuration, on the meta device."""
    kind, fields = CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    if kind in ("t5", "mt5", "whisper"):
        factory = transformers.AutoModelForSeq2SeqLM
        factory = factory if kind != "whisper" else transformers.AutoModelForSpeechSeq2Seq
    elif kind in ("bert", "roberta", "xlm-roberta", "distilbert", "vit"):
        factory = transformers.AutoModel
    else:
        factory = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = factory.from_config(config)
    model.tie_weights()
    return model


@pytest.mark.parametrize("name", thinned(CONFIGS))
def test_parameters_of_transformers_models(name: str) -> None:
    model, asked = built(name), {} if name == "ViT" else {"queries": 16}
    assert hw.cost(model, **asked).params == held(model)
    found = hw.cost(model.config, **asked)
    assert found.params == held(model), "a config without a class has that head"


def test_tied_weights_count_once() -> None:
    small = {"num_hidden_layers": 1, "vocab_size": 1000}
    counts = [
        hw.cost({"model_type": "llama", "tie_word_embeddings": tied, **small}).params
        for tied in (True, False)
    ]
    assert counts[1] - counts[0] == 1000 * 4096


def test_a_module_that_was_changed_is_counted_as_it_is() -> None:
    block = hw.nn.Block(H, hw.nn.MultiHeadAttention(H, A), hw.nn.GELU(64).build(H))
    before = hw.cost(block, queries=8)
    block.feed_forward.register_module("adapter", nn.Linear(H, H))
    after = hw.cost(block, queries=8)
    assert after.params - before.params == H * H + H
    assert after.flops - before.flops == 2 * 8 * H * H
    attn = hw.nn.MultiHeadAttention(H, A)
    attn.register_module("adapter", nn.Linear(H, 3))
    assert hw.cost(attn, queries=8).params == held(attn)
    assert hw.cost(attn, queries=8).left_out == ("adapter, which these inputs do not run",)


def test_parts_add_up_to_their_whole() -> None:
    whole = hw.cost(built("Gemma 3").config, batch=2, queries=100)

    def check(cost: hw.Cost) -> None:
        if not cost.parts:
            return
        for name in ("params", "flops", "backward_flops", "activations", "kv_cache", "special"):
            own = sum(line.formula.value * line.times for line in cost.lines if line.figure == name)
            inside = sum(getattr(part, name) for part in cost.parts.values())
            if name in ("backward_flops", "special"):
                assert inside <= getattr(cost, name)
            else:
                assert own + inside == getattr(cost, name)
        for part in cost.parts.values():
            check(part)

    check(whole)
