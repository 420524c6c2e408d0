"""GPT: a decoder-only language model, from GPT-2's architecture to today's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import mask as masks
from headwise.checks import Count, Positive, Rate, Size, check_integers, check_kind
from headwise.core.intervals import Mask
from headwise.handover import held_positions
from headwise.models.config import Config
from headwise.models.generate import Greedy, Strategy, evaluating, generate
from headwise.nn.block import Block
from headwise.nn.caches.cache import (
    Cache,
    GrowingCache,
    check_cache,
    check_caches,
    rollback_to_shortest,
)
from headwise.nn.call import check_positions
from headwise.nn.feed_forward import FeedForward, SwiGLU
from headwise.nn.fixed_weights import FixedAttention
from headwise.nn.layer_options import Projections, Separate
from headwise.nn.learned_scores import LearnedScore
from headwise.nn.multi_head import MultiHeadAttention
from headwise.nn.norms import Norm, RMSNorm
from headwise.nn.positions import Position
from headwise.nn.rotary import Rotary
from headwise.score import Dot, Score


@dataclass(frozen=True)
class GPTConfig(Config):
    """A language model over `vocabulary` tokens, trained on sequences of `context` tokens.

    `window` limits every layer to the last tokens; `tied` reuses the embedding as output layer.
    """

    vocabulary: Size
    context: Size = 1024
    d_model: Size = 384
    layers: Count = 6
    heads: Size = 6
    kv_heads: Size | None = None
    head_dim: Size | None = None
    position: Position | None = Rotary()
    feed_forward: FeedForward = SwiGLU(1024)
    norm: Norm = RMSNorm()
    qk_norm: Norm | None = None
    projections: Projections = Separate()
    score: Score | LearnedScore = Dot()
    softcap: Positive | None = None
    sinks: bool = False
    window: Size | None = None
    bias: bool = False
    tied: bool = True
    dropout: Rate = 0.0
    attention_dropout: Rate = 0.0
    end: int | None = None

    def block(self) -> Block:
        """One layer of this model."""
        inside = self.position if self.position and not self.position.at_input else None
        causal = masks.causal()
        attention = MultiHeadAttention(
            self.d_model,
            self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            bias=self.bias,
            projections=self.projections,
            score=self.score,
            position=inside,
            qk_norm=self.qk_norm,
            mask=causal if self.window is None else causal & masks.window(self.window - 1),
            softcap=self.softcap,
            sinks=self.sinks,
            dropout=self.attention_dropout,
        )
        feed_forward = self.feed_forward.build(self.d_model, self.bias)
        return Block(self.d_model, attention, feed_forward, norm=self.norm, dropout=self.dropout)


@runtime_checkable
class LanguageConfig(Protocol):
    """The part of a configuration that a GPT reads: a few numbers, and how to make one layer."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def position(self) -> Position | None: ...
    @property
    def norm(self) -> Norm: ...
    @property
    def tied(self) -> bool: ...
    @property
    def dropout(self) -> float: ...
    @property
    def end(self) -> int | None: ...
    def block(self) -> Block: ...


class GPT(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary) of the next tokens.

    >>> import torch
    >>> from headwise.models import GPT, GPTConfig
    >>> model = GPT(GPTConfig(vocabulary=256, d_model=64, layers=2, heads=4))
    >>> model(torch.randint(256, (2, 10))).shape
    torch.Size([2, 10, 256])
    >>> model.generate(torch.randint(256, (2, 10)), 5).shape
    torch.Size([2, 5])
    """

    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        check_kind("config", config, LanguageConfig, "GPTConfig(vocabulary=256)")
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.d_model)
        position = config.position
        self.position = None
        if position is not None and position.at_input:
            self.position = position.build(config.d_model, config.heads, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(config.block() for _ in range(config.layers))
        self.norm = config.norm.build(config.d_model)
        self.head = None
        if not config.tied:
            self.head = nn.Linear(config.d_model, config.vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as GPT-2 does: normal weights, smaller with depth where a sublayer ends."""
        deep = 0.02 / (2 * max(1, self.config.layers)) ** 0.5
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                ends = name.endswith(("attention.out", "feed_forward.2", "feed_forward.down"))
                nn.init.normal_(module.weight, std=deep if ends else 0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        caches: Sequence[Cache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, N, vocabulary); mask=hw.mask.documents(ids) keeps packed documents apart."""
        return self.logits(self.features(tokens, mask=mask, caches=caches, positions=positions))

    def features(
        self,
        tokens: Tensor,
        *,
        mask: Mask | None = None,
        caches: Sequence[Cache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The normed output of the last block for tokens (B, N): (B, N, d_model)."""
        check_integers("tokens", tokens, 0, self.config.vocabulary - 1, "batch", "length")
        check_caches(caches, len(self.blocks))
        x = self.embedding(tokens)
        if self.position is not None:
            if positions is None:
                start = 0 if not caches else caches[0].length
                positions = held_positions(tokens.shape[1], tokens.device)[0] + start
            check_positions(self.position, x, positions)
            x, positions = self.position.add(x, positions), None
        x = self.dropout(x)
        try:
            for layer, block in enumerate(self.blocks):
                cache = None if caches is None else caches[layer]
                x = block(x, mask=mask, cache=cache, positions=positions)
        except Exception:  # a pool without pages, say, after some layers have taken theirs
            rollback_to_shortest(caches or ())
            raise
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, features: Tensor) -> Tensor:
        """The output layer: (..., d_model) -> (..., vocabulary)."""
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(features, weight)

    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        strategy: Strategy = Greedy(),
        lengths: Tensor | None = None,
        cache: Cache | None = GrowingCache(),
    ) -> Tensor:
        """The tokens (B, <= count) that follow prompt (B, N), of which `lengths` (B,) count.

        Each layer gets a fresh cache like `cache`; None recomputes everything for every token.
        """
        vocabulary = self.config.vocabulary
        check_integers("prompt", prompt, 0, vocabulary - 1, "batch", "length", wait=True)
        check_cache(cache)
        if lengths is not None:
            check_integers("lengths", lengths, 1, prompt.shape[1], prompt.shape[0], wait=True)
        with evaluating(self):
            padding = None if lengths is None else prompt.shape[1] - lengths
            prompt = prompt if lengths is None else _left_padded(prompt, lengths)
            decoder = GPTDecoder(self, cache, padding)
            return generate(decoder, prompt, count, strategy, self.config.end)


