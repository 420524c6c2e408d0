"""Modules of headwise and of PyTorch, read into architectures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.nn.functional as F
from torch import nn

from headwise.costs.layers import (
    Activation,
    AttentionLayer,
    Body,
    EmbeddingLayer,
    FeedForwardLayer,
    LayeredModel,
    LayerStack,
    LinearLayer,
    LooseWeight,
    StackedLayer,
    Step,
    SubLayer,
)
from headwise.costs.readers.attention_modules import (
    ACTIVATIONS,
    ATTENTION,
    read_attention,
    read_feed_forward,
    read_norm,
)
from headwise.models.transformer import DecoderLayer
from headwise.nn.additive import AdditiveAttention
from headwise.nn.block import Block, PreNorm, Residual
from headwise.nn.feed_forward import GatedFeedForward
from headwise.nn.positions import LearnedPosition
from headwise.nn.swap import TorchCall

FUNCTIONS: dict[object, Activation] = {F.relu: "relu", F.gelu: "gelu", F.silu: "silu"}
TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def read_module(module: nn.Module, context: int | None = None) -> LayeredModel | None:
    """The architecture of a module alone; None if it is not one that is known here.

    With a `context` length an attention module attends to another sequence.
    """
    name = type(module).__name__
    module = module.attention if isinstance(module, TorchCall) else module
    if isinstance(module, ATTENTION):
        return _alone(name, module, context)
    if isinstance(module, Block):
        return _one(name, read_block(module), _width(module))
    if isinstance(module, DecoderLayer):
        layer = read_decoder_layer(module)
        width = module.attention.d_model
        return LayeredModel(name, (_source(width), _numbers("layer", width, layers=(layer,))))
    if isinstance(module, TorchLayer):
        layer = read_torch_layer(module)
        return _torch_stack(name, (layer,), None, module.linear1.in_features)
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder):
        layers = tuple(read_torch_layer(layer) for layer in module.layers)
        return _torch_stack(name, layers, module.norm, module.layers[0].linear1.in_features)
    if isinstance(module, nn.Transformer):
        return _torch_transformer(module)
    return _simple(name, module)


def _alone(name: str, module: nn.Module, context: int | None) -> LayeredModel:
    cross = context is not None or isinstance(module, AdditiveAttention)
    layer = read_attention(module, cross)
    stacked = StackedLayer((SubLayer(name, layer, residual=False),))
    stack = _numbers("attention", layer.width, layers=(stacked,))
    if layer.context is None:
        return LayeredModel(name, (stack,))
    return LayeredModel(name, (_source(layer.context[0]), stack))


def _simple(name: str, module: nn.Module) -> LayeredModel | None:
    """A feed-forward layer, a norm, a matrix, a table, or loose parameters of headwise's own."""
    if isinstance(module, GatedFeedForward | nn.Sequential):
        layer = read_feed_forward(module)
        return _one(name, StackedLayer((SubLayer(name, layer, residual=False),)), layer.width)
    steps: tuple[Step, ...] | None = None
    width = 1
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        norm = read_norm(module)
        steps, width = (norm,), norm.width
    elif isinstance(module, nn.Linear):
        bias, width = module.bias is not None, module.in_features
        steps = (LinearLayer("linear", width, module.out_features, bias),)
    elif isinstance(module, nn.Embedding):
        width = module.embedding_dim
        steps = (EmbeddingLayer("embedding", module.num_embeddings, width, split=True),)
    elif isinstance(module, LearnedPosition):
        width = module.table.embedding_dim
        steps = (EmbeddingLayer("positions", module.table.num_embeddings, width, per_batch=False),)
    elif type(module).__module__.startswith("headwise.nn.") and not list(module.children()):
        steps = tuple(
            LooseWeight(label, tuple(weight.shape)) for label, weight in module.named_parameters()
        )
    if steps is None:
        return None
    looks_up = isinstance(module, nn.Embedding)
    return LayeredModel(name, (LayerStack(name, steps, width=width, reads_tokens=looks_up),))


def read_block(block: nn.Module) -> StackedLayer:
    """A Transformer block."""
    if not isinstance(block, Block):
        raise ValueError(f"{type(block).__name__} is not a hw.nn.Block, and can't be read as one")
    around = block.around_attention, block.around_feed_forward
    bodies = read_attention(block.attention), read_feed_forward(block.feed_forward)
    return StackedLayer(
        (read_residual("attention", bodies[0], around[0]),
         read_residual("feed-forward", bodies[1], around[1]))
    )  # fmt: skip


def read_residual(name: str, body: Body, around: Residual) -> SubLayer:
    """A sublayer and its residual connection."""
    norm, before = read_norm(around.norm), isinstance(around.arrangement, PreNorm)
    return SubLayer(
        name,
        body,
        before=norm if before else None,
        post=None if before else norm,
        dropout=around.dropout.p,
    )


