"""Biases, which are added to logits after the cap: a tensor, ALiBi, or a table of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.core.arguments import is_integer

MOST_HEADS = 1 << 16
LONGEST = 1 << 20  # distances that a table is expanded to


@dataclass(frozen=True, eq=False)
class ALiBi:
    """-slope · |i - j|. Takes the number of heads, or slopes (Hq,), which may be learnable.

    >>> ALiBi(4).slopes
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    slopes: Tensor

    def __init__(self, heads_or_slopes: int | Tensor) -> None:
        given: object = heads_or_slopes
        if not isinstance(given, Tensor):
            if not is_integer(given) or not 1 <= given <= MOST_HEADS:
                raise ValueError(
                    f"hw.ALiBi({given!r}): give it the number of heads, or a tensor of slopes (Hq,)"
                )
            given = torch.tensor(_usual_slopes(given))
        object.__setattr__(self, "slopes", given)


@dataclass(frozen=True, eq=False)
class RelativeBuckets:
    """T5's bias: a learnable table (buckets, Hq) indexed by the bucket of the distance i - j.

    Half of the buckets hold exact distances, the rest grow logarithmically up to `max_distance`;
    with `bidirectional`, keys after the query have separate buckets.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        table: object = self.table
        if not isinstance(table, Tensor) or table.ndim == 0:
            raise ValueError("hw.RelativeBuckets takes a tensor (buckets, Hq)")
        if not isinstance(self.bidirectional, bool):
            raise ValueError(
                f"hw.RelativeBuckets(bidirectional={self.bidirectional!r}) takes a bool"
            )
        check_buckets(table.shape[0], self.bidirectional, self.max_distance)

    def by_distance(self) -> Tensor:
        """The bias for distances i - j from -max_distance to max_distance, (Hq, 2R + 1)."""
        distance = torch.arange(-self.max_distance, self.max_distance + 1, device=self.table.device)
        return self.table[self.bucket(distance)].transpose(0, 1)

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance i - j."""
        buckets = self.table.shape[0]
        offset = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            offset = torch.where(distance < 0, buckets, 0)
            distance = distance.abs()
        else:
            distance = distance.clamp_min(0)
        exact = buckets // 2
        # float32, as published models were trained: the bucket edges depend on it
        ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(
            self.max_distance / exact
        )
        wide = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < exact, distance, wide)


@dataclass(frozen=True, eq=False)
class Sum:
    """A bias of distances and a tensor (B|1, Hq|1, N|1, M|1), both added to the logits."""

    distances: ALiBi | RelativeBuckets
    tensor: Tensor


Bias = ALiBi | RelativeBuckets | Sum | Tensor


def plus(bias: Bias | None, tensor: Tensor) -> Bias:
    """A bias and a tensor (B|1, Hq|1, N|1, M|1) that is added to it."""
    if bias is None:
        return tensor
    if isinstance(bias, Sum):
        return Sum(bias.distances, bias.tensor + tensor)
    return bias + tensor if isinstance(bias, Tensor) else Sum(bias, tensor)


def parts_of(bias: Bias | None) -> tuple[ALiBi | RelativeBuckets | None, Tensor | None]:
    """The bias of distances and the tensor that a bias is made of."""
    if isinstance(bias, Sum):
        return bias.distances, bias.tensor
    return (None, bias) if isinstance(bias, Tensor) else (bias, None)


def check_buckets(buckets: int, bidirectional: bool, max_distance: int) -> None:
    """Raise ValueError unless there are buckets for exact and for logarithmic distances."""
    exact = buckets // (4 if bidirectional else 2)
    if exact < 1:
        needed = 4 if bidirectional else 2
        raise ValueError(
            f"hw.RelativeBuckets with bidirectional={bidirectional} needs at least {needed} "
            f"buckets; it has {buckets}"
        )
    if not is_integer(max_distance) or not exact < max_distance <= LONGEST:
        raise ValueError(
            f"hw.RelativeBuckets(max_distance={max_distance!r}): {exact} of the {buckets} buckets "
            f"hold exact distances, so it must be an integer above {exact} and at most 2**20"
        )


def _usual_slopes(heads: int) -> list[float]:
    """Geometric slopes; if heads is not a power of two, with slopes in between."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 0.5) / power) for h in range(power)]
    return (slopes + between)[:heads]
