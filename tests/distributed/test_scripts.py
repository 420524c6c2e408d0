"""The scripts and commands of docs/distributed.md run under torchrun, as they stand there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
SCRIPTS = re.findall(r"^```py\n(.*?)^```", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^\$ torchrun --nproc-per-node 2 (.*)$", PAGE, re.M)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PRINTED = (
    "rank 1: 500 rows, entropy", "rank 1: 4 of 8 heads", "step 2: loss", "entropy_mean"
)  # fmt: skip


def test_the_page_has_these_scripts() -> None:
    assert len(SCRIPTS) == len(PRINTED)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_script_runs_on_two_processes(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPTS[number], encoding="utf-8")
    ran = subprocess.run(
        [*TORCHRUN, str(script)], cwd=ROOT, capture_output=True, text=True, env=ENVIRONMENT,
        timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert PRINTED[number] in ran.stdout


@pytest.mark.slow
def test_the_commands_train_and_resume(tmp_path: Path) -> None:
    """As on the page, with fewer steps; the last one resumes the run of the one before."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("typer")
    words = [f"w{number * number % 97}" for number in range(90_000)]
    (tmp_path / "book.txt").write_text(" ".join(words), encoding="utf-8")
    assert len(COMMANDS) == 4
    losses = {}
    for command in COMMANDS:
        fewer = [] if "--resume" in command else ["--steps", "2"]
        ran = subprocess.run(
            [*TORCHRUN, *command.split(), *fewer, "--device", "cpu", "--json"], cwd=tmp_path,
            capture_output=True, text=True, env=ENVIRONMENT, timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-3000:]
        lines = [json.loads(line) for line in ran.stdout.splitlines()]
        losses[command] = [line.get("loss", line.get("test")) for line in lines[1:]]
    copies, sharded, split, resumed = losses.values()
    assert copies[0] == pytest.approx(sharded[0], rel=1e-4)
    assert resumed == split[-1:]  # it had come to its end
