"""A copy of the package and its tests, and work in processes of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "core": (
        *("tests/core", "tests/maps", "tests/test_attention.py", "tests/test_dropout.py"),
        *("tests/test_errors.py", "tests/test_mask.py", "tests/engines/test_agreement.py"),
        "headwise/core",
    ),
    "maps": ("tests/maps", "tests/core", "tests/test_errors.py", "headwise/maps"),
    "watching": ("tests/watching", "tests/nn/test_swap.py", "headwise/watching"),
    "distributed": ("tests/distributed", "headwise/distributed", "headwise/watching/ranks"),
}


class Tree:
    """A folder with the copy, what its tests run, and the verdicts so far."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.folder, self.root = folder, folder / "tree"
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        first = not self.root.exists()
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        told = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in told.stdout.splitlines():
            if (first or name.startswith("tests/")) and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        parts = [(self.root / "headwise" / part).rglob("*.py") for part in PARTS]
        files = sorted(str(file.relative_to(self.root)) for part in parts for file in part)
        self.sources = {file: (self.root / file).read_text() for file in files}

    def read(self, name: str) -> dict[str, Any]:
        """Return what an earlier run wrote."""
        file = self.folder / name
        return json.loads(file.read_text()) if file.exists() else {}

    def write(self, name: str, what: dict[str, Any]) -> None:
        """Write for the next run."""
        new = self.folder / f"{name}.new"
        new.write_text(json.dumps(what, indent=1, ensure_ascii=False))
        new.replace(self.folder / name)

    def tests_of(self, part: str) -> dict[str, str]:
        """Return the files with tests or examples of a part, each with a stamp of its text."""
        found = {}
        for place in PARTS[part]:
            path = self.root / place
            pattern = "*.py" if place.startswith("headwise") else "test_*.py"
            for file in sorted(path.rglob(pattern)) if path.is_dir() else [path]:
                stamp = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
                found[str(file.relative_to(self.root))] = stamp
        return found


def forked(work: Callable[[], object], folder: Path, seconds: float) -> Any:
    """Return what a forked process returns, "died" or, if it is not done in time, "timeout"."""
    answer = folder / "answer.json"
    answer.write_text('"died"')
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            answer.write_text(json.dumps(work()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    end = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return "timeout"
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test has left behind
    return json.loads(answer.read_text())
