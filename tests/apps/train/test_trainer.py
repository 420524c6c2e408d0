"""A run resumes where it was stopped, to the bit, and survives being killed."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor, nn

from headwise.apps.train.command_view import explained
from headwise.apps.train.data.batches import generator
from headwise.apps.train.meter import DivergedError
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.trainer import Trainer, steps_within
from headwise.models.trained import Run, checkpoints

CPU = torch.device("cpu")
RECIPE = Recipe(
    steps=12, warmup=3, learning_rate=0.05, accumulate=2, seed=7, log_every=2, evaluate_every=5,
    checkpoint_every=4,
)  # fmt: skip
SETTINGS = {"task": "toy", "recipe": RECIPE.to_dict()}


@dataclass
class Toy:
    """Learn to add up eight numbers, with dropout, so that random numbers matter."""

    broken_at: int | None = None
    unit = "examples"

    def build(self) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))

    def batch(self, number: int, device: torch.device) -> Tensor:
        x = torch.randn(5, 8, generator=generator(number))
        return x * float("nan") if number == self.broken_at else x

    def count(self, batch: Tensor) -> int:
        return len(batch)

    def loss(self, model: nn.Module, batch: Tensor, smoothing: float) -> Tensor:
        return (model(batch)[:, 0] - batch.sum(-1)).square().sum()

    def evaluate(self, model: nn.Module, device: torch.device) -> dict[str, float]:
        torch.rand(3)  # what evaluation draws must not change training
        return {"valid_loss": float(self.loss(model, self.batch(10**6, device), 0.0))}

    def judge(self, model: nn.Module, device: torch.device) -> dict[str, Any]:
        return {"loss": float(self.loss(model, self.batch(10**7, device), 0.0))}


def trainer(
    folder: Path, recipe: Recipe = RECIPE, task: Toy | None = None, **more: Any
) -> Trainer[Tensor]:
    folder.mkdir(exist_ok=True)
    settings = {**SETTINGS, "recipe": recipe.to_dict()}
    return Trainer(task or Toy(), recipe, Run(folder), settings, CPU, **more)


def state(folder: Path) -> dict[str, Tensor]:
    return checkpoints.load(folder / "last.safetensors")[0]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_speed(folder: Path) -> list[dict[str, Any]]:
    lines = list(Run(folder).measured())
    return [{k: v for k, v in line.items() if k not in ("per_second", "mfu")} for line in lines]


@pytest.mark.parametrize("stop", range(1, 12))
def test_resuming_equals_never_having_stopped_bit_for_bit(tmp_path: Path, stop: int) -> None:
    assert trainer(tmp_path / "whole").train() is not None
    seen = iter(range(1, 100))
    stopped = trainer(tmp_path / "parts", should_stop=lambda: next(seen) == stop)
    assert stopped.train() is None
    torch.rand(17)  # something else draws random numbers meanwhile
    assert trainer(tmp_path / "parts").train() is not None
    assert same(state(tmp_path / "whole"), state(tmp_path / "parts"))
    last = without_speed(tmp_path / "whole")[-1]
    assert without_speed(tmp_path / "parts")[-1] == last


@pytest.mark.parametrize("log_every", [2, 3])  # 3: a checkpoint is between two lines of the log
def test_a_crash_between_checkpoints_loses_only_what_followed_the_last(
    tmp_path: Path, log_every: int
) -> None:
    recipe = replace(RECIPE, log_every=log_every)
    trainer(tmp_path / "whole", recipe).train()

    class CrashError(Exception):
        pass

    def crash(measured: dict[str, Any]) -> None:
        if measured["step"] == 10:
            raise CrashError

    with pytest.raises(CrashError):
        trainer(tmp_path / "parts", recipe, report=crash).train()
    assert checkpoints.load(tmp_path / "parts/last.safetensors")[1]["step"] == 8
    trainer(tmp_path / "parts", recipe).train()
    assert same(state(tmp_path / "whole"), state(tmp_path / "parts"))
    assert without_speed(tmp_path / "whole") == without_speed(tmp_path / "parts")


def test_accumulating_equals_one_large_batch(tmp_path: Path) -> None:
    class Sure(Toy):
        def build(self) -> nn.Module:
            return nn.Linear(8, 1)

    class Large(Sure):
        def batch(self, number: int, device: torch.device) -> Tensor:
            both = [super(Large, self).batch(2 * number + n, device) for n in range(2)]
            return torch.cat(both)

    trainer(tmp_path / "small", RECIPE, Sure()).train()
    trainer(tmp_path / "large", replace(RECIPE, accumulate=1), Large()).train()
    for name, tensor in checkpoints.load(tmp_path / "small/model.safetensors")[0].items():
        other = checkpoints.load(tmp_path / "large/model.safetensors")[0][name]
        torch.testing.assert_close(tensor, other)


def test_the_loss_falls_and_the_metrics_say_so(tmp_path: Path) -> None:
    trainer(tmp_path, replace(RECIPE, steps=200, log_every=20)).train()
    lines = list(Run(tmp_path).measured())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0] / 3
    assert lines[-1]["test"]["loss"] > 0
    assert all(line["per_second"] > 0 for line in lines if "loss" in line)


def test_a_loss_that_is_no_number_stops_the_run_and_spares_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="step 4, is untouched"):
        trainer(tmp_path, task=Toy(broken_at=11)).train()
    assert checkpoints.load(tmp_path / "last.safetensors")[1]["step"] == 4


def test_a_checkpoint_of_another_config_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    trainer(tmp_path).train()
    before = (tmp_path / "last.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"recipe\.learning_rate was 0\.05 and is 0\.01"):
        trainer(tmp_path, replace(RECIPE, learning_rate=0.01)).train()
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_a_checkpoint_of_another_version_or_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.save(path, {"a": torch.ones(100)}, {})
    whole = path.read_bytes()
    for cut in (0, 7, 50, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="damaged"):
            checkpoints.load(path)
    checkpoints.save(path, {"a": torch.ones(1)}, {"format": 99})
    with pytest.raises(ValueError, match="format 99"):
        checkpoints.load(path)
    with pytest.raises(ValueError, match="there is no checkpoint"):
        checkpoints.load(tmp_path / "none")


def test_weights_of_another_model_are_refused_and_nothing_is_changed() -> None:
    model = nn.Linear(2, 2)
    before = checkpoints.weights(model)["weight"].clone()
    with pytest.raises(ValueError, match="bias is missing"):
        checkpoints.put_weights(model, {"weight": torch.ones(2, 2)}, Path("x"))
    with pytest.raises(ValueError, match=r"weight is \(3, 2\) and should be \(2, 2\)"):
        checkpoints.put_weights(
            model, {"weight": torch.ones(3, 2), "bias": torch.ones(2)}, Path("x")
        )
    assert torch.equal(model.weight, before)


def test_tied_weights_are_kept_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    assert list(checkpoints.weights(model)) == ["0.weight"]


def test_a_full_disk_spares_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    checkpoints.save(path, {"a": torch.ones(3)}, {"step": 1})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"the disk is full; the last checkpoint is untouched"):
        checkpoints.save(path, {"a": torch.zeros(3)}, {"step": 2})
    assert checkpoints.load(path)[1]["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


KILLED = """
import sys, torch
from pathlib import Path
from headwise.models.trained import checkpoints
torch.set_num_threads(1)
path = Path(sys.argv[1])
step = 0
while True:
    step += 1
    checkpoints.save(path, {"a": torch.full((200_000,), float(step))}, {"step": step})
    print(step, flush=True)