class GPTDecoder:
    """A GPT that generates, for sequences that start after `padding` (B,) tokens."""

    def __init__(self, model: GPT, cache: Cache | None, padding: Tensor | None = None) -> None:
        self.model, self.padding = model, padding
        self.caches = None if cache is None else [cache.fresh() for _ in model.blocks]
        self.tokens: Tensor | None = None  # (B, n), all of them
        self._rotates = isinstance(model.config.position, Rotary)

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) and return the logits (B, vocabulary) of the next ones."""
        before = 0 if self.tokens is None else self.tokens.shape[1]
        self.tokens = tokens if self.tokens is None else torch.cat((self.tokens, tokens), 1)
        if self.caches is None:
            tokens, before = self.tokens, 0
        mask = positions = None
        if self.padding is not None:
            start = self.padding[:, None, None]
            mask = masks.between(start, torch.full_like(start, torch.iinfo(torch.int32).max))
            indices = torch.arange(before, before + tokens.shape[1], device=tokens.device)
            if self._rotates or self.model.position is not None:
                positions = (indices - self.padding[:, None]).clamp_min(0)
        features = self.model.features(tokens, mask=mask, caches=self.caches, positions=positions)
        return self.model.logits(features[:, -1])

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]."""
        for cache in self.caches or ():
            cache.reorder(index)
        self.tokens = None if self.tokens is None else self.tokens.index_select(0, index)
        self.padding = None if self.padding is None else self.padding.index_select(0, index)


def _left_padded(prompt: Tensor, lengths: Tensor) -> Tensor:
    """Move the first lengths[b] tokens of each row of prompt (B, N) to its right end."""
    longest = prompt.shape[1]
    column = torch.arange(longest, device=prompt.device) - (longest - lengths)[:, None]
    return prompt.gather(1, column % longest)


@dataclass(frozen=True)
class FixedGPTConfig(Config):
    """A language model of up to `context` tokens with one learned weight per pair of positions."""

    vocabulary: Size
    context: Size = 256
    d_model: Size = 384
    layers: Count = 6
    heads: Size = 6
    feed_forward: FeedForward = SwiGLU(1024)
    norm: Norm = RMSNorm()
    bias: bool = False
    tied: bool = True
    dropout: Rate = 0.0
    end: int | None = None
    position: ClassVar[None] = None  # each position has its own weights

    def block(self) -> Block:
        """One layer of this model."""
        attention = FixedAttention(
            self.d_model, self.heads, self.context, bias=self.bias, mask=masks.causal()
        )
        feed_forward = self.feed_forward.build(self.d_model, self.bias)
        return Block(self.d_model, attention, feed_forward, norm=self.norm, dropout=self.dropout)


class FixedGPT(GPT):
    """tokens (B, N), N <= context -> logits (B, N, vocabulary) of the next tokens.

    >>> import torch
    >>> from headwise.models import FixedGPT, FixedGPTConfig
    >>> config = FixedGPTConfig(vocabulary=256, context=32, d_model=64, layers=2, heads=4)
    >>> FixedGPT(config)(torch.randint(256, (2, 10))).shape
    torch.Size([2, 10, 256])
    """

    def generate(
        self,
        prompt: Tensor,
        count: int,
        *,
        strategy: Strategy = Greedy(),
        lengths: Tensor | None = None,
        cache: Cache | None = GrowingCache(),
    ) -> Tensor:
        """The tokens (B, <= count) that follow prompt (B, N), whose prompts have one length."""
        vocabulary = self.config.vocabulary
        check_integers("prompt", prompt, 0, vocabulary - 1, "batch", "length", wait=True)
        if lengths is not None:
            check_integers("lengths", lengths, 1, prompt.shape[1], prompt.shape[0], wait=True)
        if lengths is not None and not bool((lengths == prompt.shape[1]).all()):
            raise ValueError(
                f"prompts of lengths {lengths.tolist()} would be at different positions, which "
                "have different weights; generate for prompts of one length at a time"
            )
        return super().generate(prompt, count, strategy=strategy, cache=cache)
