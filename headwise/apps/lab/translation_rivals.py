"""Translators with something else in the place of self-attention, as wide as the Transformer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.extend import Lengths, Mask
from headwise.mask import causal
from headwise.models import LSTM, Beam, LSTMConfig, Strategy, Transformer, TransformerConfig
from headwise.models import LSTMState as State
from headwise.nn import Bahdanau, Cache, FixedAttention

KERNEL = 3
LENGTH = 160
"""The most positions with fixed weights: more than the longest translation that is searched for."""


class SlidingWindow(nn.Module):
    """A gated convolution in the place of self-attention: x (B, N, d_model) -> (B, N, d_model)."""

    def __init__(self, d_model: int, ahead: int) -> None:
        super().__init__()
        self.around = (KERNEL - 1 - ahead, ahead)  # zeros before and after
        self.convolution = nn.Conv1d(d_model, 2 * d_model, KERNEL)

    def forward(self, x: Tensor, *, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        if cache is not None:
            raise ValueError("a sliding window keeps no cache; generate with cache=None")
        if isinstance(mask, Lengths):  # padding is as empty as what lies beyond the sentence
            inside = torch.arange(x.shape[1], device=x.device) < torch.as_tensor(mask.n)[:, None]
            x = x * inside[..., None]
        return F.glu(self.convolution(F.pad(x.transpose(1, 2), self.around)), dim=1).transpose(1, 2)


class WindowTranslator(Transformer):
    """A Transformer with convolutions for self-attention; attention to the source stays."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for layers, ahead in ((self.encoder, KERNEL // 2), (self.decoder, 0)):
            for layer in layers:
                layer.attention = SlidingWindow(config.d_model, ahead)

    def generate(
        self,
        source: Tensor,
        count: int,
        *,
        source_lengths: Tensor | None = None,
        strategy: Strategy = Beam(),
        cache: Cache | None = None,
    ) -> Tensor:
        """Translate as a Transformer does, computing all tokens again at every step."""
        return super().generate(
            source, count, source_lengths=source_lengths, strategy=strategy, cache=cache
        )


class FixedTranslator(Transformer):
    """A Transformer with fixed weights for self-attention; attention to the source stays."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        for layers, mask in ((self.encoder, None), (self.decoder, causal())):
            for layer in layers:
                layer.attention = FixedAttention(config.d_model, config.heads, LENGTH, mask=mask)


class MaskedLSTM(LSTM):
    """An LSTM translator whose lengths stay on the device, so that a CUDA graph can contain it.

    It reads token by token, and a sentence that has ended keeps its state.
    """

    def read(self, source: Tensor, lengths: Tensor | None = None) -> State:
        """source (B, S) -> the state before the first target token."""
        if lengths is None:
            return super().read(source)
        x = self.dropout(self.embedding(source))
        inside = (torch.arange(source.shape[1], device=source.device) < lengths[:, None])[..., None]
        for layer in range(self.config.layers):
            ahead, ended = self.along(x, inside, f"l{layer}", range(source.shape[1]))
            back, begun = self.along(x, inside, f"l{layer}_reverse", range(source.shape[1])[::-1])
            x = torch.cat((ahead, back), -1)
        ends = [torch.cat(both, -1) for both in zip(ended, begun, strict=True)]
        first = torch.tanh(self.first_hidden(ends[0])), torch.tanh(self.first_cell(ends[1]))
        memory = None if self.attention is None else self.attention.remember(x)
        return State(*first, memory, lengths)

    def along(
        self, x: Tensor, inside: Tensor, name: str, order: Iterable[int]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One direction of a layer: its states at all places of x (B, S, width), and the last."""
        weights = [
            getattr(self.reader, f"{each}_{name}")
            for each in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        ]
        hidden = cell = x.new_zeros(x.shape[0], self.reader.hidden_size)
        states = [hidden] * x.shape[1]
        for place in order:
            new, newer = torch.lstm_cell(x[:, place], (hidden, cell), *weights)
            hidden = new.where(inside[:, place], hidden)
            cell = newer.where(inside[:, place], cell)
            states[place] = hidden
        return torch.stack(states, 1), (hidden, cell)


def recurrent(config: TransformerConfig) -> MaskedLSTM:
    """An LSTM as wide as this Transformer, without attention."""
    return MaskedLSTM(lstm_config(config, None))


def recurrent_attending(config: TransformerConfig) -> MaskedLSTM:
    """An LSTM as wide as this Transformer, with Bahdanau's attention."""
    return MaskedLSTM(lstm_config(config, Bahdanau(config.d_model)))


def lstm_config(config: TransformerConfig, attention: Bahdanau | None) -> LSTMConfig:
    """The LSTM that corresponds to a Transformer."""
    return LSTMConfig(
        config.vocabulary,
        d_model=config.d_model,
        layers=config.encoder_layers,
        attention=attention,
        dropout=config.dropout,
        padding=config.padding,
        start=config.start,
        end=config.end,
    )