"""


def test_killed_at_any_moment_the_last_checkpoint_loads(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    for delay in (0.0, 0.007):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        tensors, about = checkpoints.load(path)
        assert torch.equal(tensors["a"], torch.full((200_000,), float(about["step"])))
    checkpoints.remove_leftovers(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    with run.locked():
        with (
            pytest.raises(ValueError, match=rf"process {os.getpid()} is writing into"),
            run.locked(),
        ):
            pass
        run.begin(SETTINGS)
        with pytest.raises(ValueError, match="already holds a run"):
            run.begin(SETTINGS)
    assert run.settings() == SETTINGS
    run.config.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        run.settings()
    with pytest.raises(ValueError, match="does not hold a run"):
        Run(tmp_path / "other").settings()


def test_a_line_of_the_metrics_cut_short_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.record({"step": 1})
    with run.metrics.open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(run.measured()) == [{"step": 1}]


def test_steps_are_fitted_into_a_time(tmp_path: Path) -> None:
    steps = steps_within(trainer(tmp_path), minutes=0.02, warm=2, timed=5)
    assert steps >= 1
    assert not list(tmp_path.iterdir())


def test_a_recipe_survives_json_and_refuses_nonsense() -> None:
    assert Recipe.from_dict(json.loads(json.dumps(RECIPE.to_dict()))) == RECIPE
    with pytest.raises(ValueError, match="Recipe: steps=0 must be a positive integer"):
        Recipe(steps=0)
    for wrong in ({"seed": 2**64}, {"betas": (0.9, 2)}, {"learning_rate": math.nan}, {"clip": "1"}):
        with pytest.raises(ValueError, match=f"Recipe: {next(iter(wrong))}="):
            Recipe(steps=1, **wrong)  # type: ignore[arg-type]
    one = Recipe(steps=1, warmup=100)
    assert one.rate(0) > 0


def test_a_command_ends_as_it_means_to() -> None:
    with pytest.raises(typer.Exit) as ended, explained():
        raise typer.Exit(130)  # a RuntimeError, which is no error here
    assert ended.value.exit_code == 130
