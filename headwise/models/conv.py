"""An alternative to attention: gated convolutions over the tokens so far."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.checks import Count, Rate, Size, check_integers, check_kind
from headwise.models.config import Config
from headwise.models.generate import Greedy, Strategy, evaluating, generate
from headwise.nn.block import PreNorm, Residual
from headwise.nn.norms import LayerNorm, Norm


@dataclass(frozen=True)
class ConvConfig(Config):
    """A language model in which layer l sees `kernel` tokens that are `growth`^l apart.

    growth=1 is a plain convolution, whose reach grows by kernel - 1 per layer; growth=kernel is a
    dilated one, whose reach is multiplied by kernel.
    """

    vocabulary: Size
    d_model: Size = 384
    layers: Count = 6
    kernel: Size = 3
    growth: Size = 1
    norm: Norm = LayerNorm()
    tied: bool = True
    dropout: Rate = 0.0
    end: int | None = None

    @property
    def reach(self) -> int:
        """The number of tokens, itself included, that an output depends on.

        >>> ConvConfig(256, layers=3, kernel=3, growth=3).reach
        27
        """
        steps = sum(int(self.growth**layer) for layer in range(self.layers))
        return 1 + (self.kernel - 1) * steps


class GatedConvolution(nn.Module):
    """a * sigmoid(b), where a and b are the halves of a causal convolution: (B, N, d_model)."""

    def __init__(self, d_model: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.before = (kernel - 1) * dilation  # zeros in front, so no later token is seen
        self.convolution = nn.Conv1d(d_model, 2 * d_model, kernel, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.convolution(F.pad(x.transpose(1, 2), (self.before, 0)))
        return F.glu(spread, dim=1).transpose(1, 2)


class Conv(nn.Module):
    """tokens (B, N) -> logits (B, N, vocabulary) of the next tokens.

    >>> import torch
    >>> from headwise.models import Conv, ConvConfig
    >>> Conv(ConvConfig(vocabulary=256, d_model=64, layers=2))(torch.randint(256, (2, 10))).shape
    torch.Size([2, 10, 256])
    """

    def __init__(self, config: ConvConfig) -> None:
        super().__init__()
        check_kind("config", config, ConvConfig, "ConvConfig(vocabulary=256)")
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
        check_integers("tokens", tokens, 0, self.config.vocabulary - 1, "batch", "length")
        if tokens.shape[1] == 0:
            raise ValueError(f"tokens {tuple(tokens.shape)} must have a length of at least 1")
        x = self.embedding(tokens)
        for layer, around in zip(self.layers, self.around, strict=True):
            x = around(x, layer)
        weight = self.embedding.weight if self.head is None else self.head.weight
        return F.linear(self.norm(x), weight)

    def generate(self, prompt: Tensor, count: int, *, strategy: Strategy = Greedy()) -> Tensor:
        """The tokens (B, <= count) that follow prompt (B, N)."""
        check_integers("prompt", prompt, 0, self.config.vocabulary - 1, "batch", "length")
        with evaluating(self):
            return generate(ConvDecoder(self), prompt, count, strategy, self.config.end)


class ConvDecoder:
    """A `Conv` that generates, with the last tokens of each sequence, as many as it can see."""

    def __init__(self, model: Conv) -> None:
        self.model = model
        self.tokens: Tensor | None = None  # (B, <= reach)

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) and return the logits (B, vocabulary) of the next ones."""
        seen = tokens if self.tokens is None else torch.cat((self.tokens, tokens), 1)
        self.tokens = seen[:, -self.model.config.reach :]
        logits: Tensor = self.model(self.tokens)[:, -1]
        return logits

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]."""
        self.tokens = None if self.tokens is None else self.tokens.index_select(0, index)
