"""`headwise train --watch`: a watched run is the same run, killed or not."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.apps.train.data.batches import generator
from headwise.apps.train.recipe import Recipe
from headwise.apps.train.trainer import Trainer
from headwise.models.trained import Run, checkpoints
from headwise.watching import open_run
from headwise.watching.runs.run_writer import RunWriter

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


@dataclass
class Loud(Attending):
    """Its inputs are large enough for an alarm."""

    def batch(self, number: int, device: torch.device) -> Tensor:
        return 100 * super().batch(number, device)


def test_a_resumed_run_raises_no_alarm_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen, run = iter(range(1, 100)), Run(tmp_path)
    for stop in (lambda: next(seen) == 5, lambda: False):
        Trainer(
            Loud(), RECIPE, run, {}, torch.device("cpu"), should_stop=stop, watch_every=1
        ).train()
    assert open_run(tmp_path).steps == list(range(8))
    assert [alarm.step for alarm in open_run(tmp_path).alarms if alarm.rule == "logit growth"]
    raised = [line for line in caplog.messages if "logit growth" in line]
    assert len({line.partition(": ")[2] for line in raised}) == len(raised)


def test_a_resumed_run_may_be_watched_from_then_on(tmp_path: Path) -> None:
    seen = iter(range(1, 100))
    trained(tmp_path / "run", should_stop=lambda: next(seen) == 3)
    trained(tmp_path / "run", watch_every=2)
    assert open_run(tmp_path / "run").steps == [4, 6]


class KilledError(BaseException):
    """Ends a run in the middle of a step."""


@dataclass
class Killed(Attending):
    """Is killed while it makes this batch; two batches make a step."""

    at: int = -1

    def batch(self, number: int, device: torch.device) -> Tensor:
        if number == self.at:
            raise KilledError
        return super().batch(number, device)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [{**line, "per_second": None, "mfu": None} for line in Run(folder).measured()]


@pytest.mark.parametrize("at", [0, 1, 5, 8, 9, 13, 15])
def test_a_killed_run_resumes_as_if_it_had_never_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole = trained(tmp_path / "whole", watch_every=1)
    (tmp_path / "run").mkdir()
    run, cpu = Run(tmp_path / "run"), torch.device("cpu")
    with monkeypatch.context() as patch:
        patch.setattr(RunWriter, "close", lambda writer: writer._lock.release())  # as a kill
        with pytest.raises(KilledError):
            Trainer(Killed(at=at), RECIPE, run, {}, cpu, watch_every=1).train()
    resumed = trained(run.folder, watch_every=1)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert lines(run.folder) == lines(tmp_path / "whole")
    assert open_run(run.folder).steps == list(range(8))
    first, again = (open_run(tmp_path / name).history("entropy_mean") for name in ("whole", "run"))
    assert first == again


SCRIPT = """
import os, signal, sys
from pathlib import Path
from tests.apps.train.test_watched import Attending, trained

class Killed(Attending):
    def batch(self, number, device):
        if number == 11:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().batch(number, device)

import tests.apps.train.test_watched as module
module.Attending = Killed
trained(Path(sys.argv[1]), watch_every=1)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_process_that_is_killed_leaves_a_run_to_resume(tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", watch_every=1)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()}, check=False)
    assert done.returncode == -signal.SIGKILL
    resumed = trained(tmp_path / "run", watch_every=1)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    assert open_run(tmp_path / "run").steps == list(range(8))


def test_resuming_a_finished_run_reports_its_score_and_adds_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "run", watch_every=3)
    before = lines(tmp_path / "run")
    assert sum("test" in line for line in before) == 1
    reported: list[dict[str, Any]] = []
    trained(tmp_path / "run", watch_every=3, report=reported.append)
    assert lines(tmp_path / "run") == before
    assert reported[-1]["test"] == before[-1]["test"]
    assert open_run(tmp_path / "run").steps == [0, 3, 6]


def test_a_run_killed_before_its_test_is_scored_when_it_resumes(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    run = Run(tmp_path / "run")
    whole = lines(run.folder)
    kept = run.metrics.read_text().splitlines(keepends=True)[:-1]
    run.metrics.write_text("".join(kept) + '{"step": 8, "te')
    trained(run.folder)
    assert lines(run.folder) == whole
