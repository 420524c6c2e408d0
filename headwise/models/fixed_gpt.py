"""An alternative: a GPT whose attention weights are learned directly and ignore the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headwise import mask as masks
from headwise.checks import Count, Rate, Size, check_integers
from headwise.models.config import Config
from headwise.models.generate import Greedy, Strategy
from headwise.models.gpt import GPT
from headwise.nn.block import Block
from headwise.nn.caches.cache import Cache, GrowingCache
from headwise.nn.feed_forward import FeedForward, SwiGLU
from headwise.nn.fixed_weights import FixedAttention
from headwise.nn.norms import Norm, RMSNorm


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
