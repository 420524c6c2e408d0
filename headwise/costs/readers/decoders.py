"""Language models with one stack of layers: the traits of a family, and one reader for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from headwise.costs.layers import (
    AttentionLayer,
    Body,
    DropoutStep,
    EmbeddingLayer,
    ExpertsLayer,
    FeedForwardLayer,
    LayerStack,
    LinearLayer,
    MatrixLayer,
    NormLayer,
    StackedLayer,
    Step,
    SubLayer,
)
from headwise.costs.readers.fields import HEADS, HIDDEN, LAYERS, WIDTH, Fields
from headwise.messages import say

KINDS = {"full_attention", "sliding_attention", "chunked_attention", "linear_attention"}
"""The types of layers that `layer_types` may list."""

Flag = bool | str  # a constant, or the name of a field


@dataclass(frozen=True)
class DecoderFamily:
    """The traits of a family of decoders beyond its sizes."""

    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = True
    norms: Literal["before", "around", "after"] = "before"
    norms_before_if: str | None = None  # the field without which norms follow the residual sums
    norm_scale: Flag = True
    final_norm: Callable[[Fields], bool] | None = None
    embedding_width: str | None = None  # the field with the width of the table of tokens
    qkv_bias: Flag = False
    out_bias: Flag = False
    mlp_bias: Flag = False
    gated: bool = True
    qk_norm: Literal["head", "each", "all"] | None = None
    qk_norm_if: str | None = None  # the field that switches it on
    parallel: Flag = False
    parallel_norms: bool = False  # a norm for each of the parallel sublayers
    softcap: str | None = None
    sinks: bool = False
    positions: tuple[str, ...] = ()  # fields with the length of a learned table
    more_positions: int = 0
    rotary: bool = True
    windows: Literal["types", "all", "none"] = "types"
    head_bias: bool = False
    mixture: Callable[[Fields, FeedForwardLayer], list[Body]] | None = None
    mixer: Callable[[Fields, int], list[Body | None]] | None = None
    attention: Callable[[Fields, AttentionLayer], AttentionLayer] | None = None
    shared_keys: str | None = None  # the field with the number of last layers that reuse keys
    alongside: Callable[[Fields], MatrixLayer] | None = None  # on the same input as attention
    beside: Callable[[Fields], tuple[SubLayer, ...]] | None = None  # further sublayers
    steps: Callable[[Fields], tuple[tuple[Step, ...], tuple[Step, ...]]] | None = None


def read_decoder(fields: Fields, family: DecoderFamily) -> LayerStack:
    """The stack of a decoder, without its output layer."""
    fields.needs(WIDTH, HEADS, LAYERS, ("vocab_size",))
    width, layers = fields.size(*WIDTH), fields.size(*LAYERS)
    bodies = _feed_forwards(fields, family, layers)
    mixers = _mixers(fields, family, layers)
    found: list[StackedLayer] = []
    for number in range(layers):
        if family.alongside is not None:
            other = family.alongside(fields)
            norm = _norm(fields, family, width)
            found += _side_by_side(norm, mixers[number], other, bodies[number])
            continue
        layer = _layer(fields, family, mixers[number], bodies[number], width)
        if family.beside is not None:
            layer = replace(layer, sublayers=layer.sublayers + family.beside(fields))
        found.append(layer)
    narrow = out_width(fields, family, width)
    table = EmbeddingLayer("embedding", fields.size("vocab_size"), narrow, split=True)
    before: list[Step] = [table]
    if narrow != width:
        before.append(LinearLayer("widened embedding", narrow, width))
    longest = None
    if family.positions:
        longest = fields.size(*family.positions)
        rows = longest + family.more_positions
        before.append(EmbeddingLayer("positions", rows, width, per_batch=False))
    before.append(DropoutStep(fields.rate("embd_pdrop", "embedding_dropout")))
    after: tuple[Step, ...] = ()
    if family.final_norm is None or family.final_norm(fields):
        after = (_norm(fields, family, width),)
    if narrow != width:
        after = (*after, LinearLayer("narrowed output", width, narrow))
    if family.steps is not None:
        first, last = family.steps(fields)
        before, after = [*before, *first], (*last, *after)
    stated = fields.get("max_position_embeddings")
    return LayerStack(
        "decoder",
        tuple(before),
        tuple(found),
        after,
        longest=longest,
        stated=stated if type(stated) is int and stated > 0 else None,
        width=width,
    )


def out_width(fields: Fields, family: DecoderFamily, width: int) -> int:
    """The width of a token's entry in the table, and of what the output layer sees."""
    if family.embedding_width is None or fields.chosen(family.embedding_width) is None:
        return width
    return fields.size(family.embedding_width)


