"""Kernels compiled beside each other before they are timed: each part in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PATIENCE = 150.0  # seconds


def warm(module: str, parts: Sequence[str]) -> None:
    """Run `python -m module --warm PART` for all parts at once; Triton finds their kernels later.

    A part that fails is left to the measurement, which says why.
    """
    command = [sys.executable, "-m", module, "--warm"]
    started = [
        subprocess.Popen([*command, part], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for part in parts
    ]
    for process in started:
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def results_file(name: str) -> Path:
    """Where results go: the folder $OUT, if there is one, or bench/results."""
    folder = os.environ.get("OUT") or Path(__file__).parent / "results"
    return Path(folder) / name
