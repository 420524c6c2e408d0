"""A rival: a GPT whose attention weights are learned directly, whatever the text says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headwise import mask as masks
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
    """A language model for up to `context` tokens: each pair of them has a weight of its own."""

    vocabulary: int
    context: int = 256
    d_model: int = 384
    layers: int = 6
    heads: int = 6
    feed_forward: FeedForward = SwiGLU(1024)
    norm: Norm = RMSNorm()
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    end: int | None = None
    position: ClassVar[None] = None  # the weights know where everything stands

    def block(self) -> Block:
        """One layer of this model."""
        attention = FixedAttention(
            self.d_model, self.heads, self.context, bias=self.bias, mask=masks.causal()
        )
        feed_forward = self.feed_forward.build(self.d_model, self.bias)
        return Block(self.d_model, attention, feed_forward, norm=self.norm, dropout=self.dropout)


class FixedGPT(GPT):
    """tokens (B, N), N <= context -> logits (B, N, vocabulary) of the next ones.

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
        """The tokens (B, <= count) that follow prompt (B, N); all prompts are equally long."""
        if lengths is not None and not bool((lengths == prompt.shape[1]).all()):
            raise ValueError(
                f"prompts of lengths {lengths.tolist()} would stand at different positions, each "
                "with weights of its own; generate after prompts of one length at a time"
            )
        return super().generate(prompt, count, strategy=strategy, cache=cache)
