"""The examples of batch n, as a function of the seed and n: resuming needs no iterator."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


def mixed(*numbers: int) -> int:
    """A seed made of these numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return seed


def generator(*numbers: int) -> torch.Generator:
    """A random generator seeded by these numbers."""
    return torch.Generator().manual_seed(mixed(*numbers))


@dataclass
class ByLength:
    """Batches of examples of similar length, each of at most `tokens` padded tokens.

    Examples are sorted by length and cut into batches. Each epoch reshuffles the examples of equal
    length and the order of the batches.

    >>> order = ByLength([(3, 4), (9, 9), (3, 4), (3, 5)], tokens=16, seed=0)
    >>> sorted(sorted(order.batch(n)) for n in range(order.epoch_length))
    [[0, 2, 3], [1]]
    """

    lengths: Sequence[tuple[int, int]]
    tokens: int
    seed: int
    bounds: list[tuple[int, int]] = field(init=False, repr=False)
    _epoch: tuple[int, list[int], list[int]] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("there are no examples to make batches of: the corpus is empty")
        ordered = sorted(self.lengths)
        self.bounds = []
        start, longest = 0, 0
        for end, pair in enumerate(ordered):
            widest = max(longest, *pair)
            if end > start and widest * (end - start + 1) > self.tokens:
                self.bounds.append((start, end))
                start, widest = end, max(pair)
            longest = widest
        self.bounds.append((start, len(ordered)))

    @property
    def epoch_length(self) -> int:
        """The number of batches that see every example once."""
        return len(self.bounds)

    def batch(self, number: int) -> list[int]:
        """The examples of a batch; numbers continue past the first epoch."""
        epoch, place = divmod(number, self.epoch_length)
        examples, order = self._shuffled(epoch)
        start, end = self.bounds[order[place]]
        return examples[start:end]

    def _shuffled(self, epoch: int) -> tuple[list[int], list[int]]:
        if self._epoch is None or self._epoch[0] != epoch:
            random = generator(self.seed, epoch)
            shuffled = torch.randperm(len(self.lengths), generator=random).tolist()
            # A stable sort keeps the shuffled order of equal lengths.
            examples = sorted(shuffled, key=self.lengths.__getitem__)
            order = torch.randperm(self.epoch_length, generator=random).tolist()
            self._epoch = (epoch, examples, order)
        return self._epoch[1], self._epoch[2]


@dataclass
class Shuffled:
    """Batches of `size` out of `count` examples, each at most once per epoch."""

    count: int
    size: int
    seed: int
    _epoch: tuple[int, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("there are no examples to make batches of: the corpus is empty")
        self.size = min(self.size, self.count)

    @property
    def epoch_length(self) -> int:
        """The number of batches per epoch."""
        return self.count // self.size

    def epoch_of(self, number: int) -> int:
        """The epoch of a batch."""
        return number // self.epoch_length

    def batch(self, number: int) -> Tensor:
        """The examples of a batch, (size,) int64."""
        epoch, place = divmod(number, self.epoch_length)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, torch.randperm(self.count, generator=generator(self.seed, epoch)))
        return self._epoch[1][place * self.size : (place + 1) * self.size]
