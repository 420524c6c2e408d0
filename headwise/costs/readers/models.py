"""The models of `headwise.models`, read into architectures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from headwise import models
from headwise.costs.layers import (
    ConvolutionLayer,
    DropoutStep,
    EmbeddingLayer,
    LayeredModel,
    LayerStack,
    LinearLayer,
    LooseWeight,
    MatrixLayer,
    StackedLayer,
    Step,
    SubLayer,
)
from headwise.costs.readers.attention_modules import read_attention, read_norm
from headwise.costs.readers.modules import read_block, read_decoder_layer, uncached
from headwise.messages import say
from headwise.models.config import Config
from headwise.nn.block import Residual
from headwise.nn.positions import LearnedPosition

DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers",
    "num_decoder_layers", "layers",
)  # fmt: skip
MOST_LAYERS = 1_000


def check_depth(given: Mapping[str, Any]) -> None:
    """Raise ValueError for more layers than can be described one by one."""
    for name in DEPTHS:
        layers = given.get(name)
        if isinstance(layers, int) and layers > MOST_LAYERS:
            raise ValueError(
                say("{kind!r} has {layers:,} layers; at most {most:,} are counted",
                    kind=str(given.get("model_type", "?")), layers=layers, most=MOST_LAYERS)
            )  # fmt: skip
        if isinstance(layers, int) and layers < 0:
            raise ValueError(
                say("{kind!r} has {name}={value!r}; it must be a positive integer",
                    kind=str(given.get("model_type", "?")), name=name, value=layers)
            )  # fmt: skip


BUILT: dict[type[Config], Callable[[Any], nn.Module]] = {
    models.GPTConfig: models.GPT,
    models.FixedGPTConfig: models.FixedGPT,
    models.BertConfig: models.Bert,
    models.ViTConfig: models.ViT,
    models.TransformerConfig: models.Transformer,
    models.ConvConfig: models.Conv,
    models.LSTMConfig: models.LSTM,
}


def read_model(model: nn.Module) -> LayeredModel | None:
    """The architecture of one of headwise's models; None for any other."""
    for kind, reader in READERS:
        if isinstance(model, kind):
            return reader(model)
    return None


def read_config(config: Config) -> LayeredModel:
    """The architecture of the model that a configuration describes."""
    depths = {f"{place}layers" for place in ("", "encoder_", "decoder_")}
    check_depth({"model_type": type(config).__name__.removesuffix("Config"),
                 **{name: getattr(config, name, None) for name in depths}})  # fmt: skip
    try:
        with torch.device("meta"):
            model = BUILT[type(config)](config)
    except (RuntimeError, OverflowError, TypeError) as error:  # torch refuses such sizes
        reason = str(error).splitlines()[0]
        raise ValueError(
            say("{config} has sizes that no tensor has: {reason}", config=repr(config)[:200],
                reason=reason)
        ) from None  # fmt: skip
    found = read_model(model)
    assert found is not None
    return found


def _embedding(module: nn.Embedding, tied: bool = False) -> EmbeddingLayer:
    rows, width = module.num_embeddings, module.embedding_dim
    return EmbeddingLayer("embedding", rows, width, tied=tied, split=True)


def _head(width: int, vocabulary: int, tied: bool, bias: bool = False) -> Step:
    return LinearLayer("head", width, vocabulary, bias, tied, split="columns")


def _position(module: nn.Module | None, dropout: float) -> tuple[Step, ...]:
    steps: list[Step] = []
    if isinstance(module, LearnedPosition):
        rows, width = module.table.num_embeddings, module.table.embedding_dim
        steps.append(EmbeddingLayer("positions", rows, width, per_batch=False))
    return (*steps, DropoutStep(dropout))


def _gpt(model: models.GPT) -> LayeredModel:
    config = model.config
    longest = None
    if isinstance(model.position, LearnedPosition):
        longest = model.position.table.num_embeddings
    if isinstance(config, models.FixedGPTConfig):
        longest = config.context
    stack = LayerStack(
        "decoder",
        (_embedding(model.embedding), *_position(model.position, config.dropout)),
        tuple(read_block(block) for block in model.blocks),
        (
            read_norm(model.norm),
            _head(config.d_model, config.vocabulary, model.head is None),
        ),
        longest=longest,
        width=config.d_model,
    )
    return LayeredModel(type(model).__name__, (stack,))


def _bert(model: models.Bert) -> LayeredModel:
    config, width = model.config, model.config.d_model
    stack = LayerStack(
        "encoder",
        (
            _embedding(model.embedding),
            EmbeddingLayer("positions", config.context, width, per_batch=False),
            EmbeddingLayer("segments", config.segments, width),
            read_norm(model.norm),
            DropoutStep(config.dropout),
        ),
        tuple(uncached(read_block(block)) for block in model.blocks),
        (
            LinearLayer("readout", width, width, True, activation="gelu"),
            read_norm(model.readout_norm),
            _head(width, config.vocabulary, tied=True, bias=True),
        ),
        longest=config.context,
        width=width,
    )
    return LayeredModel("Bert", (stack,))


