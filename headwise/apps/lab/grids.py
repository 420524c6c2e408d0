"""Grids of small models: all that share a shape are trained as one stack, each at its own rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.recall import recipe_of
from headwise.apps.train.stacked_training import StackedTraining, token_loss
from headwise.apps.train.stacking import Stack


@dataclass(frozen=True)
class Examples:
    """Sequences with what is asked of them.

    tokens (n, N, 2): two numbers below `vocabulary` for each token, such as a key and a value, of
    which the last `empty` ones mean nothing; answers (n, A), below `said`, at the last A places.
    """

    tokens: Tensor
    answers: Tensor
    vocabulary: int
    said: int
    empty: int = 0

    def to(self, device: torch.device) -> Examples:
        """The same on a device."""
        return replace(self, tokens=self.tokens.to(device), answers=self.answers.to(device))


class GridModel(nn.Module):
    """tokens (B, N, 2) -> logits (B, A, said) at the last A places: embed, mix, read."""

    def __init__(self, examples: Examples, width: int, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(examples.vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.5**0.5)  # the sum of two has variance one
        with torch.no_grad():
            self.embedding.weight[examples.vocabulary - examples.empty :] = 0
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.answer = nn.Linear(width, examples.said)
        nn.init.normal_(self.answer.weight, std=width**-0.5)
        nn.init.zeros_(self.answer.bias)
        self.asked = examples.answers.shape[1]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).sum(-2)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.answer(self.norm(x[:, -self.asked :]))
        return out


@dataclass
class DrawnBatches:
    """Batches of sequences that are drawn beforehand: no run sees one twice.

    `data` are examples of one shape, one for each task and seed; `of` (R,) says which a run learns.
    """

    data: Sequence[Examples]
    of: Tensor
    batch_size: int
    sizes: list[int] = field(init=False)
    tokens: Tensor = field(init=False)
    answers: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = [self.batch_size]
        self.tokens = torch.cat([each.tokens for each in self.data])
        self.answers = torch.cat([each.answers for each in self.data])
        self.first = self.of.to(self.tokens.device)[:, None] * len(self.data[0].tokens)
        self.within = torch.arange(self.batch_size, device=self.tokens.device)

    def batch(self, number: int) -> tuple[int, Tensor]:
        """The next sequences of every run."""
        return 0, self.first + number * self.batch_size + self.within

    def losses(self, stack: Stack, shape: int, rows: Tensor, smoothing: float) -> Tensor:
        """The mean loss of each run in nats."""
        logits = stack(self.tokens.index_select(0, rows.flatten()).long())
        answers = self.answers.index_select(0, rows.flatten()).long()
        shares = logits.new_full((answers.numel(),), len(rows) / answers.numel())
        nats = token_loss(logits.flatten(0, 1), answers.flatten(), shares, smoothing)
        return nats.view(len(rows), -1).sum(1)


def start_training(
    lab: Lab,
    models: Sequence[nn.Module],
    rates: Sequence[float],
    steps: int,
    data: Sequence[Examples],
    of: Sequence[int],
    batch_size: int,
) -> StackedTraining:
    """A stack before its first step, in float32 (matrix products in tf32 on a GPU)."""
    order = DrawnBatches([each.to(lab.device) for each in data], torch.tensor(of), batch_size)
    return StackedTraining(models, recipe_of(steps, 1.0), rates, order, lab.device)


def right_answers(
    training: StackedTraining, data: Sequence[Examples], of: Sequence[int], together: int = 64
) -> list[float]:
    """The share of right answers of each run on examples that it has not seen."""
    found = torch.zeros(training.runs, device=training.device)
    count = data[0].answers.numel()
    with training.measuring() as model:
        for first in range(0, len(data[0].tokens), together):
            rows = slice(first, first + together)
            tokens = torch.cat([data[each].tokens[rows] for each in of]).to(training.device)
            answers = torch.cat([data[each].answers[rows] for each in of]).to(training.device)
            right = model(tokens.long()).argmax(-1) == answers
            found += right.view(training.runs, -1).sum(1)
        return [x / count for x in found.tolist()]


def recall_examples(
    pairs: Tensor,
    distances: Tensor,
    asked: int,
    length: int,
    generator: torch.Generator,
    keys: int = 128,
    values: int = 16,
) -> Examples:
    """Sequences of `length` tokens, of which the last `asked` each ask for the value of a key.

    Each sequence has so many `pairs` (n,), which are a token each; then so many tokens of noise
    (n,), which have a value and no key; then the questions. Empty tokens come before.
    """
    device, count = generator.device, len(pairs)
    order = torch.rand(count, keys, generator=generator, device=device).argsort(-1)
    drawn = torch.randint(values, (count, length), generator=generator, device=device)
    first = length - asked - distances - pairs
    at = torch.arange(length, device=device) - first[:, None]  # the number of a pair
    known = (at >= 0) & (at < pairs[:, None])
    key = order.gather(1, at.clamp(0, keys - 1)).where(known, keys + values + 1)
    chosen = (torch.rand(count, asked, generator=generator, device=device) * pairs[:, None]).long()
    answers = drawn.gather(1, first[:, None] + chosen)
    key[:, length - asked :] = order.gather(1, chosen)
    value = torch.where(at >= 0, keys + drawn, keys + values)
    value[:, length - asked :] = keys + values  # none
    tokens = torch.stack((key, value), -1)
    return Examples(tokens.to(torch.int16), answers.to(torch.int16), keys + values + 2, values, 2)


def text_examples(
    count: int, text: Tensor, letters: int, context: int, generator: torch.Generator
) -> Examples:
    """Stretches of a text (n,) of letters: every place asks for the next letter.

    A token is a letter and its place, each a number of its own.
    """
    starts = torch.randint(len(text) - context, (count, 1), generator=generator)
    places = torch.arange(context)
    windows = text[starts + torch.arange(context + 1)]
    tokens = torch.stack((windows[:, :-1], (letters + places).expand(count, -1)), -1)
    return Examples(
        tokens.to(torch.int16), windows[:, 1:].to(torch.int16), letters + context, letters
    )


def mean_loss(training: StackedTraining, first: int, last: int) -> list[float]:
    """The mean loss of each run over these steps."""
    with training.beside():
        found: list[float] = training.losses[first:last].mean(0).tolist()
    return found
