"""How queries and keys are made from the input. Values always have a matrix of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Separate:
    """Q = X W_q and K = X W_k: what the formula says. 4d² parameters with values and output."""


@dataclass(frozen=True)
class Shared:
    """Q = K = X W: one matrix for both, so that scores are symmetric. 3d² parameters."""


@dataclass(frozen=True)
class Unprojected:
    """Q = K = X: each head compares its slice of the input as it is. 2d² parameters."""


Projections = Separate | Shared | Unprojected
