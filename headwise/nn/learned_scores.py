"""Scores with learned parameters: descriptions, from which a module makes the parameters.

`hw.attention` takes `hw.Additive(weight)`; a module takes `hw.nn.Additive()` and makes the weight.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise import score
from headwise.checks import CheckedFields, Positive, check_sizes


@dataclass(frozen=True)
class Additive(CheckedFields):
    """Σ_d w_d tanh(q_d + k_d) with a learned w per head: heads · head_dim parameters."""

    def build(self, heads: int, head_dim: int) -> LearnedAdditive:
        """The parameters for this many heads of this width."""
        return LearnedAdditive(heads, head_dim)


@dataclass(frozen=True)
class General(CheckedFields):
    """(q W)·k with a learned W per head: heads · head_dim² parameters; starts as scaled dot."""

    def build(self, heads: int, head_dim: int) -> LearnedGeneral:
        """The parameters for this many heads of this width."""
        return LearnedGeneral(heads, head_dim)


@dataclass(frozen=True)
class Cosine(CheckedFields):
    """t · cos(q, k) with a learned temperature t per head, which starts at `temperature`."""

    temperature: Positive = 10.0

    def build(self, heads: int, head_dim: int) -> LearnedCosine:
        """The parameters for this many heads of this width."""
        return LearnedCosine(heads, self.temperature)


LearnedScore = Additive | General | Cosine
"""The scores with weights of their own, which a layer learns."""
LEARNED = (Additive, General, Cosine)


class LearnedAdditive(nn.Module):
    """The weight (heads, head_dim) of an additive score; calling it gives `hw.Additive`."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        self.weight = nn.Parameter(torch.empty(heads, head_dim))
        nn.init.uniform_(self.weight, -(head_dim**-0.5), head_dim**-0.5)

    def forward(self) -> score.Score:
        return score.Additive(self.weight)


class LearnedGeneral(nn.Module):
    """The weight (heads, head_dim, head_dim) of a bilinear score; calling it gives `hw.General`."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        check_sizes(heads=heads, head_dim=head_dim)
        start: Tensor = torch.eye(head_dim) * head_dim**-0.5
        self.weight = nn.Parameter(start.repeat(heads, 1, 1))

    def forward(self) -> score.Score:
        return score.General(self.weight)


class LearnedCosine(nn.Module):
    """The temperature (heads,) of a cosine score; calling it gives `hw.Cosine`."""

    def __init__(self, heads: int, temperature: float) -> None:
        super().__init__()
        check_sizes(heads=heads)
        self.temperature = nn.Parameter(torch.full((heads,), temperature))

    def forward(self) -> score.Score:
        return score.Cosine(self.temperature)
