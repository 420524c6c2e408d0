"""Layers that stand in for attention in hybrid models: their weights and their state."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.layers import AttentionLayer, Body, LinearLayer, LooseWeight, RecurrentLayer
from headwise.costs.readers.fields import WIDTH, Fields


def gated_attention(fields: Fields, layer: AttentionLayer) -> AttentionLayer:
    """Attention with a gate on its output."""
    return replace(layer, gate=True)


def qwen3_next(fields: Fields, layers: int) -> list[Body | None]:
    """Gated delta rule layers where `layer_types` says linear_attention."""
    width = fields.size(*WIDTH)
    keys, values = fields.size("linear_num_key_heads"), fields.size("linear_num_value_heads")
    key_dim, value_dim = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
    kernel = fields.size("linear_conv_kernel_dim")
    q, v = keys * key_dim, values * value_dim
    mixed = 2 * q + v
    layer = RecurrentLayer(
        "linear attention",
        width,
        (
            LinearLayer("query, key, value and gate", width, mixed + v),
            LinearLayer("decay and step", width, 2 * values),
            LinearLayer("out", v, width),
        ),
        (
            LooseWeight("convolution", (mixed, 1, kernel)),
            LooseWeight("step bias", (values,)),
            LooseWeight("decay", (values,)),
            LooseWeight("norm", (value_dim,)),
        ),
        state=mixed * kernel,
        wide_state=values * key_dim * value_dim,
    )
    kinds = fields.kinds(layers)
    if not kinds:
        fields.need("layer_types")
    return [layer if kind == "linear_attention" else None for kind in kinds]


def jamba(fields: Fields, layers: int) -> list[Body | None]:
    """Mamba layers except every `attn_layer_period`-th, from `attn_layer_offset` on."""
    width = fields.size(*WIDTH)
    inner, states = fields.size("mamba_expand") * width, fields.size("mamba_d_state")
    kernel, rank = fields.size("mamba_d_conv"), fields.size("mamba_dt_rank")
    bias = fields.flag("mamba_proj_bias")
    others = [
        LooseWeight("convolution", (inner, 1, kernel)),
        LooseWeight("decay", (inner, states)),
        LooseWeight("skip", (inner,)),
        LooseWeight("norms", (rank + 2 * states,)),
    ]
    if fields.flag("mamba_conv_bias"):
        others.append(LooseWeight("convolution bias", (inner,)))
    layer = RecurrentLayer(
        "Mamba",
        width,
        (
            LinearLayer("in", width, 2 * inner, bias),
            LinearLayer("step, input and output", inner, rank + 2 * states),
            LinearLayer("step", rank, inner, True),
            LinearLayer("out", inner, width, bias),
        ),
        tuple(others),
        state=inner * kernel,
        wide_state=inner * states,
    )
    period, offset = fields.size("attn_layer_period"), int(fields.need("attn_layer_offset"))
    return [None if (number - offset) % period == 0 else layer for number in range(layers)]


def bamba(fields: Fields, layers: int) -> list[Body | None]:
    """Mamba 2 layers except those in `attn_layer_indices`."""
    width = fields.size(*WIDTH)
    heads, head_dim = fields.size("mamba_n_heads"), fields.size("mamba_d_head")
    inner, states = fields.size("mamba_expand") * width, fields.size("mamba_d_state")
    if heads * head_dim != inner:
        raise ValueError(
            f"{fields.kind!r} contradicts itself: {heads} heads of {head_dim} are not "
            f"mamba_expand · hidden_size = {inner}"
        )
    kernel, groups = fields.size("mamba_d_conv"), fields.size("mamba_n_groups")
    mixed = inner + 2 * groups * states
    bias = fields.flag("mamba_proj_bias")
    others = [
        LooseWeight("convolution", (mixed, 1, kernel)),
        LooseWeight("step bias", (heads,)),
        LooseWeight("decay", (heads,)),
        LooseWeight("skip", (heads,)),
        LooseWeight("norm", (inner,)),
    ]
    if fields.flag("mamba_conv_bias"):
        others.append(LooseWeight("convolution bias", (mixed,)))
    layer = RecurrentLayer(
        "Mamba 2",
        width,
        (
            LinearLayer("in", width, inner + mixed + heads, bias),
            LinearLayer("out", inner, width, bias),
        ),
        tuple(others),
        state=mixed * kernel,
        wide_state=heads * head_dim * states,
    )
    attention = set(fields.get("attn_layer_indices") or ())
    return [None if number in attention else layer for number in range(layers)]
