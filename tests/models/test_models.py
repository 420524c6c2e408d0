"""Whole models: the published sizes, the published architectures, and configurations that last."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import (
    GPT,
    LSTM,
    Bert,
    BertConfig,
    Conv,
    ConvConfig,
    FixedGPT,
    FixedGPTConfig,
    GPTConfig,
    LSTMConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)
from headwise.models.config import Config
from tests.thinned import thinned

SMALL: dict[str, tuple[type[nn.Module], Config]] = {
    "gpt": (
        GPT,
        GPTConfig(
            30,
            d_model=32,
            layers=2,
            heads=4,
            feed_forward=hw.nn.SwiGLU(40),
            position=hw.nn.Rotary(scaling=hw.nn.YaRN(4.0, 64)),
            score=hw.Dot(scale=0.3),
        ),
    ),
    "transformer": (
        Transformer,
        TransformerConfig(
            30,
            d_model=32,
            encoder_layers=1,
            decoder_layers=1,
            heads=4,
            score=hw.nn.Additive(),
            arrangement=hw.nn.PreNorm(),
            projections=hw.nn.Shared(),
        ),
    ),
    "bert": (Bert, BertConfig(30, 16, d_model=32, layers=2, heads=4)),
    "vit": (ViT, ViTConfig(8, 4, d_model=32, layers=2, heads=4)),
    "lstm": (LSTM, LSTMConfig(30, 32, attention=hw.nn.Bahdanau(8))),
    "conv": (Conv, ConvConfig(30, 32, 3, growth=2)),
    "fixed": (FixedGPT, FixedGPTConfig(30, 16, d_model=32, layers=2, heads=4)),
}
every_model = pytest.mark.parametrize("name", SMALL)


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def built(model: type[nn.Module], config: Config) -> int:
    with torch.device("meta"):
        return parameters(model(config))


def inputs(name: str) -> tuple[Tensor, ...]:
    if name == "vit":
        return (torch.randn(2, 3, 8, 8),)
    tokens = torch.randint(30, (2, 10))
    return (tokens, tokens[:, :7]) if name in ("transformer", "lstm") else (tokens,)


def test_the_2017_base_model_has_63_million_parameters() -> None:
    layer, feed = 4 * 512**2 + 4 * 512, 2 * 512 * 2048 + 2048 + 512
    encoder, decoder = layer + feed + 4 * 512, 2 * layer + feed + 6 * 512
    expected = 37000 * 512 + 6 * (encoder + decoder)
    count = built(Transformer, TransformerConfig(37000))
    assert count == expected == 63_082_496
    assert f"{count / 1e6:.1f}" == "63.1"


def test_published_models_have_their_published_sizes() -> None:
    gpt2 = GPTConfig(
        50257,
        1024,
        d_model=768,
        layers=12,
        heads=12,
        position=hw.nn.Learned(1024),
        feed_forward=hw.nn.GELU(3072, "tanh"),
        norm=hw.nn.LayerNorm(),
        bias=True,
    )
    assert built(GPT, gpt2) == 124_439_808
    assert built(Bert, BertConfig()) == 109_514_298  # with its masked-word head, without pooler
    wide = {"d_model": 768, "layers": 12, "heads": 12, "feed_forward": hw.nn.GELU(3072)}
    assert built(ViT, ViTConfig(224, 16, classes=1000, **wide)) == 86_567_656


def test_a_gpt2_layer_has_12_h_squared_and_13_h() -> None:
    for h in (64, 96):
        config = GPTConfig(
            10,
            d_model=h,
            layers=1,
            heads=4,
            position=None,
            bias=True,
            norm=hw.nn.LayerNorm(),
            feed_forward=hw.nn.GELU(4 * h),
        )
        assert parameters(config.block()) == 12 * h**2 + 13 * h


def test_the_alternatives_have_the_sizes_of_their_formulas() -> None:
    d, v, n, h = 32, 30, 16, 4
    conv = v * d + 3 * (2 * d * d * 3 + 2 * d + 2 * d) + 2 * d
    assert built(Conv, ConvConfig(v, d, 3, kernel=3)) == conv
    reader = 2 * (4 * (d // 2) * (d + d // 2) + 8 * (d // 2))
    bare = v * d + reader + 2 * (d * d + d) + 4 * d * (d + d) + 8 * d + 2 * d * d + d
    assert built(LSTM, LSTMConfig(v, d, attention=None)) == bare
    attending = bare + (d * 8 + d * 8 + 8) + 4 * d * d + d * d  # score, wider writer and readout
    assert built(LSTM, LSTMConfig(v, d, attention=hw.nn.Bahdanau(8))) == attending
    fixed = v * d + (2 * d**2 + h * n**2 + 3 * d * 40 + 2 * d) + d
    config = FixedGPTConfig(v, n, d_model=d, layers=1, heads=h, feed_forward=hw.nn.SwiGLU(40))
    assert built(FixedGPT, config) == fixed


@every_model
def test_configurations_survive_json(name: str) -> None:
    _, config = SMALL[name]
    written = json.loads(json.dumps(config.to_dict()))
    assert type(config).from_dict(written) == config


def test_a_configuration_names_unknown_fields() -> None:
    with pytest.raises(ValueError, match="GPTConfig has no field depth; it has attention_dropout"):
        GPTConfig.from_dict({"vocabulary": 10, "depth": 3})
    with pytest.raises(ValueError, match="unknown type 'Spiral' in a configuration"):
        GPTConfig.from_dict({"vocabulary": 10, "position": {"type": "Spiral"}})
    with pytest.raises(ValueError, match="Rotary has no field speed"):
        GPTConfig.from_dict({"vocabulary": 10, "position": {"type": "Rotary", "speed": 2}})


@every_model
def test_a_state_dict_loads_into_a_model_of_the_same_configuration(name: str) -> None:
    kind, config = SMALL[name]
    model, other = kind(config).eval(), kind(type(config).from_dict(config.to_dict())).eval()
    other.load_state_dict(model.state_dict())
    given = inputs(name)
    assert torch.equal(model(*given), other(*given))


@every_model
def test_every_parameter_learns(name: str) -> None:
    kind, config = SMALL[name]
    model = kind(config)
    logits = model(*inputs(name))
    (logits.log_softmax(-1)[..., 0].mean() + logits.square().mean()).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize("name", ["gpt", "conv", "fixed"])
def test_a_language_model_does_not_see_what_comes(name: str) -> None:
    kind, config = SMALL[name]
    model = kind(config).eval()
    tokens = torch.randint(30, (2, 10))
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 30
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:])


@pytest.mark.parametrize("name", ["transformer", "lstm"])
def test_a_translator_sees_all_of_the_source_and_none_of_the_coming_target(name: str) -> None:
    kind, config = SMALL[name]
    model = kind(config).eval()
    source, target = torch.randint(3, 30, (2, 8)), torch.randint(3, 30, (2, 6))
    later = target.clone()
    later[:, 4:] = (later[:, 4:] + 1) % 30
    torch.testing.assert_close(model(source, later)[:, :4], model(source, target)[:, :4])
    lengths = torch.tensor([8, 5])
    padded = source.clone()
    padded[1, 5:] = 0
    expected = model(source, target, lengths)
    torch.testing.assert_close(model(padded, target, lengths), expected)
    torch.testing.assert_close(
        model(source[1:, :5], target[1:]), expected[1:], rtol=1e-4, atol=1e-5
    )


def test_bert_leaves_padding_out() -> None:
    kind, config = SMALL["bert"]
    model, tokens = kind(config).eval(), torch.randint(30, (2, 10))
    out = model(tokens, lengths=torch.tensor([10, 6]))
    torch.testing.assert_close(out[1:, :6], model(tokens[1:, :6]), rtol=1e-4, atol=1e-5)


def test_packed_documents_equal_documents_alone() -> None:
    kind, config = SMALL["gpt"]
    model, tokens = kind(config).eval(), torch.randint(30, (1, 10))
    packed = model(tokens, mask=hw.mask.documents(torch.tensor([[0] * 4 + [1] * 6])))
    apart = torch.cat((model(tokens[:, :4]), model(tokens[:, 4:])), 1)
    torch.testing.assert_close(packed, apart, rtol=1e-4, atol=1e-5)


def test_a_convolution_reaches_as_far_as_it_says() -> None:
    for config in (ConvConfig(30, 16, 3, 3), ConvConfig(30, 16, 3, 2, growth=2)):
        model = Conv(config).eval()
        tokens = torch.arange(20)[None]  # each once, so that a row of the table is a position
        (grad,) = torch.autograd.grad(model(tokens)[0, -1, 25], model.embedding.weight)
        grad = grad[None, :20]
        reached = (grad[0].abs().sum(-1) > 0).nonzero().flatten().tolist()
        assert reached == list(range(20 - config.reach, 20))


COMPILED: dict[str, dict[str, Any]] = {"gpt": {}, "bert": {}, "vit": {}, "transformer": {}}


@pytest.mark.parametrize("name", thinned(COMPILED))
def test_a_compiled_model_equals_the_eager_one(name: str) -> None:
    torch._dynamo.reset()
    kind, config = SMALL[name]
    model, given = kind(config).eval(), inputs(name)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*given), model(*given), rtol=1e-4, atol=1e-5)


def test_inputs_that_do_not_fit_are_refused() -> None:
    bert, vit = SMALL["bert"][0](SMALL["bert"][1]), SMALL["vit"][0](SMALL["vit"][1])
    with pytest.raises(ValueError, match=r"17 tokens are more than .*context=16"):
        bert(torch.randint(30, (1, 17)))
    with pytest.raises(ValueError, match=r"\(batch, 3, 8, 8\), not float32 \(2, 3, 9, 9\)"):
        vit(torch.randn(2, 3, 9, 9))
    with pytest.raises(ValueError, match="does not divide into patches of patch=5"):
        ViTConfig(image=32, patch=5)
    with pytest.raises(ValueError, match="d_model=7 must be even"):
        LSTMConfig(30, 7)
    with pytest.raises(ValueError, match="does not divide into 5 heads"):
        GPT(GPTConfig(30, d_model=32, heads=5))
