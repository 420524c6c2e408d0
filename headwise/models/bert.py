"""BERT: an encoder that fills in masked words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import mask as masks
from headwise.checks import Count, Rate, Size, check_integers, check_kind
from headwise.core.intervals import Mask
from headwise.handover import held_positions
from headwise.models.config import Config
from headwise.nn.block import Block, PostNorm
from headwise.nn.feed_forward import GELU, FeedForward
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import LayerNorm, Norm


@dataclass(frozen=True)
class BertConfig(Config):
    """Sequences of up to `context` tokens in up to `segments` parts; the defaults are BERT base."""

    vocabulary: Size = 30522
    context: Size = 512
    segments: Size = 2
    d_model: Size = 768
    layers: Count = 12
    heads: Size = 12
    feed_forward: FeedForward = GELU(3072)
    norm: Norm = LayerNorm(1e-12)
    dropout: Rate = 0.1
    attention_dropout: Rate = 0.0

    def block(self) -> Block:
        """One layer of this model."""
        return Block(
            self.d_model,
            MultiHeadAttention(self.d_model, self.heads, dropout=self.attention_dropout),
            self.feed_forward.build(self.d_model),
            norm=self.norm,
            arrangement=PostNorm(),
            dropout=self.dropout,
        )


class Bert(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary) of the original words.

    >>> import torch
    >>> from headwise.models import Bert, BertConfig
    >>> model = Bert(BertConfig(vocabulary=100, d_model=32, layers=2, heads=4))
    >>> model(torch.randint(100, (2, 10)), lengths=torch.tensor([10, 6])).shape
    torch.Size([2, 10, 100])
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        check_kind("config", config, BertConfig, "BertConfig()")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        self.positions = nn.Embedding(config.context, config.d_model)
        self.segments = nn.Embedding(config.segments, config.d_model)
        self.norm = config.norm.build(config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.layers))
        # The output layer is the embedding, after one more linear layer.
        self.readout = nn.Linear(config.d_model, config.d_model)
        self.readout_norm = config.norm.build(config.d_model)
        self.readout_bias = nn.Parameter(torch.zeros(config.vocabulary))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as BERT does: normal weights, biases zero."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """Logits (B, N, vocabulary); `lengths` (B,) hides padding, `segments` (B, N) are parts."""
        x = self.features(tokens, lengths=lengths, segments=segments, mask=mask)
        x = self.readout_norm(F.gelu(self.readout(x)))
        return F.linear(x, self.embedding.weight, self.readout_bias)

    def features(
        self,
        tokens: Tensor,
        *,
        lengths: Tensor | None = None,
        segments: Tensor | None = None,
        mask: Mask | None = None,
    ) -> Tensor:
        """The output of the last block for tokens (B, N): (B, N, d_model)."""
        check_integers("tokens", tokens, 0, self.config.vocabulary - 1, "batch", "length")
        at, count = held_positions(tokens.shape[1], tokens.device)
        context = self.config.context
        if count > context:
            raise ValueError(
                f"{count} tokens are more than this model takes; its config has context={context}"
            )
        if lengths is not None:
            unpadded = masks.lengths(lengths)
            mask = unpadded if mask is None else unpadded & mask
        part = torch.zeros_like(tokens) if segments is None else segments
        check_integers("segments", part, 0, self.config.segments - 1, *tokens.shape)
        x = self.embedding(tokens) + self.positions(at) + self.segments(part)
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x, mask=mask)
        out: Tensor = x
        return out
