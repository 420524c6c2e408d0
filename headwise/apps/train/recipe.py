"""The training recipe: the optimiser, its schedule, and how often to measure and to save."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from headwise.checks import CheckedFields, Count, Positive, Rate, Size
from headwise.extend import is_integer, is_number


def check_betas(name: str, given: object) -> None:
    """Raise ValueError unless `given` is two numbers in [0, 1)."""
    inside = isinstance(given, tuple) and [is_number(each) and 0 <= each < 1 for each in given]
    if inside != [True, True]:
        raise ValueError(f"{name}={given!r} must be two numbers in [0, 1)")


def check_seed(name: str, given: object) -> None:
    """Raise ValueError unless `given` is an integer of 64 bits."""
    if not is_integer(given) or not -(2**63) <= given < 2**63:
        raise ValueError(f"{name}={given!r} must be an integer of 64 bits")


@dataclass(frozen=True)
class Recipe(CheckedFields):
    """AdamW with warm-up and cosine decay, clipping, gradient accumulation and a fixed seed.

    A step is one update from `accumulate` batches. The learning rate rises linearly over `warmup`
    steps and falls along a cosine to `final` times its peak at the last step.

    >>> recipe = Recipe(steps=100, learning_rate=1e-3, warmup=10)
    >>> [round(recipe.rate(step), 6) for step in (0, 9, 54, 99)]
    [0.0001, 0.001, 0.000505, 1e-05]
    """

    steps: Size
    learning_rate: Positive = 1e-3
    warmup: Count = 100
    final: float = 0.01
    weight_decay: float = 0.1
    betas: Annotated[tuple[float, float], check_betas] = (0.9, 0.98)
    clip: Positive = 1.0
    accumulate: Size = 1
    label_smoothing: Rate = 0.0
    seed: Annotated[int, check_seed] = 0
    log_every: Size = 10
    evaluate_every: Size = 500
    checkpoint_every: Size = 500
    compile: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        warmup = min(self.warmup, self.steps - 1)
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        progress = (step + 1 - warmup) / max(1, self.steps - warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, progress))) / 2
        return self.learning_rate * (self.final + (1 - self.final) * cosine)

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a dictionary for JSON."""
        return {**dataclasses.asdict(self), "betas": list(self.betas)}

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> "Recipe":
        """The recipe that `to_dict` described."""
        first, second = described["betas"]
        return cls(**{**described, "betas": (first, second)})

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """AdamW with weight decay for matrices, and none for vectors (biases, norms)."""
        parameters = [each for each in model.parameters() if each.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [each for each in parameters if each.ndim >= 2]},
            {"params": [each for each in parameters if each.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=self.learning_rate,
            betas=self.betas,
            weight_decay=self.weight_decay,
            fused=all(each.is_cuda for each in parameters),
        )

    def update(
        self, optimizer: torch.optim.Optimizer, step: int, parameters: Iterable[Tensor]
    ) -> Tensor:
        """Clip the gradients and take this step at its rate; their norm before clipping."""
        for group in optimizer.param_groups:
            group["lr"] = self.rate(step)
        norm = nn.utils.clip_grad_norm_(parameters, self.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return norm
