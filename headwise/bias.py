"""What is added to a logit after the cap: a tensor, ALiBi, or a table over distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ALiBi:
    """-slope · |i - j|. From the number of heads, or from slopes (Hq,), learnable too.

    >>> ALiBi(4).slopes
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    """

    slopes: Tensor

    def __init__(self, heads_or_slopes: int | Tensor) -> None:
        given = heads_or_slopes
        slopes = given if isinstance(given, Tensor) else torch.tensor(_usual_slopes(given))
        object.__setattr__(self, "slopes", slopes)


@dataclass(frozen=True, eq=False)
class RelativeBuckets:
    """T5's bias: a learnable table (buckets, Hq) indexed by the bucket of the distance i - j.

    Half of the buckets hold exact distances, the rest grow logarithmically up to `max_distance`;
    with `bidirectional` the keys after the query have buckets of their own.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

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
        # float32, as the published models were trained: the bucket edges depend on it
        ratio = torch.log(distance.clamp_min(1).float() / exact) / math.log(
            self.max_distance / exact
        )
        wide = (exact + (ratio * (buckets - exact)).long()).clamp_max(buckets - 1)
        return offset + torch.where(distance < exact, distance, wide)


Bias = ALiBi | RelativeBuckets | Tensor


def _usual_slopes(heads: int) -> list[float]:
    """Geometric slopes; for a count that is no power of two, every second one of the next power."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    between = [2 ** (-8 * (h + 0.5) / power) for h in range(power)]
    return (slopes + between)[:heads]
