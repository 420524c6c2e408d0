"""`headwise train language` under torchrun: one process speaks, and one that fails is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headwise.training.run_folder import Run

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")
pytest.importorskip("typer")

ROOT = Path(__file__).parent.parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}


def started(out: Path, *options: str, module: str = "headwise") -> subprocess.Popen[str]:
    """Two processes that train a tiny model."""
    text = out.parent / "book.txt"
    text.write_text("attention is a weighted mean of values . " * 2000, encoding="utf-8")
    command = ["-m", module, "train", "language", "--out", str(out), "--device", "cpu", *options]
    data = [] if "--resume" in options else ["--data", str(text), "--context", "32"]
    return subprocess.Popen(
        [*TORCHRUN, *command, *data], cwd=ROOT, env=ENVIRONMENT, text=True,
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
    reached = Run(out).progress()
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
from headwise.cli.main import main
from headwise.training.tasks.language import Language

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
    ENVIRONMENT["PYTHONPATH"] = f"{ROOT}{os.pathsep}{tmp_path}"
    running = started(tmp_path / "run", "--steps", "3000", module="failing")
    _, errors, code = interrupted(running, lambda: None)
    assert code != 0
    said = "ValueError: the text was changed while it was read"
    assert f"headwise train (rank 1): {said.partition(': ')[2]}" in errors
    assert f"headwise train (rank 0): rank 1 of 2 failed: {said}" in errors
