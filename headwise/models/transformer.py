"""The Transformer of the 2017 paper: an encoder, a decoder, and attention between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import mask as masks
from headwise.checks import Count, Positive, Rate, Size, check_integers, check_kind
from headwise.core.intervals import Mask
from headwise.handover import held_positions
from headwise.models.config import Config
from headwise.models.generate import Beam, Strategy, evaluating, generate
from headwise.nn.block import Arrangement, Block, PostNorm, PreNorm, Residual
from headwise.nn.caches.cache import (
    Cache,
    GrowingCache,
    Memory,
    check_cache,
    check_caches,
    rollback_to_shortest,
)
from headwise.nn.feed_forward import FeedForward, ReLU
from headwise.nn.layer_options import Projections, Separate
from headwise.nn.learned_scores import LearnedScore
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import LayerNorm, Norm
from headwise.nn.positions import Position, Sinusoidal
from headwise.score import Dot, Score


@dataclass(frozen=True)
class TransformerConfig(Config):
    """A translator with one `vocabulary`; the defaults are the paper's base model.

    With 37,000 tokens it has 63.1 million parameters (the paper prints 65). `tied` shares one
    matrix between both embeddings and the output. `value_dim` is `head_dim` unless it is given.
    """

    vocabulary: Size
    d_model: Size = 512
    encoder_layers: Count = 6
    decoder_layers: Count = 6
    heads: Size = 8
    kv_heads: Size | None = None
    head_dim: Size | None = None
    value_dim: Size | None = None
    position: Position | None = Sinusoidal()
    feed_forward: FeedForward = ReLU(2048)
    arrangement: Arrangement = PostNorm()
    norm: Norm = LayerNorm()
    qk_norm: Norm | None = None
    projections: Projections = Separate()
    score: Score | LearnedScore = Dot()
    softcap: Positive | None = None
    bias: bool = True
    tied: bool = True
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0
    padding: Count = 0
    start: Count = 1
    end: int = 2

    def attention(self, mask: Mask | None = None, positions: bool = True) -> MultiHeadAttention:
        """One attention layer of this model, with or without `positions`."""
        position = self.position if positions and self.position else None
        return MultiHeadAttention(
            self.d_model,
            self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            bias=self.bias,
            projections=self.projections,
            score=self.score,
            position=None if position is None or position.at_input else position,
            qk_norm=self.qk_norm,
            mask=mask,
            softcap=self.softcap,
            dropout=self.attention_dropout,
        )

    def residual(self) -> Residual:
        """The residual connection around one sublayer of this model."""
        return Residual(self.d_model, self.arrangement, self.norm, self.dropout)

    def encoder_block(self) -> Block:
        """One layer of the encoder: every source token attends to every other."""
        return Block(
            self.d_model,
            self.attention(),
            self.feed_forward.build(self.d_model, self.bias),
            norm=self.norm,
            arrangement=self.arrangement,
            dropout=self.dropout,
        )


class DecoderLayer(nn.Module):
    """Target tokens attend to the target so far, then to the source: (B, T, d_model)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = config.attention(masks.causal())
        self.cross_attention = config.attention(positions=False)
        self.feed_forward = config.feed_forward.build(config.d_model, config.bias)
        self.around_attention, self.around_cross = config.residual(), config.residual()
        self.around_feed_forward = config.residual()

    def forward(
        self,
        x: Tensor,
        source: Tensor | Memory,
        mask: Mask | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x = self.around_attention(x, lambda y: self.attention(y, cache=cache))
        x = self.around_cross(x, lambda y: self.cross_attention(y, source, mask=mask))
        out: Tensor = self.around_feed_forward(x, self.feed_forward)
        return out


class Transformer(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, vocabulary) of the target's next tokens.

    >>> import torch
    >>> from headwise.models import Transformer, TransformerConfig
    >>> config = TransformerConfig(100, d_model=32, encoder_layers=2, decoder_layers=2, heads=4)
    >>> model = Transformer(config)
    >>> source, target = torch.randint(3, 100, (2, 7)), torch.randint(3, 100, (2, 5))
    >>> model(source, target, source_lengths=torch.tensor([7, 4])).shape
    torch.Size([2, 5, 100])
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        check_kind("config", config, TransformerConfig, "TransformerConfig(vocabulary=256)")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.target_embedding = self.head = None
        if not config.tied:
            self.target_embedding = nn.Embedding(config.vocabulary, config.d_model)
            self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        position = config.position
        self.position = None
        if position is not None and position.at_input:
            self.position = position.build(config.d_model, config.heads, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(config.encoder_block() for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        last = isinstance(
            config.arrangement, PreNorm
        )  # the last layer's sum is not normed otherwise
        self.encoder_norm = config.norm.build(config.d_model) if last else nn.Identity()
        self.decoder_norm = config.norm.build(config.d_model) if last else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform weights; embeddings with a variance of one after × √d_model."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for embedding in (self.embedding, self.target_embedding):
            if embedding is not None:
                nn.init.normal_(embedding.weight, std=self.config.d_model**-0.5)

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        encoded = self.encode(source, source_lengths)
        return self.decode(target, [encoded] * len(self.decoder), source_lengths)

    def encode(self, source: Tensor, source_lengths: Tensor | None = None) -> Tensor:
        """source (B, S) -> (B, S, d_model)."""
        check_integers("source", source, 0, self.config.vocabulary - 1, "batch", "length")
        mask = None if source_lengths is None else masks.lengths(source_lengths)
        x = self._embedded(source, self.embedding, 0)
        for layer in self.encoder:
            x = layer(x, mask=mask)
        out: Tensor = self.encoder_norm(x)
        return out

    def decode(
        self,
        target: Tensor,
        memories: Sequence[Tensor | Memory],
        source_lengths: Tensor | None = None,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """target (B, T) and, per layer, the encoded source -> logits (B, T, vocabulary)."""
        check_integers("target", target, 0, self.config.vocabulary - 1, "batch", "length")
        check_caches(caches, len(self.decoder))
        mask = None if source_lengths is None else masks.lengths(source_lengths)
        embedding = self.embedding if self.target_embedding is None else self.target_embedding
        x = self._embedded(target, embedding, 0 if not caches else caches[0].length)
        try:
            for number, layer in enumerate(self.decoder):
                x = layer(x, memories[number], mask, None if caches is None else caches[number])
        except Exception:  # a pool without pages, say, after some layers have taken theirs
            rollback_to_shortest(caches or ())
            raise
        x = self.decoder_norm(x)
        return F.linear(x, self.embedding.weight) if self.head is None else self.head(x)

    def _embedded(self, tokens: Tensor, embedding: nn.Embedding, start: int | Tensor) -> Tensor:
        x = embedding(tokens) * self.config.d_model**0.5
        if self.position is not None:
            positions = held_positions(tokens.shape[1], tokens.device)[0] + start
            x = self.position.add(x, positions)
        out: Tensor = self.dropout(x)
        return out

    def generate(
        self,
        source: Tensor,
        count: int,
        *,
        source_lengths: Tensor | None = None,
        strategy: Strategy = Beam(),
        cache: Cache | None = GrowingCache(),
    ) -> Tensor:
        """Translate source (B, S) into at most `count` tokens (B, T); `end` follows the last one.

        Each layer gets a fresh cache like `cache`; None recomputes everything for every token.
        """
        check_cache(cache)
        check_integers("source", source, 0, self.config.vocabulary - 1, "batch", "length")
        if source_lengths is not None:
            check_integers("source_lengths", source_lengths, 0, source.shape[1], source.shape[0])
        with evaluating(self), torch.no_grad():
            decoder = TransformerDecoder(self, source, source_lengths, cache)
            start = torch.full_like(source[:, :1], self.config.start)
            return generate(decoder, start, count, strategy, self.config.end)


class TransformerDecoder:
    """A Transformer that has read its sources and generates its targets."""

    def __init__(
        self, model: Transformer, source: Tensor, lengths: Tensor | None, cache: Cache | None
    ) -> None:
        self.model, self.lengths = model, lengths
        encoded = model.encode(source, lengths)
        layers = [layer for layer in model.decoder if isinstance(layer, DecoderLayer)]
        self.memories = [layer.cross_attention.remember(encoded) for layer in layers]
        self.caches = None if cache is None else [cache.fresh() for _ in model.decoder]
        self.tokens: Tensor | None = None  # (B, n), all of them

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) and return the logits (B, vocabulary) of the next ones."""
        self.tokens = tokens if self.tokens is None else torch.cat((self.tokens, tokens), 1)
        tokens = tokens if self.caches is not None else self.tokens
        return self.model.decode(tokens, self.memories, self.lengths, self.caches)[:, -1]

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]."""
        for cache in self.caches or ():
            cache.reorder(index)
        self.memories = [memory.reorder(index) for memory in self.memories]
        self.lengths = None if self.lengths is None else self.lengths.index_select(0, index)
        self.tokens = None if self.tokens is None else self.tokens.index_select(0, index)
