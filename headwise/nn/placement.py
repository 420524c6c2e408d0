"""What a position may do to attention, and where."""

from __future__ import annotations

from torch import Tensor, nn

from headwise import bias

Waves = tuple[Tensor, Tensor]  # cosine and sine, (N, W/2) or (B, 1, N, W/2)


class PositionModule(nn.Module):
    """What a position may do at each of the three places; by default nothing."""

    at_input = False
    turns = False
    turns_late = False  # keys are turned when read from a cache, not when written

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (B, N, d_model) with its positions (N,) or (B, N)."""
        return x

    def waves(self, positions: Tensor, length: int | Tensor | None = None) -> Waves:
        """Cosine and sine for positions (N,) or (B, N) of a sequence that is `length` long."""
        raise NotImplementedError

    def turn(self, x: Tensor, waves: Waves) -> Tensor:
        """x (B, H, N, D), turned."""
        return x

    def bias(self) -> bias.Bias | None:
        """What is added to the logits."""
        return None
