"""The examples for tools that draw curves run, and their tool has the heads beside the loss."""

import csv
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headwise.watching import open_run

EXAMPLES = Path(__file__).parents[2] / "examples" / "loggers"
FIGURE = "attn/layer_01/entropy_mean"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run an example in a folder of its own, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return lambda name: dict.clear(runpy.run_path(str(EXAMPLES / name)))


def test_a_plain_loop_keeps_its_loss_with_its_heads(
    run: Callable[[str], None], tmp_path: Path
) -> None:
    run("plain_loop.py")
    kept = open_run(tmp_path / "runs" / "plain")
    assert kept.steps == [0, 5, 10, 15]
    assert kept.logged["loss"][0] == list(range(20))


def test_tensorboard_has_the_heads(run: Callable[[str], None], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run("tensorboard_loop.py")
    events: Any = EventAccumulator(str(tmp_path / "runs" / "tensorboard"))
    events.Reload()
    assert [x.step for x in events.Scalars(FIGURE)] == [0, 5, 10, 15]
    assert [x.value for x in events.Scalars("attn/alarms")] == [0, 0, 0, 0]


def test_weights_and_biases_has_the_heads(run: Callable[[str], None], tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run("wandb_loop.py")
    wandb.teardown()  # waits until the file is written
    (written,) = tmp_path.glob("runs/wandb/offline-run-*/*.wandb")
    assert written.read_bytes().count(FIGURE.encode()) >= 4, wandb.__version__


@pytest.mark.filterwarnings("ignore")  # what MLflow asks of SQLAlchemy
def test_mlflow_has_the_heads(run: Callable[[str], None], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run("mlflow_loop.py")
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (done,) = client.search_runs(["0"])
    assert [x.step for x in client.get_metric_history(done.info.run_id, FIGURE)] == [0, 5, 10, 15]


def test_a_trainer_s_loss_joins_its_heads(run: Callable[[str], None], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run("transformers_trainer.py")
    kept = open_run(tmp_path / "runs" / "trainer" / "heads")
    assert kept.steps == [0, 5, 10, 15]
    assert kept.logged["loss"][0] == [4, 9, 14, 19]


@pytest.mark.filterwarnings("ignore")  # Lightning's own advice about loggers and workers
def test_lightning_s_loggers_have_the_heads(run: Callable[[str], None], tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    run("lightning_trainer.py")
    kept = open_run(tmp_path / "runs" / "lightning" / "heads")
    assert kept.steps == [0, 5, 10, 15]
    assert kept.logged["loss"][0] == list(range(20))
    (metrics,) = tmp_path.glob("runs/lightning_logs/*/metrics.csv")
    rows = list(csv.DictReader(metrics.read_text(encoding="utf-8").splitlines()))
    assert [row[FIGURE] != "" for row in rows].count(True) >= 3
