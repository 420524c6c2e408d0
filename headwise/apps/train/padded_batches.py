"""Pairs of sentences in few shapes, on the device beforehand: a step of training copies nothing.

A few lengths, and batches that are always full, let each shape's step be captured once as a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.apps.train.data.batches import generator
from headwise.apps.train.data.pairs import Pair
from headwise.apps.train.stacked_training import StackedTraining, token_loss
from headwise.apps.train.stacking import Stack
from headwise.apps.train.tasks.translation import Sentences
from headwise.models.trained import Tokeniser

MEASURED = 16_384
"""Tokens a side, of each model, that are measured together."""


@dataclass(frozen=True)
class Padded:
    """All pairs of a similar length, padded alike.

    source (n, L) with end tokens, lengths (n,) of the sources, target (n, L + 1) from start to end.
    """

    source: Tensor
    lengths: Tensor
    target: Tensor
    predictions: int

    def rows(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The pairs of these numbers (B,)."""
        return (
            self.source.index_select(0, rows),
            self.lengths.index_select(0, rows),
            self.target.index_select(0, rows),
        )

    def __len__(self) -> int:
        return len(self.lengths)


def padded(
    pairs: Sequence[Pair], tokeniser: Tokeniser, lengths: Sequence[int], device: torch.device
) -> tuple[Padded, ...]:
    """Pairs by the shortest of these lengths that holds both sides; longer ones are left out."""
    sentences = Sentences(pairs, tokeniser, max(lengths))
    longest = torch.tensor(sentences.lengths).amax(-1)
    found = []
    for least, most in zip((0, *lengths), lengths, strict=False):
        chosen = ((longest > least) & (longest <= most)).nonzero()[:, 0]
        if len(chosen) == 0:
            continue
        source, target = (
            F.pad(x, (0, width - x.shape[1]), value=tokeniser.pad)
            for x, width in (
                (sentences.sources.padded(chosen, tokeniser.pad, torch.device("cpu")), most),
                (sentences.targets.padded(chosen, tokeniser.pad, torch.device("cpu")), most + 1),
            )
        )
        count = int((target[:, 1:] != tokeniser.pad).sum())
        sizes = sentences.sources.sizes[chosen]
        found.append(Padded(source.to(device), sizes.to(device), target.to(device), count))
    return tuple(found)


@dataclass
class FullBatches:
    """Batches of one shape each, with `tokens` padded tokens a side, for several trainings at once.

    The order of the shapes is everybody's; which pairs of a shape come together is drawn by the
    seed of each training, and anew in every epoch. Pairs that fill no batch are left out of that
    epoch.

    >>> tiny = Padded(torch.zeros(5, 4), torch.zeros(5), torch.zeros(5, 5), 20)
    >>> order = FullBatches((tiny,), tokens=8, seeds=(0, 1))
    >>> [(shape, rows.shape) for shape, rows in map(order.batch, range(2))]
    [(0, torch.Size([2, 2])), (0, torch.Size([2, 2]))]
    """

    parts: Sequence[Padded]
    tokens: int
    seeds: Sequence[int]
    pad: int = 0
    sizes: list[int] = field(init=False)
    _epoch: tuple[int, list[Tensor], list[tuple[int, int]]] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.sizes = [min(len(x), max(1, self.tokens // x.source.shape[1])) for x in self.parts]

    def batch(self, number: int) -> tuple[int, Tensor]:
        """The shape of a batch and the rows in it (R, B); numbers continue past an epoch."""
        a_time = sum(len(x) // size for x, size in zip(self.parts, self.sizes, strict=True))
        epoch, place = divmod(number, a_time)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, *self._drawn(epoch))
        shape, start = self._epoch[2][place]
        return shape, self._epoch[1][shape][:, start : start + self.sizes[shape]]

    def losses(self, stack: Stack, shape: int, rows: Tensor, smoothing: float) -> Tensor:
        """Nats per token of models (source, target, source_lengths) -> logits: (R,)."""
        source, lengths, target = self.parts[shape].rows(rows.flatten())
        logits = stack(source, target[:, :-1], source_lengths=lengths)
        said = target[:, 1:].reshape(len(rows), -1)
        counted = (said != self.pad).to(stack.flat.dtype)
        shares = counted / counted.sum(1, keepdim=True)
        nats = token_loss(logits.flatten(0, 1), said.flatten(), shares.flatten(), smoothing)
        return nats.view(len(rows), -1).sum(1)

    def _drawn(self, epoch: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
        device = self.parts[0].source.device
        drawn = [generator(seed, epoch) for seed in self.seeds]
        rows = [
            torch.stack([torch.randperm(len(x), generator=random) for random in drawn]).to(device)
            for x in self.parts
        ]
        places = [
            (shape, start)
            for shape, size in enumerate(self.sizes)
            for start in range(0, len(self.parts[shape]) - size + 1, size)
        ]
        order = torch.randperm(len(places), generator=generator(epoch)).tolist()
        return rows, [places[place] for place in order]


def mean_losses(training: StackedTraining, parts: Sequence[Padded], pad: int) -> list[float]:
    """Nats per token of each model of a training on these pairs."""
    with training.measuring() as model:
        total = torch.zeros(training.runs, device=training.device)
        for part in parts:
            size = max(1, MEASURED // part.source.shape[1])
            for rows in torch.arange(len(part), device=training.device).split(size):
                source, lengths, target = part.rows(rows.repeat(training.runs))
                logits = model(source, target[:, :-1], source_lengths=lengths)
                nats = F.cross_entropy(
                    logits.flatten(0, 1).float(),
                    target[:, 1:].flatten(),
                    ignore_index=pad,
                    reduction="none",
                )
                total += nats.view(training.runs, -1).sum(1)
        count = sum(part.predictions for part in parts)
        return [nats / count for nats in total.tolist()]