def _norm(fields: Fields, family: DecoderFamily, width: int) -> NormLayer:
    scale = fields.flag(family.norm_scale)
    return NormLayer(width, family.norm, family.norm_bias and scale, scale)


def _layer(
    fields: Fields, family: DecoderFamily, mixer: Body, body: Body, width: int
) -> StackedLayer:
    norm = _norm(fields, family, width)
    before = norm if family.norms in ("before", "around") else None
    after = norm if family.norms in ("around", "after") else None
    post = None
    if family.norms_before_if is not None and not fields.flag(family.norms_before_if):
        before, post = None, norm
    dropout = fields.rate("resid_pdrop", "residual_dropout", "hidden_dropout", "dropout")
    subs = tuple(
        SubLayer(name, part, before, after, post, dropout=dropout)
        for name, part in ((_sublayer(mixer), mixer), ("feed-forward", body))
    )
    name = _label(mixer, body)
    if not fields.flag(family.parallel):
        return StackedLayer(subs, label=name)
    if family.parallel_norms:
        return StackedLayer(subs, parallel=True, label=name)
    plain = tuple(replace(sub, before=None) for sub in subs)
    return StackedLayer(plain, parallel=True, shared_norm=norm, label=name)


def _side_by_side(
    norm: NormLayer, mixer: Body, other: MatrixLayer, body: Body
) -> tuple[StackedLayer, StackedLayer]:
    """A layer in two: attention and another mixer on the same input, then the feed-forward."""
    both = (SubLayer("attention", mixer), SubLayer("recurrence", other))
    return (
        StackedLayer(both, True, norm, label=f"attention and {other.label} layers"),
        StackedLayer((SubLayer("feed-forward", body, norm),), label="feed-forward layers"),
    )


def _sublayer(mixer: Body) -> str:
    return "recurrence" if isinstance(mixer, MatrixLayer) else "attention"


def _label(mixer: Body, body: Body) -> str:
    """A layer's name by what makes it differ from others."""
    kind = "layers"
    if isinstance(mixer, MatrixLayer):
        kind = f"{mixer.label} layers"
    elif isinstance(mixer, AttentionLayer) and mixer.window is not None:
        kind = f"layers with a window of {mixer.window}"
    elif isinstance(mixer, AttentionLayer) and mixer.chunk is not None:
        kind = f"layers with chunks of {mixer.chunk}"
    if isinstance(body, ExpertsLayer):
        kind += f", {body.experts} experts"
    return kind + (", shared keys" if isinstance(mixer, AttentionLayer) and mixer.reuses else "")


def _mixers(fields: Fields, family: DecoderFamily, layers: int) -> list[Body]:
    """The attention, or what stands in its place, of every layer."""
    plain = read_attention_fields(fields, family)
    windows = _windows(fields, family, layers)
    found: list[Body] = []
    shared = layers
    if family.shared_keys is not None:
        shared -= int(fields.get(family.shared_keys) or 0)
        if not 0 < shared <= layers:
            raise fields.contradiction(
                say("{count} of {layers} layers reuse the keys of earlier ones",
                    count=layers - shared, layers=layers)
            )  # fmt: skip
    others = family.mixer(fields, layers) if family.mixer is not None else [None] * layers
    for number, (window, chunk) in enumerate(windows):
        other = others[number]
        if other is not None:
            found.append(other)
            continue
        limit = window or chunk
        # transformers drops the key that the next query no longer sees at once
        keeps = None if limit is None else limit - 1
        reuses = number >= shared
        found.append(replace(plain, window=window, chunk=chunk, keeps=keeps, reuses=reuses))
    return found