def _vit(model: models.ViT) -> LayeredModel:
    config, width = model.config, model.config.d_model
    patches, tokens = config.patches, config.patches + 1
    stack = LayerStack(
        "encoder",
        (
            ConvolutionLayer(
                "patches",
                config.channels,
                width,
                config.patch**2,
                tokens=patches,
                entries=config.channels * config.image**2,
                learns_input=False,
            ),
            LooseWeight("class token", (1, 1, width)),
            LooseWeight("positions", (1, tokens, width)),
            DropoutStep(config.dropout),
        ),
        tuple(uncached(read_block(block)) for block in model.blocks),
        (
            read_norm(model.norm),
            LinearLayer("head", width, config.classes, True, first_only=True),
        ),
        tokens=tokens,
        width=width,
    )
    return LayeredModel("ViT", (stack,))


def _transformer(model: models.Transformer) -> LayeredModel:
    config, width = model.config, model.config.d_model
    inputs = _position(model.position, config.dropout)
    norms = [
        () if isinstance(norm, nn.Identity) else (read_norm(norm),)
        for norm in (model.encoder_norm, model.decoder_norm)
    ]
    tied = model.target_embedding is None
    target = model.embedding if model.target_embedding is None else model.target_embedding
    longest = None
    if isinstance(model.position, LearnedPosition):
        longest = model.position.table.num_embeddings
    positions = tuple(_shared(step) for step in inputs)  # one table for both
    encoder = LayerStack(
        "encoder",
        (_embedding(model.embedding), *inputs),
        tuple(uncached(read_block(block)) for block in model.encoder),
        norms[0],
        longest=longest,
        width=width,
    )
    decoder = LayerStack(
        "decoder",
        (_embedding(target, tied), *positions),
        tuple(read_decoder_layer(layer) for layer in model.decoder),
        (*norms[1], _head(width, config.vocabulary, tied)),
        longest=longest,
        width=width,
    )
    return LayeredModel("Transformer", (encoder, decoder))


def _shared(step: Step) -> Step:
    return replace(step, tied=True) if isinstance(step, EmbeddingLayer) else step


def _conv(model: models.Conv) -> LayeredModel:
    config, width = model.config, model.config.d_model
    layers = []
    for number, around in enumerate(model.around):
        assert isinstance(around, Residual)
        padding = (config.kernel - 1) * config.growth**number
        body = ConvolutionLayer(
            "convolution", width, width, config.kernel, padding=padding, gated=True
        )
        norm = read_norm(around.norm)
        sub = SubLayer("convolution", body, before=norm, dropout=config.dropout)
        layers.append(StackedLayer((sub,)))
    stack = LayerStack(
        "decoder",
        (_embedding(model.embedding),),
        tuple(layers),
        (read_norm(model.norm), _head(width, config.vocabulary, model.head is None)),
        width=width,
    )
    return LayeredModel("Conv", (stack,))


def _lstm(model: models.LSTM) -> LayeredModel:
    config, width = model.config, model.config.d_model
    half, seen = width // 2, 0 if model.attention is None else width
    reading = []
    for number in range(config.layers):
        matrices = []
        for direction in ("forwards", "backwards"):
            matrices += [
                LinearLayer(f"input {direction}", width, 4 * half, True),
                LinearLayer(f"state {direction}", half, 4 * half, True),
            ]
        body = MatrixLayer(f"LSTM {number}", width, tuple(matrices))
        reading.append(StackedLayer((SubLayer("LSTM", body, residual=False),)))
    cell = MatrixLayer(
        "LSTM cell",
        width,
        (
            LinearLayer("input", width + seen, 4 * width, True),
            LinearLayer("state", width, 4 * width, True),
        ),
        2 * width,
    )
    writing = [SubLayer("cell", cell, residual=False)]
    if model.attention is not None:
        layer = read_attention(model.attention, cross=True)
        writing.insert(0, SubLayer("attention", layer, residual=False))
    encoder = LayerStack(
        "reader",
        (_embedding(model.embedding), DropoutStep(config.dropout)),
        tuple(reading),
        (
            LinearLayer(
                "first hidden", width, width, True, activation="tanh", first_only=True, aside=True
            ),
            LinearLayer(
                "first cell", width, width, True, activation="tanh", first_only=True, aside=True
            ),
        ),
        width=width,
    )
    decoder = LayerStack(
        "writer",
        (_embedding(model.embedding, tied=True), DropoutStep(config.dropout)),
        (StackedLayer(tuple(writing)),),
        (
            LinearLayer("readout", 2 * width + seen, width, True, activation="tanh"),
            DropoutStep(config.dropout),
            _head(width, config.vocabulary, tied=True),
        ),
        width=width,
    )
    return LayeredModel("LSTM", (encoder, decoder))


READERS: tuple[tuple[type[nn.Module], Callable[[Any], LayeredModel]], ...] = (
    (models.GPT, _gpt),
    (models.Bert, _bert),
    (models.ViT, _vit),
    (models.Transformer, _transformer),
    (models.Conv, _conv),
    (models.LSTM, _lstm),
)
