"""The bytes of a KV cache are those of the tensors that hold it."""

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw

B, S, H, A = 2, 50, 64, 4
transformers = pytest.importorskip("transformers")


def nbytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def filled(cache: Any, **options: Any) -> tuple[Any, hw.nn.MultiHeadAttention]:
    attn = hw.nn.MultiHeadAttention(H, A, mask=hw.mask.causal(), **options).to(torch.bfloat16)
    with torch.no_grad():
        attn(torch.randn(B, S, H, dtype=torch.bfloat16), cache=cache)
    return cache, attn


@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "head_dim": 24}, {"value_dim": 32}], ids=str
)
def test_a_fixed_cache(options: dict[str, Any]) -> None:
    cache, attn = filled(hw.nn.FixedCache(S), **options)
    assert hw.cost(attn, batch=B, queries=S).kv_cache == nbytes(cache._keys, cache._values)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_an_int8_cache_with_its_scales(kv_heads: int) -> None:
    cache, attn = filled(hw.nn.Int8Cache(), kv_heads=kv_heads)
    held = cache.held()
    stored = (held.keys, held.values, held.key_scales, held.value_scales)
    used = nbytes(*(x[:, :, :S] for x in stored))
    assert hw.cost(attn, batch=B, queries=S, cache="int8").kv_cache == used


@pytest.mark.parametrize("page", [8, 16, 64])
def test_a_paged_cache_with_its_table(page: int) -> None:
    pool = hw.nn.PagePool(pages=40, page=page)
    cache, attn = filled(hw.nn.PagedCache(pool), kv_heads=2)
    taken = 40 - pool.free
    assert pool.keys is not None
    assert pool.values is not None
    held = taken * nbytes(pool.keys[0], pool.values[0]) + nbytes(cache.held().pages)
    layout = hw.CacheLayout(bits=16, page=page)
    assert hw.cost(attn, batch=B, queries=S, cache=layout).kv_cache == held


def test_a_window_is_cached_up_to_its_width() -> None:
    attn = hw.nn.MultiHeadAttention(H, A, mask=hw.mask.causal() & hw.mask.window(15))
    one = 2 * B * H * 2
    assert hw.cost(attn, batch=B, queries=S).kv_cache == 16 * one
    assert hw.cost(attn, batch=B, queries=10).kv_cache == 10 * one
    assert hw.cost(attn, batch=B, queries=1, keys=1000).kv_cache == 16 * one


def test_bits_groups_and_scales() -> None:
    attn = hw.nn.MultiHeadAttention(H, A)
    vectors = 2 * B * S * A
    assert hw.cost(attn, batch=B, queries=S, cache="fp8").kv_cache == vectors * 16
    assert hw.cost(attn, batch=B, queries=S, cache="int4").kv_cache == vectors * 8
    grouped = hw.CacheLayout(bits=4, scale_bits=16, group=8)
    assert hw.cost(attn, batch=B, queries=S, cache=grouped).kv_cache == vectors * (8 + 2 * 2)


def config(kind: str, **fields: Any) -> Any:
    sizes = {
        "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100,
        "intermediate_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    }  # fmt: skip
    return transformers.AutoConfig.for_model(kind, **{**sizes, **fields})


CONFIG_3N = {
    "num_hidden_layers": 10, "num_kv_shared_layers": 4, "intermediate_size": 96,
    "vocab_size": 100, "vocab_size_per_layer_input": 100, "hidden_size": 64, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8,
    "activation_sparsity_pattern": [0.0] * 10, "pad_token_id": 2, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": lambda: config("llama", num_key_value_heads=2, head_dim=16),
    "qwen3": lambda: config("qwen3", num_key_value_heads=1, head_dim=32),
    "gpt2": lambda: transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=100),
    "mistral": lambda: config("mistral", num_key_value_heads=2, head_dim=16, sliding_window=16),
    "gemma2": lambda: config("gemma2", num_key_value_heads=2, head_dim=16, sliding_window=16),
    "gemma3": lambda: config(
        "gemma3_text", num_key_value_heads=2, head_dim=16, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt_oss": lambda: config(
        "gpt_oss", num_key_value_heads=2, head_dim=16, sliding_window=16, num_local_experts=2,
        num_experts_per_tok=1,
    ),
    "llama4": lambda: config(
        "llama4_text", num_key_value_heads=2, head_dim=16, attention_chunk_size=16, moe_layers=[],
        intermediate_size_mlp=96, num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"] * 2,
    ),
    "deepseek_v3": lambda: config(
        "deepseek_v3", first_k_dense_replace=4, kv_lora_rank=24, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, q_lora_rank=32, num_key_value_heads=4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek_v3"])
def test_a_static_cache_of_transformers(name: str) -> None:
    made = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=made, max_cache_len=S)
    ids = torch.zeros(B, S, dtype=torch.int64)
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    held = sum(nbytes(layer.keys, layer.values) for layer in cache.layers)
    # It has room for a whole window, of which the next query sees all but the first key.
    unseen = sum(
        nbytes(layer.keys[:, :, :1], layer.values[:, :, :1])
        for layer in cache.layers
        if layer.is_sliding
    )
    assert hw.cost(made, batch=B, queries=S).kv_cache == held - unseen


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "deepseek_v3"])
def test_a_dynamic_cache_of_transformers(name: str) -> None:
    """After a prompt and after a step, also of layers with a window."""
    made = CONFIGS[name]()
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    cache = transformers.DynamicCache(config=made)
    held = []
    with torch.no_grad():
        for tokens in (7, S - 7, 1):  # fewer than a window, more, and a step
            model(torch.zeros(B, tokens, dtype=torch.int64), past_key_values=cache)
            held.append(sum(nbytes(layer.keys, layer.values) for layer in cache.layers))
    counted = [hw.cost(made, batch=B, queries=1, keys=keys).kv_cache for keys in (7, S, S + 1)]
    assert counted == held
    assert hw.cost(made, batch=B, queries=S).kv_cache == held[1]


