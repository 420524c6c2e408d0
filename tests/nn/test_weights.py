"""Weights of other libraries give their outputs, in train and eval, with and without padding."""

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import headwise as hw

D, HEADS, B, N = 48, 4, 3, 11
LENGTHS = torch.tensor([11, 4, 7])
MODES = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
PADDED = pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def hidden(padded: bool, causal: bool) -> Tensor:
    """What transformers adds to the logits: (B, 1, N, N), a large negative number where hidden."""
    seen = torch.ones(B, 1, N, N, dtype=torch.bool)
    if causal:
        seen = seen & torch.ones(N, N, dtype=torch.bool).tril()
    if padded:
        seen = seen & (torch.arange(N) < LENGTHS[:, None])[:, None, None]
    return torch.zeros(B, 1, N, N).masked_fill(~seen, torch.finfo(torch.float32).min)


def agree(ours: Tensor, theirs: Tensor, padded: bool) -> None:
    """Equal to float32 rounding, on rows that are not padding."""
    kept = torch.arange(N) < LENGTHS[:, None] if padded else torch.ones(B, N, dtype=torch.bool)
    torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-5, atol=1e-5)


@MODES
@PADDED
@pytest.mark.parametrize("bias", [True, False])
def test_torch_attention_loads_packed(training: bool, padded: bool, bias: bool) -> None:
    theirs = randomised(nn.MultiheadAttention(D, HEADS, bias=bias, batch_first=True)).train(
        training
    )
    ours = hw.nn.MultiHeadAttention(D, HEADS, bias=bias).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D)
    padding = torch.arange(N) >= LENGTHS[:, None] if padded else None
    expected = theirs(x, x, x, key_padding_mask=padding, need_weights=False)[0]
    agree(ours(x, mask=hw.mask.lengths(LENGTHS) if padded else None), expected, padded=False)


def test_torch_attention_loads_with_widths_of_its_own_for_keys_and_values() -> None:
    theirs = randomised(nn.MultiheadAttention(D, HEADS, kdim=20, vdim=28, batch_first=True))
    ours = hw.nn.MultiHeadAttention(D, HEADS, context_dim=(20, 28))
    ours.load_state_dict(theirs.state_dict())
    x, keys, values = torch.randn(B, N, D), torch.randn(B, 6, 20), torch.randn(B, 6, 28)
    torch.testing.assert_close(
        ours(x, keys, values=values), theirs(x, keys, values)[0], rtol=1e-5, atol=1e-5
    )


def test_gradients_of_loaded_weights_are_those_of_torch() -> None:
    theirs = randomised(nn.MultiheadAttention(D, HEADS, batch_first=True)).double()
    ours = hw.nn.MultiHeadAttention(D, HEADS).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D, dtype=torch.float64)
    theirs(x, x, x)[0].square().sum().backward()
    ours(x).square().sum().backward()
    made = torch.cat([module.weight.grad for module in (ours.query, ours.key, ours.value)])
    torch.testing.assert_close(made, theirs.in_proj_weight.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        ours.out.weight.grad, theirs.out_proj.weight.grad, rtol=1e-4, atol=1e-4
    )


@MODES
@PADDED
def test_bert_attention_loads(training: bool, padded: bool) -> None:
    config = BertConfig(
        hidden_size=D,
        num_attention_heads=HEADS,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
        attn_implementation="eager",
    )
    theirs = randomised(BertAttention(config)).train(training)
    ours = hw.nn.MultiHeadAttention(D, HEADS).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D)
    out = theirs.output.dense(theirs.self(x, attention_mask=hidden(padded, causal=False))[0])
    agree(ours(x, mask=hw.mask.lengths(LENGTHS) if padded else None), out, padded)
    block = theirs.output.LayerNorm(ours(x) + x)  # what stands around it, with their norm
    agree(block, theirs(x)[0], padded=False)


@MODES
@PADDED
def test_gpt2_attention_loads(training: bool, padded: bool) -> None:
    config = GPT2Config(
        n_embd=D, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="eager"
    )
    theirs = randomised(GPT2Attention(config, layer_idx=0)).train(training)
    ours = hw.nn.MultiHeadAttention(D, HEADS, mask=hw.mask.causal()).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D)
    out = theirs(x, attention_mask=hidden(padded, causal=True))[0]
    agree(ours(x, mask=hw.mask.lengths(LENGTHS) if padded else None), out, padded)


def test_gpt2_checkpoints_with_their_mask_load() -> None:
    theirs = GPT2Attention(GPT2Config(n_embd=D, n_head=HEADS), layer_idx=0).state_dict()
    old = {**theirs, "bias": torch.ones(1, 1, 8, 8).tril(), "masked_bias": torch.tensor(-1e4)}
    hw.nn.MultiHeadAttention(D, HEADS).load_state_dict(old)


