"""Generation of tokens, one after another, with greedy, sampled or beam search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from headwise.checks import CheckedFields, check_kind, check_size


class Decoder(Protocol):
    """A model that generates, with the state of the sequences so far."""

    def step(self, tokens: Tensor) -> Tensor:
        """Append tokens (B, n) and return the logits (B, V) of the next ones."""

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]; index (B',)."""


@dataclass(frozen=True)
class Greedy(CheckedFields):
    """Always pick the most likely token."""


@dataclass(frozen=True)
class Sample(CheckedFields):
    """Draw a token from softmax(logits / temperature), among the `top_k` or `top_p` best."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(
                f"{self} leaves no token to draw; Greedy() always picks the most likely one"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> probabilities (..., V), 0 for tokens that can't be drawn.

        >>> Sample(top_k=2).probabilities(torch.tensor([1.0, 3.0, 3.0, 2.0]))
        tensor([0.0000, 0.5000, 0.5000, 0.0000])
        """
        logits = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        p = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return p
        ordered, index = p.sort(-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the best token always stays
        kept = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(before >= self.top_p, 0))
        return kept / kept.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Beam(CheckedFields):
    """Keep the `width` best sequences, whose scores are divided by length^`penalty`."""

    width: int = 4
    penalty: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1:
            raise ValueError(f"{self} keeps no sequence; use a width of 1 (greedy) or more")


Strategy = Greedy | Sample | Beam
"""The ways to choose the next token."""


@torch.no_grad()
def generate(
    decoder: Decoder, prompt: Tensor, count: int, strategy: Strategy, end: int | None = None
) -> Tensor:
    """The tokens (B, <= count) that follow prompt (B, N); after `end` a row repeats `end`."""
    check_size("count", count)
    check_kind("strategy", strategy, Strategy, "Greedy(), Sample() or Beam()")
    if prompt.shape[1] < 1:
        raise ValueError(f"a prompt of shape {tuple(prompt.shape)} has no token to continue")
    if isinstance(strategy, Beam):
        return _beam(decoder, prompt, count, strategy, end)
    generator = None
    if isinstance(strategy, Sample) and strategy.seed is not None:
        generator = torch.Generator(prompt.device).manual_seed(strategy.seed)
    tokens: list[Tensor] = []
    done = torch.zeros(prompt.shape[0], device=prompt.device, dtype=torch.bool)
    given = prompt
    for _ in range(count):
        token = _pick(decoder.step(given), strategy, generator)
        if end is not None:
            token = token.masked_fill(done, end)
            done = done | (token == end)
        tokens.append(token)
        given = token[:, None]
        if end is not None and bool(done.all()):
            break
    return torch.stack(tokens, 1)


def _pick(logits: Tensor, strategy: Greedy | Sample, generator: torch.Generator | None) -> Tensor:
    if isinstance(strategy, Greedy):
        return logits.argmax(-1)
    return torch.multinomial(strategy.probabilities(logits), 1, generator=generator)[:, 0]


def _beam(decoder: Decoder, prompt: Tensor, count: int, beam: Beam, end: int | None) -> Tensor:
    """Beam search for a batch; a finished sequence stays until better ones push it out."""
    batch, width, device = prompt.shape[0], beam.width, prompt.device
    logits = decoder.step(prompt)
    first = torch.arange(batch, device=device)
    decoder.reorder(first.repeat_interleave(width))
    logits = logits.repeat_interleave(width, 0)
    # All beams of an entry start alike, so only the first may be continued.
    total = torch.full((batch, width), -torch.inf, device=device)
    total[:, 0] = 0
    length = torch.zeros(batch, width, device=device)
    done = torch.zeros(batch, width, device=device, dtype=torch.bool)
    tokens = prompt.new_empty(batch, width, 0)
    for step in range(count):
        if step:
            logits = decoder.step(tokens[:, :, -1].reshape(-1, 1))
        log_p = logits.float().log_softmax(-1).unflatten(0, (batch, width))
        vocabulary = log_p.shape[-1]
        if end is not None:  # a finished sequence has one continuation, at no cost
            log_p = log_p.masked_fill(done[..., None], -torch.inf)
            log_p[..., end].masked_fill_(done, 0)
        grown = length + (~done).float()
        score = (total[..., None] + log_p) / grown[..., None].clamp_min(1) ** beam.penalty
        best = score.flatten(1).topk(width).indices  # (B, W)
        parent, token = best // vocabulary, best % vocabulary
        total = (total[..., None] + log_p).flatten(1).gather(1, best)
        length, done = grown.gather(1, parent), done.gather(1, parent)
        tokens = tokens.gather(1, parent[..., None].expand(-1, -1, tokens.shape[2]))
        tokens = torch.cat((tokens, token[..., None]), 2)
        decoder.reorder((first[:, None] * width + parent).flatten())
        if end is not None:
            done = done | (token == end)
            if bool(done.all()):
                break
    return tokens[:, 0]  # topk sorts, so the first is the best


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switch the model to eval mode, and back to its mode at the end."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
