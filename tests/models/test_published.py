"""Our models are the published ones: with the same weights they give the same numbers."""

import re

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig as TheirBertConfig
from transformers import (
    BertForMaskedLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    ViTForImageClassification,
)
from transformers import GPT2Config as TheirGPT2Config
from transformers import LlamaConfig as TheirLlamaConfig
from transformers import ViTConfig as TheirViTConfig

import headwise as hw
from headwise.models import (
    GPT,
    Bert,
    BertConfig,
    GPTConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
)

V, D, LAYERS, HEADS, WIDE, B, N = 40, 32, 2, 4, 48, 2, 9
LENGTHS = torch.tensor([9, 5])
SEEN = (torch.arange(N) < LENGTHS[:, None]).long()


def randomised(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


def sizes() -> dict[str, int]:
    """Ours, in the words of transformers' configurations."""
    return {
        "vocab_size": V,
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": WIDE,
    }


def renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    """The state with every pattern of `names` replaced, one after the other."""
    found = {}
    for key, value in state.items():
        for pattern, ours in names.items():
            key = re.sub(pattern, ours, key)
        if key != "tied":  # a second name of the embedding
            found[key] = value
    return found


def same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_gpt_2() -> None:
    shape = {"n_embd": D, "n_layer": LAYERS, "n_head": HEADS, "n_inner": WIDE, "n_positions": 16}
    theirs = randomised(GPT2LMHeadModel(TheirGPT2Config(vocab_size=V, **shape)))
    config = GPTConfig(
        V,
        16,
        d_model=D,
        layers=LAYERS,
        heads=HEADS,
        position=hw.nn.Learned(16),
        feed_forward=hw.nn.GELU(WIDE, "tanh"),
        norm=hw.nn.LayerNorm(),
        bias=True,
    )
    names = {
        r"^lm_head\..*": "tied",
        r"^transformer\.": "",
        r"^wte": "embedding",
        r"^wpe": "position.table",
        r"^h\.": "blocks.",
        r"\.attn\.": ".attention.",
        r"\.ln_1": ".around_attention.norm",
        r"\.ln_2": ".around_feed_forward.norm",
        r"\.mlp\.c_fc": ".feed_forward.0",
        r"\.mlp\.c_proj": ".feed_forward.2",
        r"^ln_f": "norm",
    }
    state = renamed(theirs.state_dict(), names)
    turned = {key: x.T if "feed_forward" in key and x.ndim == 2 else x for key, x in state.items()}
    ours = GPT(config).eval()
    ours.load_state_dict(turned)
    tokens = torch.randint(V, (B, N))
    same(ours(tokens), theirs(tokens).logits)
    made = theirs.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0)[:, N:]
    assert torch.equal(ours.generate(tokens, 5), made)


