"""A rival: gated convolutions over the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.models.config import Config
from headwise.models.generate import Greedy, Strategy, evaluating, generate
from headwise.nn.block import PreNorm, Residual
from headwise.nn.norms import LayerNorm, Norm


@dataclass(frozen=True)
class ConvConfig(Config):
    """A language model in which layer l looks `kernel` tokens back, `growth`^l apart.

    growth=1 is a plain convolution, whose reach grows by kernel - 1 a layer; growth=kernel is a
    dilated one, whose reach grows kernel-fold.
    """

    vocabulary: int
    d_model: int = 384
    layers: int = 6
    kernel: int = 3
    growth: int = 1
    norm: Norm = LayerNorm()
    tied: bool = True
    dropout: float = 0.0
    end: int | None = None

    @property
    def reach(self) -> int:
        """How many tokens, itself included, an output depends on.

        >>> ConvConfig(256, layers=3, kernel=3, growth=3).reach
        27
        """
        steps = sum(int(self.growth**layer) for layer in range(self.layers))
        return 1 + (self.kernel - 1) * steps


class GatedConvolution(nn.Module):
    """a * sigmoid(b) of a causal convolution's two halves: (B, N, d_model) -> the same."""

    def __init__(self, d_model: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation  # zeros in front, so that nothing later is seen
        self.convolution = nn.Conv1d(d_model, 2 * d_model, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.convolution(F.pad(x.transpose(1, 2), (self.before, 0)))
        return F.glu(spread, dim=1).transpose(1, 2)


class Conv(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary) of the next ones.

    >>> import torch
    >>> from headwise.models import Conv, ConvConfig
    >>> Conv(ConvConfig(vocabulary=256, d_model=64, layers=2))(torch.randint(256, (2, 10))).shape
    torch.Size([2, 10, 256])
    """

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.embedding = nn.Embedding(config.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(
            GatedConvolution(width, config.kernel, config.growth**layer)
            for layer in range(config.layers)
        )
        self.around = nn.ModuleList(
            Residual(width, PreNorm(), config.norm, config.dropout) for _ in range(config.layers)
        )
        self.norm = config.norm.build(width)
        self.head = None if config.tied else nn.Linear(width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer, around in zip(self.layers, self.around, strict=True):
            x = around(x, layer)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight)

    def generate(self, prompt: Tensor, count: int, *, strategy: Strategy = Greedy()) -> Tensor:
        """The tokens (B, <= count) that follow prompt (B, N)."""
        with evaluating(self):
            return generate(ConvDecoder(self), prompt, count, strategy, self.config.end)


class ConvDecoder:
    """A convolutional model in the middle of sequences, of which it keeps what it can still see."""

    def __init__(self, model: Conv) -> None:
        self.model = model
        self.tokens: Tensor | None = None  # (B, <= reach)

    def step(self, tokens: Tensor) -> Tensor:
        """Take in tokens (B, n); the logits (B, vocabulary) of what follows them."""
        seen = tokens if self.tokens is None else torch.cat((self.tokens, tokens), 1)
        self.tokens = seen[:, -self.model.config.reach :]
        logits: Tensor = self.model(self.tokens)[:, -1]
        return logits

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]."""
        self.tokens = None if self.tokens is None else self.tokens.index_select(0, index)
