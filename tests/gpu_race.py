"""Races and memory errors of every GPU kernel: `make test-gpu-race`, or `python -m tests.gpu_race`.

Each part makes the calls of `tests.engines.kernel_calls`, in processes beside each other:

- run: as they are, which fills Triton's cache for the parts after it
- repeats: on fresh inputs, each twice, under `torch.use_deterministic_algorithms`; every bit must
  repeat
- memcheck, racecheck: under NVIDIA's compute-sanitizer
- consan: compiled with Triton's concurrency sanitizer, which checks what barriers order
- fuzz: generated problems, `tests.gpu_fuzz`

What a part finds is printed with a command that repeats it. A part that is out of time says what it
did not reach. The results go to bench/results/gpu_race.json, or into the folder `OUT`, and `--page`
writes them into docs/gpu.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench import between_marks, described
from bench.pairs import RESULTS, machine
from tests import gpu_fuzz
from tests.engines import kernel_calls

PAGE = Path(__file__).parents[1] / "docs" / "gpu.md"
SECONDS = {"run": 90, "repeats": 90, "memcheck": 90, "racecheck": 120, "consan": 120, "fuzz": 150}
REPEATS = 1000
SANITIZER = "compute-sanitizer"
ERRORS = 9  # its exit status if it found something
MASKS = ("plain", "causal", "window", "documents", "prefix", "two intervals", "lengths", "sinks")
BIASED = ("capped", "alibi", "bias", "half", "dense", "buckets", "both")


def calls(part: str) -> list[str]:
    """The calls of a part: an engine, whether statistics are observed, and what `make` takes."""
    kinds, widths = (*MASKS, "capped"), (64, 128, 256)
    found = [f"triton observed {x} {y} bfloat16" for x, y in product((*MASKS, *BIASED), (64, 128))]
    found += [f"{x} observed {y} {z} bfloat16" for x, y, z in product(("hopper",), kinds, widths)]
    found += [f"hopper attended {x} {y} bfloat16" for x, y in product(kinds, widths)]
    found += [f"triton observed {x} 64 float32" for x in ("causal", "two intervals")]
    found += [f"triton observed {x} 256 bfloat16" for x in ("causal", "documents")]
    found += [f"triton observed {x} 64 bfloat16" for x in kernel_calls.OTHERS]
    if part == "consan":  # what has asynchronous copies and barriers
        found = [x for x in found if "bfloat16" in x and x.split()[2] in kinds]
    if part == "repeats":
        found = [x for x in found if "stored" not in x]
    return found


@dataclass(frozen=True)
class Finding:
    """What one call of a part came to."""

    call: str
    times: int = 0
    error: str | None = None
    skipped: str | None = None


def make(call: str) -> list[Tensor]:
    """Make a call on the GPU."""
    engine, how, name = call.split(" ", 2)
    return kernel_calls.make(name, engine, how == "observed")


def refusal(call: str) -> str | None:
    """Why an engine can't serve a call; None if it can."""
    engine, how, name = call.split(" ", 2)
    kind, width, dtype = name.rsplit(" ", 2)
    if kind in kernel_calls.OTHERS:
        return None
    shapes = [(1, heads, kernel_calls.N, int(width)) for heads in (2, 1, 1)]
    given = kernel_calls.leaves(kernel_calls.DTYPES[dtype], *shapes)
    more = kernel_calls.options(kind)
    return hw.explain(*given, observed=how == "observed", **more).reasons[engine]


def work(part: str, names: list[str], seconds: float) -> None:
    """Make some of a part's calls in this process, and print a line of JSON for each."""
    kernel_calls.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
    stop = time.monotonic() + seconds
    if part == "consan":
        import triton

        triton.set_allocator(
            lambda size, align, stream: torch.empty(size, dtype=torch.int8, device="cuda")
        )
        torch.autograd.set_multithreading_enabled(False)  # the allocator belongs to a thread
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    for name in names:
        if time.monotonic() > stop:
            print(json.dumps(asdict(Finding(name, skipped="no time left"))), flush=True)
            continue
        print(json.dumps(asdict(tried(part, name, stop, len(names)))), flush=True)


