"""Layers that stand in for attention in hybrid models, or beside it in Gemma 3n."""

from __future__ import annotations

from dataclasses import replace

from headwise.costs.layers import (
    AttentionLayer,
    Body,
    EmbeddingLayer,
    LinearLayer,
    LooseWeight,
    MatrixLayer,
    Step,
    SubLayer,
)
from headwise.costs.readers.fields import LAYERS, WIDTH, Fields
from headwise.messages import say

RECURRENCE = say("the recurrence of linear attention and Mamba layers")


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
    layer = MatrixLayer(
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
        left_out=RECURRENCE,
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
    layer = MatrixLayer(
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
        left_out=RECURRENCE,
    )
    period, offset = fields.size("attn_layer_period"), int(fields.need("attn_layer_offset"))
    return [None if (number - offset) % period == 0 else layer for number in range(layers)]


def bamba(fields: Fields, layers: int) -> list[Body | None]:
    """Mamba 2 layers except those in `attn_layer_indices`."""
    layer = _mamba2(fields, fields.size("mamba_expand") * fields.size(*WIDTH), "mamba_proj_bias")
    attention = fields.numbers("attn_layer_indices", layers)
    return [None if number in attention else layer for number in range(layers)]


def falcon_h1(fields: Fields) -> MatrixLayer:
    """The Mamba 2 layer beside every attention; its width and its norm are optional."""
    inner = fields.chosen("mamba_d_ssm")
    inner = fields.size("mamba_expand") * fields.size(*WIDTH) if inner is None else inner
    return _mamba2(fields, inner, "projectors_bias", fields.flag("mamba_rms_norm"))


def _mamba2(fields: Fields, inner: int, out_bias: str, norm: bool = True) -> MatrixLayer:
    width, states = fields.size(*WIDTH), fields.size("mamba_d_state")
    heads, head_dim = fields.size("mamba_n_heads"), fields.size("mamba_d_head")
    if heads * head_dim != inner:
        raise fields.contradiction(
            say(
                "{heads} heads of {width} are not the width of its Mamba layers, {inner}",
                heads=heads,
                width=head_dim,
                inner=inner,
            )
        )
    kernel, groups = fields.size("mamba_d_conv"), fields.size("mamba_n_groups")
    mixed = inner + 2 * groups * states
    others = [
        LooseWeight("convolution", (mixed, 1, kernel)),
        LooseWeight("step bias", (heads,)),
        LooseWeight("decay", (heads,)),
        LooseWeight("skip", (heads,)),
    ]
    if norm:
        others.append(LooseWeight("norm", (inner,)))
    if fields.flag("mamba_conv_bias"):
        others.append(LooseWeight("convolution bias", (mixed,)))
    return MatrixLayer(
        "Mamba 2",
        width,
        (
            LinearLayer("in", width, inner + mixed + heads, fields.flag("mamba_proj_bias")),
            LinearLayer("out", inner, width, fields.flag(out_bias)),
        ),
        tuple(others),
        state=mixed * kernel,
        wide_state=heads * head_dim * states,
        left_out=RECURRENCE,
    )


def gemma3n_sublayers(fields: Fields) -> tuple[SubLayer, ...]:
    """Gemma 3n beside attention: streams that are mixed, a low-rank path, inputs of each layer."""
    width, streams = fields.size(*WIDTH), fields.size("altup_num_inputs")
    rank, inner = fields.size("laurel_rank"), fields.size("hidden_size_per_layer_input")
    router = LinearLayer("router", width, streams)
    bodies = {
        "mixed streams": MatrixLayer(
            "mixed streams",
            width,
            (
                router,
                LinearLayer("prediction", streams, streams**2),
                LinearLayer("predicted streams", streams**2, width, tied=True),  # no weights
                LinearLayer("router again", width, streams, tied=True),
                LinearLayer("correction", streams, streams),
            ),
            (LooseWeight("scale", (width,)), LooseWeight("norm", (width,))),
        ),
        "low-rank path": MatrixLayer(
            "low-rank path",
            width,
            (LinearLayer("left", width, rank), LinearLayer("right", rank, width)),
            (LooseWeight("norm", (width,)),),
        ),
        "input of the layer": MatrixLayer(
            "input of the layer",
            width,
            (LinearLayer("gate", width, inner), LinearLayer("projection", inner, width)),
            (LooseWeight("norm", (width,)),),
        ),
    }
    return tuple(SubLayer(name, body) for name, body in bodies.items())


def gemma3n_steps(fields: Fields) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Gemma 3n before and after its layers: inputs of every layer, and streams."""
    width, inner = fields.size(*WIDTH), fields.size("hidden_size_per_layer_input")
    every, rows = inner * fields.size(*LAYERS), fields.size("vocab_size_per_layer_input")
    more = (fields.size("altup_num_inputs") - 1) * width
    before: tuple[Step, ...] = (
        EmbeddingLayer("inputs of layers", rows, every, split=True),
        LinearLayer("projected inputs of layers", width, every, aside=True),
        LooseWeight("norm of inputs", (inner,)),
        LinearLayer("streams", width, more, aside=True),
    )
    return before, (LinearLayer("joined streams", width, more, aside=True),)
