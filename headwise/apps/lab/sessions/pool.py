"""Several commands at a time, for as long as there is time."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from headwise import devices

TOLD = 30.0
"""Seconds between two reports of what runs."""

STOPPING = 15.0
"""Seconds that processes have to save what they do, before they are killed."""


@dataclass(frozen=True)
class Job:
    """A command of headwise, by a name; one that measures time runs alone."""

    name: str
    arguments: tuple[str, ...]
    alone: bool = False

    @property
    def command(self) -> list[str]:
        """The command as the system takes it."""
        return [sys.executable, "-m", "headwise", *self.arguments]


@dataclass(frozen=True)
class Ended:
    """A job that ended by itself: well if its code is 0."""

    name: str
    code: int
    seconds: float
    last_line: str


@dataclass
class StartedJob:
    """A job whose process runs."""

    job: Job
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    begun: float


def work(
    jobs: Sequence[Job],
    *,
    workers: int,
    seconds: float,
    logs: Path,
    tell: Callable[[Ended], None] = lambda ended: None,
    watch: Callable[[str, str], None] = lambda name, line: None,
) -> list[Ended]:
    """Run jobs, at most `workers` at a time, until they or the seconds are at an end.

    What still runs then is stopped; it resumes from what it kept when it is run again. A job that
    fails does not stop the others. `watch` is told the last line of each job that runs, now and
    then.
    """
    logs.mkdir(parents=True, exist_ok=True)
    told = time.monotonic()
    deadline = told + seconds
    waiting = sorted(jobs, key=lambda job: not job.alone)
    running: list[StartedJob] = []
    ended: list[Ended] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < (1 if waiting[0].alone else workers):
                if running and running[0].job.alone:
                    break
                running.append(start(waiting.pop(0), workers, logs))
            time.sleep(0.05)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                ended.append(finished(each, logs))
                tell(ended[-1])
            if time.monotonic() - told > TOLD:
                told = time.monotonic()
                for each in running:
                    watch(each.job.name, last_line(each, logs))
    finally:
        stop(running)
    return ended


def start(job: Job, workers: int, logs: Path) -> StartedJob:
    """Start the process of a job; what it prints goes to its log."""
    threads = max(1, devices.usable_cores() // workers)
    log = (logs / f"{job.name}.log").open("wb")
    process = subprocess.Popen(
        job.command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
        },
    )
    return StartedJob(job, process, log, time.monotonic())


def finished(running: StartedJob, logs: Path) -> Ended:
    """The end of a job whose process has ended."""
    running.log.close()
    seconds = round(time.monotonic() - running.begun, 1)
    return Ended(running.job.name, running.process.returncode, seconds, last_line(running, logs))


def last_line(running: StartedJob, logs: Path) -> str:
    """The last line that a job has printed."""
    said = (logs / f"{running.job.name}.log").read_text(encoding="utf-8", errors="replace")
    return "".join([line for line in said.splitlines() if line.strip()][-1:])


def stop(running: Sequence[StartedJob]) -> None:
    """End the processes that are left: politely, and after `STOPPING` seconds for certain."""
    latest = time.monotonic() + STOPPING
    for each in running:
        each.process.terminate()
    for each in running:
        try:
            each.process.wait(max(0.0, latest - time.monotonic()))
        except subprocess.TimeoutExpired:
            each.process.kill()
            each.process.wait()
        each.log.close()