@torch.no_grad()
def test_llama_with_stretched_positions() -> None:
    rope = {
        **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0},
        **{"high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    }
    theirs = LlamaForCausalLM(
        TheirLlamaConfig(**sizes(), num_key_value_heads=2, rope_parameters=rope, rms_norm_eps=1e-6)
    )
    config = GPTConfig(
        V,
        d_model=D,
        layers=LAYERS,
        heads=HEADS,
        kv_heads=2,
        position=hw.nn.Rotary(scaling=hw.nn.Llama3Scaling(4.0, 16)),
        feed_forward=hw.nn.SwiGLU(WIDE),
        tied=False,
    )
    names = {
        r"^model\.": "",
        r"^lm_head": "head",
        r"^embed_tokens": "embedding",
        r"^layers": "blocks",
        r"self_attn": "attention",
        r"input_layernorm": "around_attention.norm",
        r"post_attention_layernorm": "around_feed_forward.norm",
        r"mlp\.(\w+)_proj": r"feed_forward.\1",
    }
    ours = GPT(config).eval()
    ours.load_state_dict(renamed(randomised(theirs).state_dict(), names))
    tokens = torch.randint(V, (B, N))
    same(ours(tokens), theirs(tokens).logits)


@torch.no_grad()
def test_bert_with_padding_and_segments() -> None:
    theirs = randomised(BertForMaskedLM(TheirBertConfig(**sizes())))
    config = BertConfig(V, d_model=D, layers=LAYERS, heads=HEADS, feed_forward=hw.nn.GELU(WIDE))
    names = {
        r"^bert\.": "",
        r"^cls\.predictions\.decoder\..*": "tied",
        r"^cls\.predictions\.bias": "readout_bias",
        r"^cls\.predictions\.transform\.dense": "readout",
        r"^cls\.predictions\.transform\.LayerNorm": "readout_norm",
        r"^embeddings\.word_embeddings": "embedding",
        r"^embeddings\.position_embeddings": "positions",
        r"^embeddings\.token_type_embeddings": "segments",
        r"^embeddings\.LayerNorm": "norm",
        r"^encoder\.layer": "blocks",
        r"attention\.output\.LayerNorm": "around_attention.norm",
        r"intermediate\.dense": "feed_forward.0",
        r"(\d)\.output\.dense": r"\1.feed_forward.2",
        r"(\d)\.output\.LayerNorm": r"\1.around_feed_forward.norm",
    }
    ours = Bert(config).eval()
    ours.load_state_dict(renamed(theirs.state_dict(), names))
    tokens, parts = torch.randint(V, (B, N)), torch.randint(2, (B, N))
    expected = theirs(tokens, attention_mask=SEEN, token_type_ids=parts).logits
    made = ours(tokens, lengths=LENGTHS, segments=parts)
    same(made[SEEN.bool()], expected[SEEN.bool()])


@torch.no_grad()
def test_vit() -> None:
    theirs = ViTForImageClassification(
        TheirViTConfig(**sizes(), image_size=8, patch_size=4, num_labels=5, layer_norm_eps=1e-6)
    )
    config = ViTConfig(
        8, 4, classes=5, d_model=D, layers=LAYERS, heads=HEADS, feed_forward=hw.nn.GELU(WIDE)
    )
    names = {
        r"^vit\.": "",
        r"^classifier": "head",
        r"^embeddings\.cls_token": "summary",
        r"^embeddings\.position_embeddings": "positions",
        r"^embeddings\.patch_embeddings\.projection": "patches",
        r"^layers": "blocks",
        r"layernorm_before": "around_attention.norm",
        r"layernorm_after": "around_feed_forward.norm",
        r"mlp\.fc1": "feed_forward.0",
        r"mlp\.fc2": "feed_forward.2",
        r"^layernorm": "norm",
    }
    ours = ViT(config).eval()
    ours.load_state_dict(renamed(randomised(theirs).state_dict(), names))
    images = torch.randn(B, 3, 8, 8)
    same(ours(images), theirs(images).logits)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")  # said when theirs is built
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # and when it runs
@pytest.mark.parametrize("first", [False, True], ids=["norm after", "norm before"])
@torch.no_grad()
def test_the_2017_transformer(first: bool) -> None:
    theirs = nn.Transformer(
        *(D, HEADS, LAYERS, LAYERS, WIDE), dropout=0.0, batch_first=True, norm_first=first
    )
    if not first:  # the paper has no norm after the last one
        theirs.encoder.norm = theirs.decoder.norm = None
    config = TransformerConfig(
        V,
        d_model=D,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        heads=HEADS,
        position=None,
        feed_forward=hw.nn.ReLU(WIDE),
        arrangement=hw.nn.PreNorm() if first else hw.nn.PostNorm(),
    )
    names = {
        r"(\w+)\.norm\.": r"\1_norm.",
        r"\.layers": "",
        r"self_attn": "attention",
        r"multihead_attn": "cross_attention",
        r"linear1": "feed_forward.0",
        r"linear2": "feed_forward.2",
        r"norm1": "around_attention.norm",
        r"(decoder.*)norm2": r"\1around_cross.norm",
        r"norm2|norm3": "around_feed_forward.norm",
    }
    ours = Transformer(config).eval()
    state = renamed(randomised(theirs).state_dict(), names)
    ours.load_state_dict({"embedding.weight": ours.embedding.weight, **state})
    source, target = torch.randint(V, (B, N)), torch.randint(V, (B, 6))
    scaled = [ours.embedding(tokens) * D**0.5 for tokens in (source, target)]
    hidden = SEEN == 0
    out = theirs(
        *scaled,
        tgt_mask=nn.Transformer.generate_square_subsequent_mask(6),
        src_key_padding_mask=hidden,
        memory_key_padding_mask=hidden,
        tgt_is_causal=True,
    )
    same(ours(source, target, LENGTHS), out @ ours.embedding.weight.T)