def tried(part: str, name: str, stop: float, share: int) -> Finding:
    """Make one call, for `repeats` as often as the share of the time allows."""
    try:
        if (reason := refusal(name)) is not None:
            return Finding(name, skipped=reason)
        if part == "repeats":
            return repeated(
                name, min(stop, time.monotonic() + (stop - time.monotonic()) / share * 2)
            )
        make(name)[0].sum().item()  # wait for it
        return Finding(name, 1)
    except Exception as error:  # whatever a kernel raises is a finding
        return Finding(name, error=f"{type(error).__name__}: {error}".replace("\n", " ")[:400])


def repeated(name: str, stop: float, first: int = 0, count: int = REPEATS) -> Finding:
    """Make a call twice on each of so many inputs; every bit must be the same."""
    differing: list[Tensor] = []
    for seed in range(first, first + count):
        if seed % 50 == 0 and time.monotonic() > stop:
            count = seed - first
            break
        torch.manual_seed(seed)
        one = make(name)
        torch.manual_seed(seed)
        other = make(name)
        pairs = zip(one, other, strict=True)
        differing.append(torch.stack([~same_bits(x, y) for x, y in pairs]).any())
    bad = torch.stack(differing).nonzero().flatten().tolist() if differing else []
    error = (
        f"{len(bad)} of {count} inputs gave other bits, the first with seed {bad[0]}"
        if bad
        else None
    )
    return Finding(name, count, error)


def same_bits(x: Tensor, y: Tensor) -> Tensor:
    """Whether two tensors hold the same bits, as a tensor on their device."""
    x, y = (z.detach().contiguous().view(torch.uint8) for z in (x, y))
    return (x == y).all()


def spread(part: str, workers: int, seconds: float, logs: Path) -> list[Finding]:
    """The findings of a part, from processes beside each other."""
    names = calls(part)
    shares = [names[number::workers] for number in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda share: in_process(part, share, seconds, logs), shares)
        return [finding for share in found for finding in share]


def in_process(part: str, names: list[str], seconds: float, logs: Path) -> list[Finding]:
    """The findings of one process; one that dies is started again for the calls after."""
    stop, found, done = time.monotonic() + seconds, list[Finding](), 0
    while done < len(names):
        left = stop - time.monotonic()
        if left <= 0:
            return found + [Finding(x, skipped="no time left") for x in names[done:]]
        made, more = run(part, names[done:], left, logs)
        found, done = found + made + more, done + max(1, len(made))
        if more and more[-1].skipped is not None:
            break  # it was out of time, and told of all that it left
    return found


def run(
    part: str, names: list[str], seconds: float, logs: Path
) -> tuple[list[Finding], list[Finding]]:
    """The findings of one process, one per call that it made, and what ended or judged it."""
    command = [sys.executable, "-m", "tests.gpu_race", "--part", part, "--limit", f"{seconds}"]
    command += names
    environment = dict(os.environ)
    if part in ("memcheck", "racecheck"):
        tool = [str(sanitizer()), "--tool", part, "--error-exitcode", str(ERRORS)]
        command = [*tool, "--print-limit", "5", *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if part == "consan":
        environment["TRITON_INSTRUMENTATION_MODE"] = "consan"
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=seconds + 45,
        )  # fmt: skip
        said, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as error:
        kept = error.stdout or b""
        said, status = kept if isinstance(kept, str) else kept.decode(), None
    lines = [line for line in said.splitlines() if line.startswith('{"call"')]
    made = [Finding(**json.loads(line)) for line in lines]
    if status is None:
        return made, [Finding(x, skipped="took too long") for x in names[len(made) :]]
    if status == 0 and len(made) == len(names):
        return made, []
    log = logs / f"gpu_race_{part}_{names[0].replace(' ', '_')}.log"
    log.write_text(said[-200_000:], "utf-8")
    if status == ERRORS:
        reports = [x.strip() for x in re.findall(r"^=+ +(\S.*)$", said, re.MULTILINE)]
        told = " | ".join(x for x in reports if not x.startswith("COMPUTE"))[:600]
        return made, [Finding(" · ".join(names[: len(made) + 1]), error=f"{told} ({log.name})")]
    ends = " ".join(said.splitlines()[-3:])[-400:]
    missing = names[len(made)] if len(made) < len(names) else names[-1]
    return made, [Finding(missing, error=f"its process ended with {status}: {ends} ({log.name})")]


