"""One token after another: the greedy, sampled and beam strategies, for any model that can step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn


class Decoder(Protocol):
    """A model in the middle of a sequence."""

    def step(self, tokens: Tensor) -> Tensor:
        """Take in tokens (B, n); the logits (B, V) of what follows them."""

    def reorder(self, index: Tensor) -> None:
        """Let batch entry b continue entry index[b]; index (B',)."""


@dataclass(frozen=True)
class Greedy:
    """The most likely token, always."""


@dataclass(frozen=True)
class Sample:
    """A token by chance: logits / temperature, the `top_k` best, the best that make up `top_p`."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature <= 0 or (self.top_k is not None and self.top_k < 1):
            raise ValueError(f"{self} leaves nothing to sample from; Greedy() takes the best token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must lie in (0, 1]")

    def probabilities(self, logits: Tensor) -> Tensor:
        """(..., V) -> (..., V), what is left out being 0.

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
        before = ordered.cumsum(-1) - ordered  # the best token stays, however likely it is
        kept = torch.zeros_like(p).scatter(-1, index, ordered.masked_fill(before >= self.top_p, 0))
        return kept / kept.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Beam:
    """The best of `width` sequences kept side by side; scores are divided by length^`penalty`."""

    width: int = 4
    penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"{self} keeps no sequence; a width of 1 is greedy, 4 or 5 is usual")


Strategy = Greedy | Sample | Beam


@torch.no_grad()
def generate(
    decoder: Decoder, prompt: Tensor, count: int, strategy: Strategy, end: int | None = None
) -> Tensor:
    """The tokens (B, <= count) that follow prompt (B, N); after `end` there is only `end`."""
    if count < 1 or prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(
            f"generate {count} tokens after a prompt of shape {tuple(prompt.shape)}: it takes at "
            "least one token, after a prompt (batch, length) of at least one"
        )
    if isinstance(strategy, Beam):
        return _beam(decoder, prompt, count, strategy, end)
    generator = None
    if isinstance(strategy, Sample) and strategy.seed is not None:
        generator = torch.Generator(prompt.device).manual_seed(strategy.seed)
    tokens: list[Tensor] = []
    done = torch.zeros(prompt.shape[0], device=prompt.device, dtype=torch.bool)
    given = prompt
    for _ in range(count):
        token = _picked(decoder.step(given), strategy, generator)
        if end is not None:
            token = token.masked_fill(done, end)
            done = done | (token == end)
        tokens.append(token)
        given = token[:, None]
        if end is not None and bool(done.all()):
            break
    return torch.stack(tokens, 1)


def _picked(logits: Tensor, strategy: Greedy | Sample, generator: torch.Generator | None) -> Tensor:
    if isinstance(strategy, Greedy):
        return logits.argmax(-1)
    return torch.multinomial(strategy.probabilities(logits), 1, generator=generator)[:, 0]


def _beam(decoder: Decoder, prompt: Tensor, count: int, beam: Beam, end: int | None) -> Tensor:
    """A batch's beams side by side; a finished one stays as it is until better ones come."""
    batch, width, device = prompt.shape[0], beam.width, prompt.device
    logits = decoder.step(prompt)
    first = torch.arange(batch, device=device)
    decoder.reorder(first.repeat_interleave(width))
    logits = logits.repeat_interleave(width, 0)
    # All beams of an entry start alike, so only the first may speak.
    total = torch.full((batch, width), -torch.inf, device=device)
    total[:, 0] = 0
    length = torch.zeros(batch, width, device=device)
    done = torch.zeros(batch, width, device=device, dtype=torch.bool)
    tokens = prompt.new_empty(batch, width, 0)
    for step in range(count):
        if step:
            logits = decoder.step(tokens[:, :, -1].reshape(-1, 1))
        log_p = logits.float().log_softmax(-1).view(batch, width, -1)
        vocabulary = log_p.shape[-1]
        if end is not None:  # a finished sequence has one continuation, for free
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
    """The model in eval mode for a while."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
