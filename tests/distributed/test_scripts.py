"""The scripts of docs/distributed.md run under torchrun, as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = re.findall(
    r"^```py\n(.*?)^```", (ROOT / "docs/distributed.md").read_text(encoding="utf-8"), re.M | re.S
)
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
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ran = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(script)], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=300,
        check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert PRINTED[number] in ran.stdout