def sanitizer() -> str | None:
    """The path of compute-sanitizer; None if it is not installed."""
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path="/usr/local/cuda/bin")


def checked(part: str, given: argparse.Namespace) -> dict[str, Any]:
    """The results of a part."""
    start, seconds = time.monotonic(), given.seconds or SECONDS[part]
    if part == "fuzz":
        told = gpu_fuzz.fuzz(
            gpu_fuzz.asked("--workers", str(given.workers), "--seconds", str(seconds))
        )
        return told | {"failed": [f"problem {seed}: {error}" for seed, error in told["failed"]]}
    if part in ("memcheck", "racecheck") and sanitizer() is None:
        return {"missing": f"{SANITIZER} is not installed"}
    found = spread(part, given.workers, seconds, given.json.parent)
    failed = [f"{x.call}: {x.error}" for x in found if x.error is not None]
    late = [x.call for x in found if x.skipped in ("no time left", "took too long")]
    times = [x.times for x in found if x.times]
    made: dict[str, Any] = {"calls": len(times), "failed": failed, "not reached": late}
    if part == "repeats":
        made["repeats"] = {"least": min(times, default=0), "all": sum(times)}
    return made | {"seconds": round(time.monotonic() - start)}


def table(results: dict[str, Any]) -> str:
    """The results in Markdown."""
    rows = ["| part | calls | errors | not reached | seconds |", "|---|---|---|---|---|"]
    for part in SECONDS:
        row = results.get(part)
        if row is None or "missing" in row:
            rows.append(f"| {part} | – | {'–' if row is None else row['missing']} | – | – |")
            continue
        count = row.get("calls", row.get("problems"))
        if "repeats" in row:
            count = f"{count}, {row['repeats']['least']:,} to {REPEATS:,} inputs each"
        late = len(row.get("not reached", []))
        rows.append(f"| {part} | {count} | {len(row['failed'])} | {late} | {row['seconds']} |")
    about = f"{results['device']}, torch {results['machine']['torch']}, Triton {results['triton']}"
    failed = [f"- {part}: {x}" for part in SECONDS for x in results.get(part, {}).get("failed", [])]
    return "\n".join([f"{about}:", "", *rows, *([""] if failed else []), *failed])


def main() -> None:
    folder = Path(os.environ.get("OUT", RESULTS))
    parser = described(__doc__)
    parser.add_argument("names", nargs="*", help="calls, for --part")
    parser.add_argument("--only", nargs="*", choices=list(SECONDS), default=list(SECONDS))
    parser.add_argument("--workers", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--seconds", type=float, help="the limit of each part")
    parser.add_argument("--json", type=Path, default=folder / "gpu_race.json")
    parser.add_argument(
        "--page", action="store_true", help="write the file's results into docs/gpu.md"
    )
    parser.add_argument("--part", choices=list(SECONDS), help="make these calls in this process")
    parser.add_argument("--limit", type=float, default=600)
    given = parser.parse_args()
    if given.part is not None:
        work(given.part, given.names or calls(given.part), given.limit)
        return
    kept = json.loads(given.json.read_text("utf-8")) if given.json.exists() else {}
    if given.page:
        text = PAGE.read_text("utf-8")
        PAGE.write_text(between_marks(text, "make test-gpu-race", table(kept)), "utf-8")
        return
    if not torch.cuda.is_available():
        sys.exit("tests.gpu_race needs an NVIDIA GPU, and PyTorch finds none here")
    import triton

    kept |= {
        "machine": machine(),
        "device": torch.cuda.get_device_name(),
        "triton": triton.__version__,
    }
    for part in given.only:
        kept[part] = checked(part, given)
        print(f"{part}: {json.dumps(kept[part], ensure_ascii=False)[:2000]}", flush=True)
        given.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(table(kept))
    if any(kept[part].get("failed") for part in given.only):
        sys.exit(1)


if __name__ == "__main__":
    main()