def _windows(
    fields: Fields, family: DecoderFamily, layers: int
) -> list[tuple[int | None, int | None]]:
    """The window and the chunk of every layer."""
    kinds = fields.kinds(layers)
    window, chunk = _span(fields, family), fields.get("attention_chunk_size")
    unknown = sorted(set(kinds) - KINDS)
    if unknown:
        raise ValueError(
            say("{kind!r} has layers of the type {unknown!r}, which is unknown; known are {there}",
                kind=fields.kind, unknown=unknown[0], there=", ".join(sorted(KINDS)))
        )  # fmt: skip
    if kinds and family.windows == "types":
        if "sliding_attention" in kinds and not window:
            raise fields.contradiction(
                say("it has layers with sliding attention and no sliding_window")
            )
        if "chunked_attention" in kinds and not chunk:
            raise fields.contradiction(
                say("it has layers with chunked attention and no attention_chunk_size")
            )
        return [
            (
                window if kind == "sliding_attention" else None,
                chunk if kind == "chunked_attention" else None,
            )
            for kind in kinds
        ]
    if family.windows == "none" or not window:
        return [(None, None)] * layers
    if family.windows == "types":
        raise ValueError(
            say(
                "the configuration of {kind!r} has a sliding_window of {window} and no "
                "layer_types, which say which layers have it",
                kind=fields.kind,
                window=window,
            )
        )
    return [(window, None)] * layers


def _span(fields: Fields, family: DecoderFamily) -> int | None:
    """The keys of a window; None if there is none."""
    if family.windows == "none":
        return None
    # Some classes write 0 for no window.
    return fields.size("sliding_window") if fields.chosen("sliding_window") else None


def read_attention_fields(fields: Fields, family: DecoderFamily) -> AttentionLayer:
    """The attention of a decoder's layers, without windows."""
    width, heads = fields.size(*WIDTH), fields.size(*HEADS)
    kv_heads = fields.key_heads(heads)
    head_dim = fields.head_dim(width, heads)
    bias = fields.flag(family.qkv_bias)
    norm = None
    if family.qk_norm and (family.qk_norm_if is None or fields.flag(family.qk_norm_if)):
        norm = NormLayer(head_dim, family.norm, family.norm_bias)
    causal = not fields.get("use_bidirectional_attention")
    layer = AttentionLayer(
        width,
        heads,
        kv_heads,
        head_dim,
        head_dim,
        causal=causal,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        out_bias=fields.flag(family.out_bias),
        qk_norm=norm,
        norm_all_heads=family.qk_norm == "all",
        norm_each_head=family.qk_norm == "each",
        rotary=_rotary(fields, head_dim) if family.rotary else 0,
        softcap=bool(family.softcap and fields.get(family.softcap)),
        sinks=family.sinks,
        dropout=fields.rate("attention_dropout", "attn_pdrop"),
    )
    return layer if family.attention is None else family.attention(fields, layer)


def _rotary(fields: Fields, head_dim: int) -> int:
    """The entries of a head that are rotated, an even number."""
    rope = fields.get("rope_parameters") or {}
    part = fields.get("partial_rotary_factor", "rotary_pct")
    if part is None and isinstance(rope, dict):
        part = rope.get("partial_rotary_factor")
    part = 1.0 if part is None else part
    if not isinstance(part, int | float) or not 0 <= part <= 1:
        raise ValueError(
            say("{kind!r} rotates {part!r} of a head; it must be from 0 to 1", kind=fields.kind,
                part=part)
        )  # fmt: skip
    return int(head_dim * part) // 2 * 2


def _feed_forwards(fields: Fields, family: DecoderFamily, layers: int) -> list[Body]:
    width = fields.size(*WIDTH)
    hidden = fields.get(*HIDDEN)
    if hidden is None and family.gated:
        hidden = fields.need(*HIDDEN)
    listed = hidden if isinstance(hidden, list | tuple) else [hidden] * layers
    if len(listed) != layers:
        raise fields.contradiction(
            say("{count} widths for {layers} layers", count=len(listed), layers=layers)
        )
    plain = [
        FeedForwardLayer(
            width,
            int(one) if one else 4 * width,  # GPT-2's n_inner=None means 4h
            fields.activation(),
            family.gated,
            fields.flag(family.mlp_bias),
        )
        for one in listed
    ]
    if family.mixture is None:
        return list(plain)
    return family.mixture(fields, plain[0])
