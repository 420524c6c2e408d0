"""Mixtures of experts and latent attention, by the fields of the families that have them."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.layers import AttentionLayer, Body, ExpertsLayer, FeedForwardLayer, Latent
from headwise.costs.readers.fields import EXPERTS, LAYERS, Fields
from headwise.messages import say


def _experts(fields: Fields, expert: FeedForwardLayer, **others: object) -> ExpertsLayer:
    experts, active = fields.size(*EXPERTS), fields.size("num_experts_per_tok")
    if active > experts:
        raise fields.contradiction(
            say("{active} experts per token of {experts}", active=active, experts=experts)
        )
    return ExpertsLayer(expert, experts, active, **others)  # type: ignore[arg-type]


def mixtral(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Experts in every layer, as wide as a feed-forward layer."""
    return [_experts(fields, plain)] * fields.size(*LAYERS)


def gpt_oss(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Experts with biases in every layer."""
    layer = _experts(fields, replace(plain, bias=True), router_bias=True)
    return [layer] * fields.size(*LAYERS)


def qwen(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    expert = replace(plain, hidden=fields.size("moe_intermediate_size"))
    return _sparse(fields, plain, _experts(fields, expert))


def qwen_shared(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """The same with a gated expert that sees every token."""
    expert = replace(plain, hidden=fields.size("moe_intermediate_size"))
    shared = replace(plain, hidden=fields.size("shared_expert_intermediate_size"))
    return _sparse(fields, plain, _experts(fields, expert, shared=shared, shared_gate=True))


def _sparse(fields: Fields, plain: FeedForwardLayer, experts: ExpertsLayer) -> list[Body]:
    step = int(fields.get("decoder_sparse_step") or 1)
    dense = fields.numbers("mlp_only_layers", fields.size(*LAYERS))
    return [
        experts if number not in dense and (number + 1) % step == 0 else plain
        for number in range(fields.size(*LAYERS))
    ]


def llama4(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Experts, one of which sees every token, in `moe_layers`; wider dense layers elsewhere."""
    dense = replace(plain, hidden=fields.size("intermediate_size_mlp"))
    fields.need("moe_layers")
    sparse = fields.numbers("moe_layers", fields.size(*LAYERS))
    experts = _experts(fields, plain, shared=plain)
    layers = range(fields.size(*LAYERS))
    return [experts if number in sparse else dense for number in layers]


def jamba(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Experts in every `expert_layer_period`-th layer, from `expert_layer_offset` on."""
    period, offset = fields.size("expert_layer_period"), int(fields.need("expert_layer_offset"))
    experts = _experts(fields, plain)
    layers = range(fields.size(*LAYERS))
    return [experts if (number - offset) % period == 0 else plain for number in layers]


def deepseek(fields: Fields, plain: FeedForwardLayer) -> list[Body]:
    """Dense layers first, then experts, some of which see every token."""
    first = int(fields.get("first_k_dense_replace") or 0)
    width = fields.size("moe_intermediate_size")
    expert = replace(plain, hidden=width, bias=False)
    count = fields.get("n_shared_experts")
    shared = replace(plain, hidden=width * count) if count else None
    experts = _experts(fields, expert, shared=shared)
    return [plain if number < first else experts for number in range(fields.size(*LAYERS))]


def latent_attention(fields: Fields, layer: AttentionLayer) -> AttentionLayer:
    """Multi-head latent attention instead of plain heads."""
    fields.needs(("kv_lora_rank",), ("qk_nope_head_dim",), ("qk_rope_head_dim",), ("v_head_dim",))
    nope, rope = fields.size("qk_nope_head_dim"), fields.size("qk_rope_head_dim")
    latent = Latent(fields.get("q_lora_rank"), fields.size("kv_lora_rank"), nope, rope)
    return replace(
        layer,
        kv_heads=layer.heads,
        head_dim=nope + rope,
        value_dim=fields.size("v_head_dim"),
        latent=latent,
        rotary=0,  # counted with the latent's own steps
    )
