"""The families of decoders, each by its traits: a table."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.readers import hybrids, mixtures
from headwise.costs.readers.decoders import DecoderFamily
from headwise.costs.readers.fields import Fields


def opt_final_norm(fields: Fields) -> bool:
    """True if OPT norms the output of its last layer."""
    before, removed = (
        fields.flag(name) for name in ("do_layer_norm_before", "_remove_final_layer_norm")
    )
    return before and not removed


LLAMA = DecoderFamily(qkv_bias="attention_bias", out_bias="attention_bias", mlp_bias="mlp_bias",
                      windows="none")  # fmt: skip
QWEN2 = DecoderFamily(qkv_bias=True)
QWEN3 = DecoderFamily(qkv_bias="attention_bias", out_bias="attention_bias", qk_norm="head")
MISTRAL = DecoderFamily(windows="all")
GEMMA2 = DecoderFamily(
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    norms="around",
    softcap="attn_logit_softcapping",
)
OLMO2 = DecoderFamily(
    qkv_bias="attention_bias", out_bias="attention_bias", norms="after", qk_norm="all"
)
GPT2 = DecoderFamily(
    norm="layer",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    gated=False,
    rotary=False,
    windows="none",
    positions=("n_positions", "max_position_embeddings"),
)

FAMILIES: dict[str, DecoderFamily] = {
    "llama": LLAMA,
    "granite": LLAMA,
    "llama4_text": replace(LLAMA, mlp_bias=False, windows="types", mixture=mixtures.llama4),
    "mistral": MISTRAL,
    "ministral": DecoderFamily(),
    "mixtral": replace(MISTRAL, mixture=mixtures.mixtral),
    "qwen2": QWEN2,
    "qwen2_moe": replace(QWEN2, qkv_bias="qkv_bias", mixture=mixtures.qwen_shared),
    "qwen3": QWEN3,
    "qwen3_moe": replace(QWEN3, windows="all", mixture=mixtures.qwen),
    "qwen3_next": replace(
        QWEN3,
        mixture=mixtures.qwen_shared,
        mixer=hybrids.qwen3_next,
        attention=hybrids.gated_attention,
    ),
    "smollm3": replace(LLAMA, windows="types"),
    "gemma": replace(LLAMA, mlp_bias=False),
    "gemma2": GEMMA2,
    "gemma3_text": replace(GEMMA2, qk_norm="head"),
    "gemma3n_text": replace(
        GEMMA2,
        softcap=None,
        qk_norm="head",
        shared_keys="num_kv_shared_layers",
        beside=hybrids.gemma3n_sublayers,
        steps=hybrids.gemma3n_steps,
    ),
    "gpt_oss": DecoderFamily(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        sinks=True,
        mixture=mixtures.gpt_oss,
    ),
    "deepseek_v2": replace(LLAMA, mixture=mixtures.deepseek, attention=mixtures.latent_attention),
    "deepseek_v3": replace(
        LLAMA, mlp_bias=False, mixture=mixtures.deepseek, attention=mixtures.latent_attention
    ),
    "phi": DecoderFamily(
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        qk_norm="head",
        qk_norm_if="qk_layernorm",
        parallel=True,
        head_bias=True,
        windows="none",
    ),
    "phi3": DecoderFamily(windows="all"),
    "cohere": DecoderFamily(
        norm="layer",
        norm_bias=False,
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        qk_norm="each",
        qk_norm_if="use_qk_norm",
        parallel=True,
        windows="none",
    ),
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmoe": replace(OLMO2, norms="before", windows="none", mixture=mixtures.mixtral),
    "starcoder2": DecoderFamily(
        norm="layer",
        qkv_bias="use_bias",
        out_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        windows="all",
    ),
    "gpt_neox": DecoderFamily(
        norm="layer",
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias=True,
        gated=False,
        parallel="use_parallel_residual",
        parallel_norms=True,
        windows="none",
    ),
    "gpt2": GPT2,
    "opt": replace(
        GPT2,
        qkv_bias="enable_bias",
        out_bias="enable_bias",
        mlp_bias="enable_bias",
        norm_scale="layer_norm_elementwise_affine",
        norms_before_if="do_layer_norm_before",
        final_norm=opt_final_norm,
        embedding_width="word_embed_proj_dim",
        positions=("max_position_embeddings",),
        more_positions=2,
    ),
    "jamba": DecoderFamily(
        rotary=False, windows="none", mixture=mixtures.jamba, mixer=hybrids.jamba
    ),
    "bamba": DecoderFamily(
        qkv_bias="attention_bias",
        out_bias="attention_bias",
        mlp_bias="mlp_bias",
        windows="none",
        mixer=hybrids.bamba,
    ),
    "falcon_h1": replace(LLAMA, alongside=hybrids.falcon_h1),
}
