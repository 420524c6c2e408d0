"""`headwise train language` under torchrun: one process speaks, and one that fails is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from headwise.apps.cli.main import app
from headwise.apps.train import torchrun
from headwise.distributed import RankError
from headwise.models.trained import Run

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def started(out: Path, *options: str, module: str = "headwise") -> subprocess.Popen[str]:
    """Two processes that train a tiny model, by a module beside the run or in the package."""
    paths = f"{ROOT}{os.pathsep}{out.parent}"
    alone = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    text = out.parent / "book.txt"
    text.write_text("attention is a weighted mean of values . " * 2000, encoding="utf-8")
    command = ["-m", module, "train", "language", "--out", str(out), "--device", "cpu", *options]
    data = [] if "--resume" in options else ["--data", str(text), "--context", "32"]
    return subprocess.Popen(
        [*TORCHRUN, *command, *data], cwd=ROOT, env=os.environ | alone, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def interrupted(
    running: subprocess.Popen[str], interrupt: Callable[[], None]
) -> tuple[str, str, int]:
    """Let it take ten steps, interrupt it, and return what it printed."""
    assert running.stdout is not None
    seen = ""
    for line in running.stdout:
        seen += line
        if " 10/" in line:
            interrupt()
            break
    out, err = running.communicate(timeout=120)
    return seen + out, err, running.returncode


def workers(running: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, the first rank first."""
    found = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(running.pid)], capture_output=True, text=True, check=True
    )
    return sorted(map(int, found.stdout.split()))


@pytest.mark.slow
def test_a_run_is_stopped_and_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "run"
    running = started(out, "--steps", "40", "--fsdp")
    said, errors, _ = interrupted(running, lambda: running.send_signal(signal.SIGTERM))
    assert said.count("parameters") == 1, said  # one process speaks
    assert "on cpu and 1 more" in said
    again = f"torchrun --nproc-per-node 2 -m headwise train language --out {out} --resume --fsdp"
    assert f"stopped; to continue: {again}" in errors
    reached = [line for line in Run(out).measured() if "loss" in line][-1]
    assert reached is not None
    assert 10 <= reached["step"] < 40
    resumed = started(out, "--resume", "--context-ranks", "2")
    said, errors, code = interrupted(resumed, lambda: None)
    assert code == 0, errors
    assert f"resumed at step {reached['step']}" in said
    assert [line["test"]["tokens"] for line in Run(out).measured() if "test" in line]
    assert (out / "model.safetensors").exists()


@pytest.mark.slow
def test_a_process_that_is_killed_is_named(tmp_path: Path) -> None:
    running = started(tmp_path / "run", "--steps", "3000")
    _, errors, code = interrupted(running, lambda: os.kill(workers(running)[1], signal.SIGKILL))
    assert code != 0
    assert "headwise train (rank 0): rank 1 of 2 ended without a word" in errors


FAILS = """
import os
from headwise.apps.cli.main import main
from headwise.apps.train.tasks.language import Language

batch = Language.batch

def broken(task, number, device):
    if number == 12 and os.environ["RANK"] == "1":
        raise ValueError("the text was changed while it was read")
    return batch(task, number, device)

Language.batch = broken
main()
"""


@pytest.mark.slow
def test_a_process_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILS, encoding="utf-8")
    running = started(tmp_path / "run", "--steps", "3000", module="failing")
    _, errors, code = interrupted(running, lambda: None)
    assert code != 0
    said = "ValueError: the text was changed while it was read"
    assert f"headwise train (rank 1): {said.partition(': ')[2]}" in errors
    assert f"headwise train (rank 0): rank 1 of 2 failed: {said}" in errors


def test_an_error_names_the_rank_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "ANSWER", 0.2)
    store = dist.HashStore()
    with pytest.raises(ValueError, match="no text"), torchrun.naming_failures(store, 2, 4):
        raise ValueError("no text")
    for lost in (RankError("a rank did not answer"), RuntimeError("[gloo/transport/tcp/pair.cc]")):
        with (
            pytest.raises(RankError, match="rank 2 of 4 failed: ValueError: no text"),
            torchrun.naming_failures(store, 0, 4),
        ):
            raise lost


def test_an_error_names_the_ranks_that_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "ANSWER", 0.2)
    store = dist.HashStore()
    store.set("1", "")  # this one has lost its connection too
    with (
        pytest.raises(RankError, match="rank 0 and 3 of 4 ended without a word"),
        torchrun.naming_failures(store, 2, 4),
    ):
        raise RankError("a rank did not answer")


def test_options_for_many_processes_need_torchrun(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("some words " * 2000, encoding="utf-8")
    given = [
        "train",
        "language",
        "--data",
        str(tmp_path / "book.txt"),
        "--out",
        str(tmp_path / "x"),
    ]
    ran = CliRunner().invoke(app, [*given, "--device", "cpu", "--fsdp"])
    assert ran.exit_code == 2
    assert "takes several processes; start them with torchrun" in ran.output