def test_gpt2_cross_attention_loads() -> None:
    config = GPT2Config(n_embd=D, n_head=HEADS, attn_pdrop=0.0, resid_pdrop=0.0)
    theirs = randomised(GPT2Attention(config, is_cross_attention=True, layer_idx=0)).eval()
    ours = hw.nn.MultiHeadAttention(D, HEADS).eval()
    ours.load_state_dict(theirs.state_dict())
    x, context = torch.randn(B, N, D), torch.randn(B, 6, D)
    agree(ours(x, context), theirs(x, encoder_hidden_states=context)[0], padded=False)


LLAMAS = {
    "llama": (LlamaAttention, LlamaConfig, {}, {"bias": False}),
    "qwen2": (Qwen2Attention, Qwen2Config, {}, {"bias": True, "out_bias": False}),
    "qwen3": (
        *(Qwen3Attention, Qwen3Config, {"head_dim": 16}),
        {"bias": False, "head_dim": 16, "qk_norm": hw.nn.RMSNorm()},
    ),
}


@MODES
@PADDED
@pytest.mark.parametrize("family", LLAMAS)
def test_llama_style_attention_loads(family: str, training: bool, padded: bool) -> None:
    attention, config_type, theirs_too, ours_too = LLAMAS[family]
    config = config_type(
        hidden_size=D,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        attn_implementation="eager",
        **theirs_too,
    )
    theirs = randomised(attention(config, layer_idx=0)).train(training)
    ours = hw.nn.MultiHeadAttention(
        D, HEADS, kv_heads=2, mask=hw.mask.causal(), position=hw.nn.Rotary(), **ours_too
    ).train(training)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(B, N, D)
    waves = LlamaRotaryEmbedding(config)(x, torch.arange(N)[None])
    out = theirs(x, position_embeddings=waves, attention_mask=hidden(padded, causal=True))[0]
    agree(ours(x, mask=hw.mask.lengths(LENGTHS) if padded else None), out, padded)


def test_an_adjacent_layout_is_the_half_split_one_with_its_columns_reordered() -> None:
    halves = hw.nn.MultiHeadAttention(D, HEADS, position=hw.nn.Rotary())
    adjacent = hw.nn.MultiHeadAttention(D, HEADS, position=hw.nn.Rotary(layout="adjacent"))
    adjacent.load_state_dict(halves.state_dict())
    width = D // HEADS
    pairs = torch.arange(width).view(2, width // 2).T.flatten()  # 0, w/2, 1, w/2 + 1, ...
    order = (torch.arange(HEADS)[:, None] * width + pairs).flatten()
    with torch.no_grad():
        for module in (adjacent.query, adjacent.key):
            module.weight.copy_(module.weight[order])
            module.bias.copy_(module.bias[order])
    x = torch.randn(B, N, D)
    torch.testing.assert_close(adjacent(x), halves(x), rtol=1e-5, atol=1e-5)


def test_weights_load_deep_inside_a_model() -> None:
    theirs = nn.TransformerEncoderLayer(D, HEADS, batch_first=True)
    ours = copy.deepcopy(theirs)
    ours.self_attn = hw.nn.MultiHeadAttention(D, HEADS)
    ours.load_state_dict(theirs.state_dict())
    made = torch.cat([ours.self_attn.query.weight, ours.self_attn.key.weight])
    torch.testing.assert_close(made, theirs.self_attn.in_proj_weight[: 2 * D])


def test_a_copy_loads_into_itself_and_not_into_its_original() -> None:
    attn = hw.nn.MultiHeadAttention(D, HEADS)
    before = attn.query.weight.clone()
    copied = copy.deepcopy(attn)
    copied.load_state_dict(nn.MultiheadAttention(D, HEADS).state_dict())
    assert torch.equal(attn.query.weight, before)
    assert not torch.equal(copied.query.weight, before)


def test_weights_of_another_architecture_are_refused_by_their_keys() -> None:
    attn = hw.nn.MultiHeadAttention(D, HEADS)
    with pytest.raises(RuntimeError, match=r"(?s)query\.weight.*W_pack\.weight"):
        attn.load_state_dict({"W_pack.weight": torch.zeros(3 * D, D)})
    convolution = nn.Conv1d(D, D, 3).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing key.*query\.weight"):
        attn.load_state_dict(convolution)


def test_packed_weights_of_another_width_are_refused_by_their_shape() -> None:
    theirs = nn.MultiheadAttention(2 * D, HEADS).state_dict()
    with pytest.raises(RuntimeError, match=r"in_proj_weight has shape \(288, 96\).*48 \+ 48 \+ 48"):
        hw.nn.MultiHeadAttention(D, HEADS).load_state_dict(theirs)


def test_separate_queries_and_keys_do_not_load_into_one_matrix() -> None:
    attn = hw.nn.MultiHeadAttention(D, HEADS, projections=hw.nn.Shared())
    with pytest.raises(RuntimeError, match="Shared"):
        attn.load_state_dict(nn.MultiheadAttention(D, HEADS).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*key\.weight"):
        attn.load_state_dict(hw.nn.MultiHeadAttention(D, HEADS).state_dict())
