"""An alternative: an LSTM encoder and decoder, with or without Bahdanau's attention."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from headwise import mask as masks
from headwise.checks import Count, Rate, Size, check_integers, check_kind
from headwise.models.config import Config
from headwise.models.generate import Beam, Strategy, evaluating, generate
from headwise.nn.additive import Bahdanau
from headwise.nn.caches.cache import Memory


@dataclass(frozen=True)
class LSTMConfig(Config):
    """A translator with one `vocabulary`; attention=None squeezes the source into one state."""

    vocabulary: Size
    d_model: Size = 512
    layers: Size = 1
    attention: Bahdanau | None = Bahdanau(512)
    dropout: Rate = 0.1
    padding: Count = 0
    start: Count = 1
    end: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} must be even: half of it is for each reading direction"
            )


@dataclass(frozen=True, eq=False)
class State:
    """The state of the decoder: its LSTM's state, and the source that it attends to."""

    hidden: Tensor  # (B, d_model)
    cell: Tensor  # (B, d_model)
    memory: Memory | None  # of the source's states
    lengths: Tensor | None  # (B,) of the sources

    def reorder(self, index: Tensor) -> State:
        """The state in which batch entry b is entry index[b] of this one."""
        lengths = None if self.lengths is None else self.lengths.index_select(0, index)
        memory = None if self.memory is None else self.memory.reorder(index)
        hidden, cell = self.hidden.index_select(0, index), self.cell.index_select(0, index)
        return State(hidden, cell, memory, lengths)


class LSTM(nn.Module):
    """source (B, S), target (B, T) -> logits (B, T, vocabulary) of the target's next tokens.

    >>> import torch
    >>> from headwise.models import LSTM, LSTMConfig
    >>> model = LSTM(LSTMConfig(vocabulary=100, d_model=32, attention=None))
    >>> model(torch.randint(3, 100, (2, 7)), torch.randint(3, 100, (2, 5))).shape
    torch.Size([2, 5, 100])
    """

    def __init__(self, config: LSTMConfig) -> None:
        super().__init__()
        check_kind("config", config, LSTMConfig, "LSTMConfig(vocabulary=256)")
        self.config = config
        width = config.d_model
        self.embedding = nn.Embedding(config.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.dropout = nn.Dropout(config.dropout)
        self.reader = nn.LSTM(
            width, width // 2, config.layers, batch_first=True, bidirectional=True
        )
        self.first_hidden, self.first_cell = nn.Linear(width, width), nn.Linear(width, width)
        self.attention = None if config.attention is None else config.attention.build(width, width)
        seen = 0 if config.attention is None else width
        self.writer = nn.LSTMCell(width + seen, width)
        # The output is made from the state, the attended source and the last token.
        self.readout = nn.Linear(2 * width + seen, width)

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        return self.write(target, self.read(source, source_lengths))[0]

    def read(self, source: Tensor, lengths: Tensor | None = None) -> State:
        """source (B, S) -> the state before the first target token."""
        check_integers("source", source, 0, self.config.vocabulary - 1, "batch", "length")
        if source.numel() == 0:
            raise ValueError(f"source {tuple(source.shape)} must have at least one token")
        if lengths is not None:
            check_integers(
                "source_lengths", lengths, 1, source.shape[1], source.shape[0], wait=True
            )
        x, total = self.dropout(self.embedding(source)), source.shape[1]
        if lengths is None:
            states, (hidden, cell) = self.reader(x)
        else:
            packed = pack_padded_sequence(x, lengths.cpu(), True, enforce_sorted=False)
            packed, (hidden, cell) = self.reader(packed)
            states, _ = pad_packed_sequence(packed, batch_first=True, total_length=total)
        ends = [torch.cat((x[-2], x[-1]), -1) for x in (hidden, cell)]  # of both directions
        first = torch.tanh(self.first_hidden(ends[0])), torch.tanh(self.first_cell(ends[1]))
        memory = None if self.attention is None else self.attention.remember(states)
        return State(*first, memory, lengths)

    def write(self, target: Tensor, state: State) -> tuple[Tensor, State]:
        """target (B, T) -> logits (B, T, vocabulary) and the state after the last token."""
        check_integers("target", target, 0, self.config.vocabulary - 1, "batch", "length")
        if target.shape[1] == 0:
            raise ValueError(f"target {tuple(target.shape)} must have a length of at least 1")
        mask = None if state.lengths is None else masks.lengths(state.lengths)
        outputs = []
        for token in self.dropout(self.embedding(target)).unbind(1):  # (B, d_model)
            seen = [token]
            if self.attention is not None and state.memory is not None:
                context = self.attention(state.hidden[:, None], state.memory, mask=mask)
                seen = [token, context[:, 0]]
            hidden, cell = self.writer(torch.cat(seen, -1), (state.hidden, state.cell))
            state = replace(state, hidden=hidden, cell=cell)
            outputs.append(torch.cat((hidden, *seen), -1))
        out = self.dropout(torch.tanh(self.readout(torch.stack(outputs, 1))))
        return F.linear(out, self.embedding.weight), state

    def generate(
        self,
        source: Tensor,
        count: int,
        *,
        source_lengths: Tensor | None = None,
        strategy: Strategy = Beam(),
    ) -> Tensor:
        """Translate source (B, S) into at most `count` tokens (B, T); `end` follows the last."""
        with evaluating(self), torch.no_grad():
            decoder = LSTMDecoder(self, self.read(source, source_lengths))
            start = torch.full_like(source[:, :1], self.config.start)
            return generate(decoder, start, count, strategy, self.config.end)


class LSTMDecoder:
    """An LSTM that has read its sources and generates its targets."""

    def __init__(self, model: LSTM, state: State) -> None:
        self.model, self.state = model, state

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) and return the logits (B, vocabulary) of the next ones."""
        logits, self.state = self.model.write(tokens, self.state)
        return logits[:, -1]

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]."""
        self.state = self.state.reorder(index)
