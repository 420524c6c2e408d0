"""A decoder described by a few numbers, for costs of models that do not exist yet."""

from __future__ import annotations

from dataclasses import dataclass

from headwise import nn
from headwise.messages import Sentence, say
from headwise.models.gpt import GPTConfig


@dataclass(frozen=True)
class Sketch:
    """A decoder as most are today: RMSNorm, SwiGLU, rotary positions, no biases.

    Heads have width / heads entries, and the feed-forward is 8/3 of the width, in whole 64s, if
    nothing else is given: three matrices of that size have as many parameters as two of 4·width.

    >>> Sketch(layers=2, width=512, heads=8).config().feed_forward
    SwiGLU(width=1408)
    """

    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int | None = None
    vocabulary: int = 32_000
    window: int | None = None
    tied: bool = False

    @property
    def feed_forward(self) -> int:
        """The width of the feed-forward."""
        return self.hidden or -(-8 * self.width // 192) * 64

    def config(self) -> GPTConfig:
        """The configuration; ValueError if its numbers contradict each other."""
        if self.head_dim is None and self.width % self.heads:
            raise ValueError(
                say(
                    "a width of {width} is not divisible by {heads} heads; give the width of a "
                    "head too",
                    width=self.width,
                    heads=self.heads,
                )
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(
                say(
                    "{heads} heads can't share {kv_heads} key heads evenly; use a divisor of "
                    "{heads}",
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                )
            )
        return GPTConfig(
            vocabulary=self.vocabulary,
            d_model=self.width,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            feed_forward=nn.SwiGLU(self.feed_forward),
            window=self.window,
            tied=self.tied,
        )

    @property
    def name(self) -> Sentence:
        """Its numbers in a line."""
        shared = say(" on {count} key heads", count=self.kv_heads) if self.kv_heads else ""
        window = say(", window {keys:,}", keys=self.window) if self.window else ""
        return say(
            "{layers} layers of {width:,}, {heads} heads{shared}, feed-forward {hidden:,}, "
            "vocabulary {vocabulary:,}{window}",
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            shared=shared,
            hidden=self.feed_forward,
            vocabulary=self.vocabulary,
            window=window,
        )
