"""Associative recall: small synthetic tasks that isolate what attention has to do.

A sequence is a list of tokens, each of which holds a key and a value. In *recall* a last token has
a key only, and asks for the value that stands beside that key earlier in the sequence. In *delay*
the token that knows is the first, and everything between is noise. In *relation* every token asks
for the value of the token whose key follows its own, which is not a symmetric relation. Keys,
values and places are drawn anew for every sequence, so nothing but reading the sequence helps.

The models have a few thousand parameters, which a CPU trains as fast as a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.apps.train.recipe import Recipe


class Sequences(NamedTuple):
    """keys and values (B, N), and for each asking token its place (A,) and answer (B, A)."""

    keys: Tensor
    values: Tensor
    asking: Tensor
    answers: Tensor
    distances: Tensor  # (B, A) from the asking token to the one that knows


@dataclass(frozen=True)
class Recall:
    """`pairs` tokens with different keys out of `keys`, then one that asks for one of them."""

    pairs: int
    keys: int = 64
    values: int = 16

    def draw(self, count: int, generator: torch.Generator) -> Sequences:
        """Draw sequences of pairs + 1 tokens; the asking token is the last."""
        keys = torch.rand(count, self.keys, generator=generator).argsort(-1)[:, : self.pairs]
        values = torch.randint(self.values, (count, self.pairs), generator=generator)
        place = torch.randint(self.pairs, (count, 1), generator=generator)
        nothing = torch.full((count, 1), self.values)  # the value of the asking token
        return Sequences(
            torch.cat((keys, keys.gather(1, place)), 1),
            torch.cat((values, nothing), 1),
            torch.tensor([self.pairs]),
            values.gather(1, place),
            self.pairs - place,
        )


@dataclass(frozen=True)
class Delay:
    """One marked token, then noise: the last token asks for its value, `distance` tokens later."""

    distance: int
    values: int = 8
    keys: int = 2

    def draw(self, count: int, generator: torch.Generator) -> Sequences:
        """Draw sequences of distance + 1 tokens; only the first and the last have key 1."""
        values = torch.randint(self.values, (count, self.distance + 1), generator=generator)
        answers = values[:, :1].clone()
        values[:, -1] = self.values
        keys = torch.zeros_like(values)
        keys[:, 0] = keys[:, -1] = 1
        far = torch.full((count, 1), self.distance)
        return Sequences(keys, values, torch.tensor([self.distance]), answers, far)


@dataclass(frozen=True)
class Relation:
    """All `keys` once, in any order: the token with key a asks for the value of key a + 1."""

    keys: int = 16
    values: int = 16

    def draw(self, count: int, generator: torch.Generator) -> Sequences:
        """Draw sequences in which every token asks."""
        keys = torch.rand(count, self.keys, generator=generator).argsort(-1)
        values = torch.randint(self.values, (count, self.keys), generator=generator)
        of_key = torch.zeros_like(values).scatter(1, keys, values)  # the value of each key
        at = torch.zeros_like(keys).scatter(1, keys, torch.arange(self.keys).expand_as(keys))
        wanted = (keys + 1) % self.keys
        places = torch.arange(self.keys)
        return Sequences(
            keys, values, places, of_key.gather(1, wanted), (at.gather(1, wanted) - places).abs()
        )


Task = Recall | Delay | Relation


class RecallModel(nn.Module):
    """Embed keys and values, let the layer mix tokens, read the answer: (B, A, values)."""

    def __init__(self, layer: nn.Module, width: int, task: Task) -> None:
        super().__init__()
        self.key = nn.Embedding(task.keys, width)
        self.value = nn.Embedding(task.values + 1, width)
        self.layer = layer
        self.answer = nn.Linear(width, task.values)

    def forward(self, drawn: Sequences) -> Tensor:
        mixed = self.layer(self.key(drawn.keys) + self.value(drawn.values))  # (B, N, width)
        mixed = mixed[0] if isinstance(mixed, tuple) else mixed  # an LSTM returns its state too
        out: Tensor = self.answer(mixed[:, drawn.asking])
        return out


NO_CLIP = 1e9
"""A norm that no gradient reaches."""


def recipe_of(steps: int, rate: float, warm: float = 0.1, **options: Any) -> Recipe:
    """Adam with a warm-up over a share of the steps; nothing decays, nothing is clipped.

    `options` replace other fields of a recipe.
    """
    usual: dict[str, Any] = {"weight_decay": 0.0, "clip": NO_CLIP, "betas": (0.9, 0.999)}
    return Recipe(steps, rate, warmup=max(1, round(warm * steps)), **(usual | options))


class Learning(NamedTuple):
    """The loss and the norm of the gradient at every step of a training."""

    losses: list[float]
    norms: list[float]


def learn(
    model: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    seed: int,
    batch: int = 128,
    examples: int | None = None,
) -> Learning:
    """Train on fresh sequences, or on `examples` fixed ones."""
    generator = torch.Generator().manual_seed(seed)
    fixed = None if examples is None else task.draw(examples, generator)
    model.train()
    optimizer, found = recipe.optimizer(model), Learning([], [])
    for step in range(recipe.steps):
        drawn = task.draw(batch, generator) if fixed is None else some(fixed, batch, generator)
        loss = cross_entropy(model, drawn)
        loss.backward()
        found.norms.append(float(recipe.update(optimizer, step, model.parameters())))
        found.losses.append(float(loss.detach()))
    return found


def some(drawn: Sequences, count: int, generator: torch.Generator) -> Sequences:
    """`count` of these sequences, at random."""
    chosen = torch.randint(len(drawn.keys), (count,), generator=generator)
    return Sequences(
        drawn.keys[chosen],
        drawn.values[chosen],
        drawn.asking,
        drawn.answers[chosen],
        drawn.distances[chosen],
    )


def cross_entropy(model: nn.Module, drawn: Sequences) -> Tensor:
    """The mean loss in nats."""
    return F.cross_entropy(model(drawn).flatten(0, 1), drawn.answers.flatten())


def right(model: nn.Module, drawn: Sequences) -> Tensor:
    """True where the model's answer is right: (B, A)."""
    model.eval()
    with torch.no_grad():
        answers: Tensor = model(drawn).argmax(-1)
    return answers == drawn.answers


def accuracy(
    model: nn.Module,
    task: Task,
    *,
    count: int = 1000,
    seed: int = 10_000,
) -> float:
    """The share of right answers on fresh sequences."""
    drawn = task.draw(count, torch.Generator().manual_seed(seed))
    return float(right(model, drawn).double().mean())
