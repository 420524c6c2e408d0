"""`headwise train --watch`: a run whose heads were looked at is the same run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.training import checkpoints
from headwise.training.data.batches import generator
from headwise.training.recipe import Recipe
from headwise.training.run_folder import Run
from headwise.training.trainer import Trainer
from headwise.watching import open_run

RECIPE = Recipe(steps=8, warmup=2, accumulate=2, log_every=2, evaluate_every=3, checkpoint_every=4)


@dataclass
class Attending:
    """Learn to give the input back, through attention with dropout."""

    unit = "examples"

    def build(self) -> nn.Module:
        return hw.nn.MultiHeadAttention(16, 4, mask=hw.mask.causal(), dropout=0.1)

    def batch(self, number: int, device: torch.device) -> Tensor:
        return torch.randn(2, 10, 16, generator=generator(number))

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: Tensor, smoothing: float) -> Tensor:
        return (model(batch) - batch).square().sum()

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        return {"valid_loss": float(self.loss(model, 100 * self.batch(10**6, device), 0.0))}

    judge = evaluate


def trained(folder: Path, **options: Any) -> dict[str, Tensor]:
    folder.mkdir(exist_ok=True)
    trainer = Trainer(Attending(), RECIPE, Run(folder), {}, torch.device("cpu"), **options)
    trainer.train()
    return checkpoints.load(folder / "last.safetensors")[0]


def test_watching_changes_no_bit_of_a_run(tmp_path: Path) -> None:
    alone, watched = trained(tmp_path / "a"), trained(tmp_path / "b", watch_every=3)
    assert all(torch.equal(alone[name], watched[name]) for name in alone)
    run = open_run(tmp_path / "b")
    assert run.steps == [0, 3, 6]
    assert run.ended
    assert not (tmp_path / "a/watch").exists()


def test_evaluation_leaves_no_trace_in_the_figures(tmp_path: Path) -> None:
    trained(tmp_path / "run", watch_every=1)
    _, heads = open_run(tmp_path / "run").history("max_logit_max_lower_bound")
    # Evaluated inputs are a hundred times as large, their logits ten thousand times.
    assert max(max(line) for line in heads.values()) < 100


def test_a_run_that_resumes_goes_on_with_its_heads(tmp_path: Path) -> None:
    seen = iter(range(1, 100))
    trained(tmp_path / "run", watch_every=1, should_stop=lambda: next(seen) == 5)
    assert open_run(tmp_path / "run").steps == [0, 1, 2, 3, 4]
    trained(tmp_path / "run", watch_every=1)
    assert open_run(tmp_path / "run").steps == list(range(8))


def test_a_resumed_run_may_be_watched_from_then_on(tmp_path: Path) -> None:
    seen = iter(range(1, 100))
    trained(tmp_path / "run", should_stop=lambda: next(seen) == 3)
    trained(tmp_path / "run", watch_every=2)
    assert open_run(tmp_path / "run").steps == [4, 6]
