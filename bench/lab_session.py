"""The lab's long trainings on a borrowed machine: several lanes at once, kept and resumed.

A GPU is shared by a few processes; the CPU's cores train small readers beside it. What is finished
is kept in a folder, and the same command continues with the rest. Needs `HEADWISE_CACHE` with the
corpora where there is no network.

    python -m bench.lab_session --minutes 9 --out results
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from headwise import devices
from headwise.apps.lab import ablations, record
from headwise.apps.lab.laboratory import Lab
from headwise.apps.lab.sessions import long_runs, pieces, pool
from headwise.apps.lab.sessions.pieces import TrainingPiece
from headwise.apps.lab.sessions.pool import Ended, Job
from headwise.apps.lab.translation_runs import learn_subwords

FIRST = (
    *("step-times", "translate-lstm-attention", "translate-base", "translate-heads-1"),
    *("translate-shared", "translate-unscaled", "translate-additive", "translate-fixed"),
    *("translate-heads-16", "translate-keys-half", "translate-twin-keys-half"),
    *("translate-unprojected", "translate-unscaled-narrow", "translate-heads-4"),
    *("translate-convolution", "translate-recurrence", "translate", "phase", "atlas"),
)
"""The order of what trains on the GPU: the longest first, then what claims need."""
READERS = (
    *("content", "remember", "scale", "adapt", "recall", "setting", "few", "relation", "echo"),
    *("gradients", "earlier"),
)
"""The order of the small readers."""
TRIED = (
    *("step-times", "phase-LSTM-10000", "atlas-language-64-512", "translate-recurrence"),
    *("phase-attention-10000", "phase-linear-10000", "phase-convolution-10000"),
)
"""What a short session tries: one of each kind."""
TOGETHER = 4
"""Readers in one process, which takes seconds to start."""


def place(name: str, order: Sequence[str]) -> int:
    """The place of a piece in an order of beginnings of names."""
    return next((at for at, begun in enumerate(order) if name.startswith(begun)), len(order))


def job(form: str, names: Sequence[str], folder: Path, device: str, alone: bool = False) -> Job:
    """A process that makes these pieces."""
    options = ("--form", form, "--out", str(folder), "--device", device)
    return Job(f"{form}-{names[0]}", ("lab", "piece", *names, *options), alone)


def left(lab: Lab, chosen: str) -> tuple[list[TrainingPiece], list[TrainingPiece]]:
    """The pieces that a folder lacks: those of the GPU, and the readers."""
    missing = [each for each in pieces.every(lab) if not each.done(lab)]
    gpu = [x for x in missing if (x.alone or x.name == "step-times") and "chinese" not in x.name]
    if chosen:
        gpu = [x for x in gpu if x.name.startswith(tuple(chosen.split(",")))]
    readers = [x for x in missing if x not in gpu and x.name.startswith(READERS)]
    return (
        sorted(gpu, key=lambda x: place(x.name, FIRST)),
        sorted(readers, key=lambda x: place(x.name, READERS)),
    )


WHEN: dict[str, float] = {}
"""When each job ended."""


def tell(ended: Ended) -> None:
    """Print the end of a job."""
    WHEN[ended.name] = time.monotonic()
    how = "failed: " if ended.code else ""
    print(f"{ended.name:<44} {ended.seconds:7.1f} s  {how}{ended.last_line[-300:]}", flush=True)


def lane(jobs: Sequence[Job], workers: int, seconds: float, logs: Path, ended: list[Ended]) -> None:
    """Run jobs, some at a time, until the time is over."""
    if jobs and workers:
        ended += pool.work(jobs, workers=workers, seconds=seconds, logs=logs, tell=tell)


def shared_gpu() -> None:
    """Let processes run on the GPU at the same time, where NVIDIA's MPS is installed."""
    if shutil.which("nvidia-cuda-mps-control"):
        done = subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
        print(f"MPS: {'on' if done.returncode == 0 else 'did not start'}", flush=True)
    else:
        print("MPS is not installed: processes take turns on the GPU", flush=True)


def packed(folder: Path, file: Path) -> None:
    """Everything that was kept, as one archive."""
    with tarfile.open(file, "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, path.relative_to(folder))


def main() -> None:
    """Run a session and print what it finished."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--minutes", type=float, default=9.0)
    asked.add_argument("--out", type=Path, default=Path("build/lab"))
    asked.add_argument("--resume", type=Path, help="an archive of an earlier session")
    asked.add_argument("--pack", type=Path, help="the archive to write at the end")
    asked.add_argument("--gpu", type=int, default=4, help="processes that share the GPU")
    asked.add_argument("--cpu", type=int, default=11, help="processes for small readers")
    asked.add_argument("--only", default="", help="beginnings of names of GPU pieces")
    asked.add_argument("--try", dest="tried", action="store_true", help="one piece of each kind")
    asked.add_argument("--form", default="full")
    asked.add_argument("--device", default="cuda")
    given = asked.parse_args()
    begun = time.monotonic()
    if given.resume is not None and given.resume.exists():
        with tarfile.open(given.resume) as archive:
            archive.extractall(given.out, filter="data")
    full = Lab(given.form, devices.chosen("cpu"), given.out)
    (given.out / "kept").mkdir(parents=True, exist_ok=True)
    if given.device == "cuda":
        shared_gpu()
    learn_subwords(full)
    gpu, readers = left(full, ",".join(TRIED) if given.tried else given.only)
    quick = left(Lab("quick", devices.chosen("cpu"), given.out / "quick"), "none")[1]
    hands = [
        job(form, [x.name for x in of[at : at + TOGETHER]], folder, "cpu")
        for form, of, folder in (
            (given.form, readers, given.out),
            ("quick", quick if given.form == "full" else [], given.out / "quick"),
        )
        for at in range(0, len(of), TOGETHER)
    ]
    jobs = [
        job(given.form, [x.name], given.out, given.device, alone=x.name == "step-times")
        for x in gpu
    ]
    print(f"{len(jobs)} jobs for the GPU, {len(hands)} for the cores", flush=True)
    ended: list[Ended] = []
    seconds = 60 * given.minutes - (time.monotonic() - begun) - 20
    lanes = [
        threading.Thread(target=lane, args=(of, workers, seconds, given.out / "logs", ended))
        for of, workers in ((jobs, given.gpu), (hands, given.cpu))
    ]
    for each in lanes:
        each.start()
    for each in lanes:
        each.join()
    took = time.monotonic() - begun
    done = [each.name for each in ended if each.code == 0]
    device = devices.chosen(given.device)
    table = [name for name in done if "-translate-" in name or name.endswith("step-times")]
    if table:
        until = max(WHEN[name] for name in table) - begun
        record.note_session(given.out, ablations.COMMAND, device, until, table)
    rest = [name for name in done if name not in table]
    record.note_session(given.out, long_runs.RUN, device, took, rest)
    (given.out / "jobs.json").write_text(
        json.dumps([[x.name, x.code, x.seconds, x.last_line[-500:]] for x in ended])
    )
    if given.pack is not None:
        for spare in (given.out / "kept").glob("*/"):
            shutil.rmtree(spare)  # folders to resume in, which are empty
        packed(given.out, given.pack)
    kept = len(list((given.out / "kept").glob("*.json")))
    print(f"{len(done)} jobs done, {len(ended) - len(done)} failed, {kept} pieces kept")
    print(f"{took:.0f} s; {os.cpu_count()} cores; {devices.machine(device)}")


if __name__ == "__main__":
    main()