def read_decoder_layer(layer: nn.Module) -> StackedLayer:
    """A layer of the 2017 decoder: self-attention, cross-attention, feed-forward."""
    if not isinstance(layer, DecoderLayer):
        raise ValueError(f"{type(layer).__name__} is not a layer of hw.models.Transformer")
    return StackedLayer(
        (
            read_residual("attention", read_attention(layer.attention), layer.around_attention),
            read_residual(
                "cross-attention",
                read_attention(layer.cross_attention, cross=True),
                layer.around_cross,
            ),
            read_residual(
                "feed-forward", read_feed_forward(layer.feed_forward), layer.around_feed_forward
            ),
        )
    )


def read_torch_layer(layer: nn.Module) -> StackedLayer:
    """PyTorch's encoder or decoder layer."""
    if isinstance(layer, nn.TransformerEncoderLayer):
        found = _torch_sublayers(
            layer, [layer.norm1, layer.norm2], [layer.dropout1, layer.dropout2]
        )
        return uncached(StackedLayer(found))
    if isinstance(layer, nn.TransformerDecoderLayer):
        norms = [layer.norm1, layer.norm2, layer.norm3]
        dropouts = [layer.dropout1, layer.dropout2, layer.dropout3]
        return StackedLayer(_torch_sublayers(layer, norms, dropouts))
    raise ValueError(f"{type(layer).__name__} is not one of PyTorch's Transformer layers")


def _torch_sublayers(
    layer: TorchLayer, norms: Sequence[nn.Module], dropouts: Sequence[nn.Dropout]
) -> tuple[SubLayer, ...]:
    """The sublayers of PyTorch's layers, each with its norm and its dropout."""
    up = layer.linear1
    bodies: list[tuple[str, Body]] = [("attention", _theirs(layer.self_attn))]
    if isinstance(layer, nn.TransformerDecoderLayer):
        bodies.append(("cross-attention", _theirs(layer.multihead_attn, cross=True)))
    feed_forward = FeedForwardLayer(
        up.in_features,
        up.out_features,
        _activation(layer.activation),
        bias=up.bias is not None,
        dropout=layer.dropout.p,
    )
    bodies.append(("feed-forward", feed_forward))
    found = []
    for (name, body), module, dropout in zip(bodies, norms, dropouts, strict=True):
        norm, first = read_norm(module), layer.norm_first
        before, post = (norm, None) if first else (None, norm)
        found.append(SubLayer(name, body, before=before, post=post, dropout=dropout.p))
    return tuple(found)


def uncached(layer: StackedLayer) -> StackedLayer:
    """A layer of a model that does not decode, and so keeps no keys."""
    subs = (
        replace(sub, body=replace(sub.body, caches=False))
        if isinstance(sub.body, AttentionLayer)
        else sub
        for sub in layer.sublayers
    )
    return replace(layer, sublayers=tuple(subs))


def _theirs(module: nn.Module, cross: bool = False) -> AttentionLayer:
    return read_attention(module.attention if isinstance(module, TorchCall) else module, cross)


def _activation(given: Callable[..., object]) -> Activation:
    module = ACTIVATIONS.get(type(given)) if isinstance(given, nn.Module) else None
    kind = FUNCTIONS.get(given, module)
    if kind is None:
        raise ValueError(f"activation {given!r} is unknown; use relu, gelu or silu")
    return kind


def _torch_stack(
    name: str, layers: tuple[StackedLayer, ...], norm: nn.Module | None, width: int
) -> LayeredModel:
    after: tuple[Step, ...] = () if norm is None else (read_norm(norm),)
    stack = _numbers("layers", width, layers=layers, after=after)
    crossed = any(sub.name == "cross-attention" for sub in layers[0].sublayers) if layers else False
    return LayeredModel(name, (_source(width), stack) if crossed else (stack,))


def _torch_transformer(module: nn.Transformer) -> LayeredModel:
    width = module.d_model
    stacks = []
    for name, half in (("encoder", module.encoder), ("decoder", module.decoder)):
        layers = tuple(read_torch_layer(layer) for layer in half.layers)
        after: tuple[Step, ...] = () if half.norm is None else (read_norm(half.norm),)
        stacks.append(_numbers(name, width, layers=layers, after=after))
    return LayeredModel("Transformer", tuple(stacks))


def _one(name: str, layer: StackedLayer, width: int) -> LayeredModel:
    return LayeredModel(name, (_numbers("layer", width, layers=(layer,)),))


def _numbers(
    name: str,
    width: int,
    layers: tuple[StackedLayer, ...] = (),
    after: tuple[Step, ...] = (),
) -> LayerStack:
    """A stack whose input is numbers that gradients flow back to."""
    return LayerStack(name, (), layers, after, width=width, reads_tokens=False)


def _source(width: int) -> LayerStack:
    """Another sequence, given as numbers."""
    return LayerStack("context", width=width, reads_tokens=False)


def _width(block: Block) -> int:
    layer = read_attention(block.attention)
    return layer.width