def test_latents_are_cached_without_heads() -> None:
    made = CONFIGS["deepseek_v3"]()
    assert hw.cost(made, batch=B, queries=S).kv_cache == 4 * B * S * (24 + 8) * 2


def test_layers_that_reuse_keys_cache_none() -> None:
    """Gemma 3n: the last four of ten layers use the keys of earlier ones."""
    made = transformers.AutoConfig.for_model("gemma3n_text", **CONFIG_3N)
    model = transformers.AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16).eval()
    cache = transformers.DynamicCache(config=made)
    with torch.no_grad():
        model(torch.zeros(B, S, dtype=torch.int64), past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if layer.is_initialized]
    assert len(layers) == 6
    held = sum(nbytes(layer.keys, layer.values) for layer in layers)
    assert hw.cost(made, batch=B, queries=S).kv_cache == held


def test_a_decoder_caches_its_source_and_an_encoder_nothing() -> None:
    small = {"d_model": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4, "d_kv": 16}
    cost = hw.cost({"model_type": "t5", **small}, batch=B, queries=10, context=30)
    assert cost.kv_cache == 3 * 2 * B * 64 * (10 + 30) * 2
    assert hw.cost({"model_type": "bert"}, queries=64).kv_cache == 0


def test_a_cache_is_read_in_its_own_dtype_and_only_in_decoding() -> None:
    """Cross-attention in training reads fresh keys; in decoding, those that are cached."""
    config = hw.models.TransformerConfig(50, d_model=64, heads=4)

    def read(part: str, **sizes: int) -> list[int]:
        cost = hw.cost(config, context=30, cache="int8", **sizes)
        layer = cost.parts["decoder"].parts[part]
        return [kernel.bytes_read for kernel in layer.forward if kernel.kind == "attention"]

    query, fresh, stored = 2 * 64, 2 * 2 * 64, 2 * (64 + 4 * 4)
    assert read("cross_attention", queries=10) == [10 * query + 30 * fresh]
    assert read("cross_attention", queries=1, keys=10) == [query + 30 * stored]
    assert read("attention", queries=10) == [10 * query + 10 * fresh]
    assert read("attention", queries=1, keys=10) == [query + 10 * stored]


def test_only_the_keys_of_the_window_are_read() -> None:
    fields = {"model_type": "mistral", "num_hidden_layers": 1, "sliding_window": 100}
    cost = hw.cost(fields, queries=1, keys=1000)
    (kernel,) = (kernel for kernel in cost.forward if kernel.kind == "attention")
    assert kernel.bytes_read == 2 * 4096 + 100 * 2 * 2 * 8 * 128
    assert kernel.flops == 100 * 4 * 4096


def test_the_state_of_a_hybrid_is_counted_beside_its_cache() -> None:
    small = {
        "model_type": "jamba", "num_hidden_layers": 8, "hidden_size": 64, "mamba_dt_rank": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2,
        "intermediate_size": 96, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
    }  # fmt: skip
    cost = hw.cost(small, batch=B, queries=1, keys=S)
    assert cost.kv_cache == 1 * 2 * B * S * 2 * 16 * 2, "one of eight layers attends"
    inner = 2 * 64
    assert cost.state == 7 * B * (inner * 4 * 2 + inner * 16 * 4)


@pytest.mark.parametrize("wrong", ["int3", 3, object()], ids=["name", "number", "object"])
def test_an_unknown_cache_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a dtype"):
        hw.cost(hw.nn.MultiHeadAttention(H, A), queries=S, cache=wrong)
