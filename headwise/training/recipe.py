"""The training recipe: the optimiser, its schedule, and how often to measure and to save."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Recipe:
    """AdamW with warm-up and cosine decay, clipping, gradient accumulation and a fixed seed.

    A step is one update from `accumulate` batches. The learning rate rises linearly over `warmup`
    steps and falls along a cosine to `final` times its peak at the last step.

    >>> recipe = Recipe(steps=100, learning_rate=1e-3, warmup=10)
    >>> [round(recipe.rate(step), 6) for step in (0, 9, 54, 99)]
    [0.0001, 0.001, 0.000505, 1e-05]
    """

    steps: int
    learning_rate: float = 1e-3
    warmup: int = 100
    final: float = 0.01
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = 1.0
    accumulate: int = 1
    label_smoothing: float = 0.0
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 500
    checkpoint_every: int = 500
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "accumulate", "log_every", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"a recipe needs {name} of at least 1, got {getattr(self, name)}")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"a recipe needs a seed of 64 bits, got {self.seed}")

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
