"""Translators with something else in the place of self-attention, as wide as the Transformer.

They are built of linear layers, so that several can be trained as one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.extend import Lengths, Mask
from headwise.mask import causal
from headwise.models import Strategy, Transformer, TransformerConfig
from headwise.nn import Cache, FixedAttention

LENGTH = 160
"""The most positions with fixed weights: more than the longest translation that is searched for."""
FAR = 64.0
"""Tokens after which the slowest head of a recurrence forgets half, before training."""


def inside(mask: Mask | None, x: Tensor) -> Tensor:
    """1 for tokens of x (B, N, ...), 0 for the padding after them: (B|1, N, 1)."""
    place = torch.arange(x.shape[1], device=x.device)
    if not isinstance(mask, Lengths):
        return torch.ones_like(place, dtype=x.dtype)[None, :, None]
    return (place < torch.as_tensor(mask.n, device=x.device)[:, None]).to(x.dtype)[..., None]


class SlidingWindow(nn.Module):
    """A gated convolution over three tokens: x (B, N, d_model) -> (B, N, d_model).

    It sees the tokens at -1, 0 and 1, or if `causal` at -2, -1 and 0, times `apart`.
    """

    def __init__(self, d_model: int, causal: bool, apart: int = 1) -> None:
        super().__init__()
        self.apart = apart
        self.around = (2 * apart, 0) if causal else (apart, apart)  # zeros before and after
        self.mix = nn.Linear(3 * d_model, 2 * d_model)

    def forward(self, x: Tensor, *, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        size = x.shape[1]
        spread = F.pad(x * inside(mask, x), (0, 0, *self.around))
        starts = range(0, 2 * self.apart + 1, self.apart)
        near = torch.cat([spread[:, place : place + size] for place in starts], -1)
        return F.glu(self.mix(near), dim=-1)


class GatedRecurrence(nn.Module):
    """Gated linear attention: x (B, N, d_model) -> (B, N, d_model), a linear recurrence.

    A head's state S (D, D_v) forgets by a gate f that each token sets, and is read by a query:
    S_i = f_i S_{i-1} + k_i v_iᵀ, out_i = q_iᵀ S_i. Short sequences are computed at once, as weights
    f_{j+1} ··· f_i (q_i · k_j). If not `causal`, half of the heads run from the end to the start.
    Keys are half as wide as values; what heads say is normed and multiplied by a second gate (Yang
    et al., 2024).
    """

    def __init__(self, d_model: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key = (nn.Linear(d_model, d_model // 2, bias=False) for _ in range(2))
        self.value = nn.Linear(d_model, d_model, bias=False)
        self.forget = nn.Linear(d_model, heads)
        self.norm, self.gate = nn.LayerNorm(d_model), nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)

    def start(self) -> None:
        """Let heads forget half after 1 to `FAR` tokens before training, spread evenly."""
        each = self.heads if self.causal else self.heads // 2  # of one direction
        share = torch.arange(self.heads) % each / max(1, each - 1)
        kept = 0.5 ** (1 / FAR**share)
        with torch.no_grad():
            self.forget.weight.mul_(0.1)
            self.forget.bias.copy_(torch.logit(kept))

    def forward(self, x: Tensor, *, mask: Mask | None = None, cache: Cache | None = None) -> Tensor:
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, x * inside(mask, x)), (self.value, x))
        )
        wide = torch.promote_types(x.dtype, torch.float32)
        forgets = F.logsigmoid(self.forget(x).to(wide)).transpose(1, 2)  # (B, H, N)
        weights = (q @ k.mT).to(wide) * self.decay(forgets) * q.shape[-1] ** -0.5
        out = self.norm((weights.to(v.dtype) @ v).transpose(1, 2).flatten(2))
        joined: Tensor = self.out(out * F.silu(self.gate(x)))
        return joined

    def decay(self, forgets: Tensor) -> Tensor:
        """The share of token j's entry that is left at token i: (B, H, N, N), 0 where unseen."""
        total, size = forgets.cumsum(-1), forgets.shape[-1]
        later = torch.ones(size, size, dtype=torch.bool, device=forgets.device).tril()
        ahead = total[..., :, None] - total[..., None, :]
        if self.causal:
            return ahead.masked_fill(~later, -torch.inf).exp()
        before = total - forgets  # of the tokens before
        back = before[..., None, :] - before[..., :, None]
        half = self.heads // 2
        ahead = ahead[:, :half].masked_fill(~later, -torch.inf)
        return torch.cat((ahead, back[:, half:].masked_fill(~later.T, -torch.inf)), 1).exp()


