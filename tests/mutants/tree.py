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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "core": (
        *("tests/core", "tests/maps", "tests/test_attention.py", "tests/test_dropout.py"),
        *("tests/test_errors.py", "tests/test_mask.py", "tests/engines/test_agreement.py"),
        *("tests/watching/test_adapters_masks.py", "tests/nn/test_caches.py", "headwise/core"),
        *("tests/engines/test_triton_parts.py", "tests/engines/test_triton_edges.py"),
    ),
    "maps": (
        *("tests/maps", "tests/core", "tests/test_errors.py", "tests/engines/test_transforms.py"),
        "headwise/maps",
    ),
    "watching": (
        *("tests/watching", "tests/nn/test_swap.py", "tests/distributed/test_model_parallel.py"),
        *("tests/apps/cli/test_watch.py", "tests/apps/train/test_watched.py"),
        *("tests/engines/test_triton_ragged.py", "tests/engines/test_triton_recording.py"),
        "headwise/watching",
    ),
    "distributed": ("tests/distributed", "headwise/distributed", "headwise/watching/ranks"),
}


class Tree:
    """A folder with the copy, what its tests run, and the verdicts so far."""

    def __init__(self, folder: Path, fresh: bool) -> None:
        self.folder, self.root = folder, folder / "tree"
        if fresh:
            shutil.rmtree(self.root, ignore_errors=True)
            (folder / "tests.json").unlink(missing_ok=True)
            if (verdicts := folder / "verdicts.json").exists():
                verdicts.replace(folder / "before.json")
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

    def copied(self, slots: int) -> list[Path]:
        """Return a copy of the tree for each slot, where files may be changed."""
        found = [self.folder / f"tree-{slot}" for slot in range(slots)]
        for copy in found:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(self.root, copy)
        return found

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


@dataclass(frozen=True)
class Job:
    """Work for a process of its own, which is told its slot, and the seconds it may take."""

    name: str
    work: Callable[[int], object]
    seconds: float


def spread(jobs: Iterable[Job], folder: Path, workers: int = 1) -> Iterator[tuple[Job, int, Any]]:
    """Run jobs in forked processes, several at once: yield each with its slot and its answer.

    The answer is what the work returns, "died" or, if it is not done in time, "timeout".
    """
    waiting, free = iter(jobs), list(range(workers))
    running: dict[int, tuple[int, Job, float]] = {}
    while True:
        while free and (job := next(waiting, None)) is not None:
            slot = free.pop()
            running[slot] = begun(job, slot, folder), job, time.monotonic() + job.seconds
        if not running:
            return
        time.sleep(0.02)
        for slot, (child, job, end) in list(running.items()):
            late = time.monotonic() > end
            if not late and os.waitpid(child, os.WNOHANG) == (0, 0):
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # and what a test has left behind
            if late:
                os.waitpid(child, 0)
            del running[slot]
            free.append(slot)
            answer = json.loads((folder / f"answer-{slot}.json").read_text())
            yield job, slot, "timeout" if late else answer


def begun(job: Job, slot: int, folder: Path) -> int:
    """Fork, and return the process that works."""
    answer = folder / f"answer-{slot}.json"
    answer.write_text('"died"')
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(folder / f"log-{slot}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        try:
            answer.write_text(json.dumps(job.work(slot)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    return child


def forked(work: Callable[[int], object], folder: Path, seconds: float) -> Any:
    """Return the answer of one piece of work."""
    ((_, _, answer),) = spread([Job("", work, seconds)], folder)
    return answer