def in_place_of_attention(model: Transformer, kind: str) -> Transformer:
    """A Transformer with something else for self-attention; attention to the source stays."""
    config = model.config
    for layers, ahead in ((model.encoder, False), (model.decoder, True)):
        for layer in layers:
            if kind == "fixed":
                mask = causal() if ahead else None
                layer.attention = FixedAttention(config.d_model, config.heads, LENGTH, mask=mask)
            elif kind == "convolution":
                layer.attention = SlidingWindow(config.d_model, ahead)
            else:
                layer.attention = GatedRecurrence(config.d_model, config.heads, ahead)
    model.reset_parameters()
    for module in model.modules():
        if isinstance(module, GatedRecurrence):
            module.start()
    return model


class Recurrence(nn.Module):
    """One direction of an LSTM layer, token by token: x (B, N, width) -> (B, N, hidden)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.input, self.state = nn.Linear(width, 4 * hidden), nn.Linear(hidden, 4 * hidden)
        self.hidden = hidden

    def start(self) -> None:
        """Uniform weights, as PyTorch's; a forget gate that is open: its bias is one."""
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.uniform_(-(self.hidden**-0.5), self.hidden**-0.5)
            self.input.bias[self.hidden : 2 * self.hidden] = 1.0
            self.state.bias[self.hidden : 2 * self.hidden] = 0.0

    def step(self, given: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """The next state, from `input`'s part of the gates (B, 4 · hidden) and the last state."""
        gates = self.state(hidden)
        wide = torch.promote_types(gates.dtype, torch.float32)
        given, gates = given.to(wide), gates.to(wide)
        if gates.is_cuda:  # one kernel, the one of nn.LSTM
            new, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(given, gates, cell)
        else:
            enter, keep, what, say = (given + gates).chunk(4, -1)
            cell = keep.sigmoid() * cell + enter.sigmoid() * what.tanh()
            new = say.sigmoid() * cell.tanh()
        return new.to(hidden.dtype), cell

    def forward(self, x: Tensor, known: Tensor, back: bool) -> tuple[Tensor, Tensor, Tensor]:
        """All states and the last; a sentence keeps its state where it is not `known`."""
        given, there = self.input(x).unbind(1), known.unbind(1)
        hidden = x.new_zeros(x.shape[0], self.hidden)
        cell = hidden.to(torch.promote_types(x.dtype, torch.float32))
        states = [hidden] * x.shape[1]
        for place in range(x.shape[1])[:: -1 if back else 1]:
            new, newer = self.step(given[place], hidden, cell)
            hidden = new.where(there[place], hidden)
            cell = newer.where(there[place], cell)
            states[place] = hidden
        return torch.stack(states, 1), hidden, cell


class RecurrentTranslator(nn.Module):
    """LSTMs that read and write, with additive attention to the source (Bahdanau et al., 2015).

    As many layers as the Transformer has, embeddings times √d_model as there, dropout between
    layers, a forget bias of one. The attended source enters the first layer and the output.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, half = config.d_model, config.d_model // 2
        self.embedding = nn.Embedding(config.vocabulary, width)
        self.head: nn.Module | None = None  # a stack puts one here
        self.dropout = nn.Dropout(config.dropout)
        layers = range(config.encoder_layers)
        self.ahead = nn.ModuleList(Recurrence(width, half) for _ in layers)
        self.back = nn.ModuleList(Recurrence(width, half) for _ in layers)
        inputs = (2 * width, *[width] * (config.decoder_layers - 1))
        self.writer = nn.ModuleList(Recurrence(each, width) for each in inputs)
        self.first = nn.ModuleList(nn.Linear(width, 2 * width) for _ in inputs)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.weight = nn.Linear(width, 1, bias=False)
        self.readout = nn.Linear(3 * width, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        for module in self.modules():
            if isinstance(module, Recurrence):
                module.start()

    def embedded(self, tokens: Tensor) -> Tensor:
        """Tokens (B, N) -> (B, N, d_model)."""
        out: Tensor = self.dropout(self.embedding(tokens) * math.sqrt(self.config.d_model))
        return out

    def forward(
        self, source: Tensor, target: Tensor, source_lengths: Tensor | None = None
    ) -> Tensor:
        memory = self.read(source, source_lengths)
        return self.write(target, memory, memory.states)[0]

    def read(self, source: Tensor, lengths: Tensor | None) -> SourceStates:
        """source (B, S) -> what the writer attends to, and the states it starts from."""
        x = self.embedded(source)
        place = torch.arange(source.shape[1], device=source.device)
        known = torch.ones_like(source, dtype=torch.bool)
        known = known if lengths is None else place < lengths[:, None]
        states = []
        for ahead, back, first in zip(self.ahead, self.back, self.first, strict=True):
            one, other = ahead(x, known[..., None], False), back(x, known[..., None], True)
            x = self.dropout(torch.cat((one[0], other[0]), -1))
            hidden, cell = first(torch.cat((one[1], other[1]), -1)).chunk(2, -1)
            states.append((torch.tanh(hidden), cell.to(one[2].dtype)))
        return SourceStates(self.key(x), x, ~known, states)

    def write(
        self, target: Tensor, memory: SourceStates, states: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """target (B, T) -> logits (B, T, vocabulary), and the states after the last token."""
        states, said = list(states), []
        for token in self.embedded(target).unbind(1):
            seen = self.attended(states[-1][0], memory)
            x = torch.cat((token, seen), -1)
            for number, each in enumerate(self.writer):
                layer: Any = each
                x = x if number == 0 else self.dropout(x)
                states[number] = layer.step(layer.input(x), *states[number])
                x = states[number][0]
            said.append(torch.cat((x, seen, token), -1))
        out = self.dropout(torch.tanh(self.readout(torch.stack(said, 1))))
        weight = self.embedding.weight
        return F.linear(out, weight) if self.head is None else self.head(out), states

    def attended(self, hidden: Tensor, memory: SourceStates) -> Tensor:
        """The states of the source (B, S, d_model) by additive attention: (B, d_model)."""
        pairs = torch.tanh(self.query(hidden)[:, None] + memory.keys)
        logits = self.weight(pairs)[..., 0].masked_fill(memory.hidden, -torch.inf)
        weights = logits.softmax(-1).to(memory.values.dtype)
        seen: Tensor = weights[:, None] @ memory.values
        return seen[:, 0]

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        count: int,
        *,
        source_lengths: Tensor | None = None,
        strategy: Strategy | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Translate source (B, S), always greedily, into at most `count` tokens (B, T)."""
        memory = self.read(source, source_lengths)
        states: Sequence[tuple[Tensor, Tensor]] = memory.states
        token, said = torch.full_like(source[:, :1], self.config.start), list[Tensor]()
        done = torch.zeros_like(token, dtype=torch.bool)
        while len(said) < count and not bool(done.all()):
            logits, states = self.write(token, memory, states)
            token = logits.argmax(-1).masked_fill(done, self.config.end)
            done = done | (token == self.config.end)
            said.append(token)
        return torch.cat(said, 1)


class SourceStates:
    """The source as an LSTM has read it."""

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        hidden: Tensor,
        states: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        self.keys, self.values = keys, values  # (B, S, d_model)
        self.hidden = hidden  # (B, S): True at padding
        self.states = states  # of each layer of the writer: hidden and cell
