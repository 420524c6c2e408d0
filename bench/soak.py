"""The memory of a long watched training: 20,000 steps of a small GPT on the CPU, recorded.

    python -m bench.soak

Every step has a forward, a backward and an optimiser, is looked at and written into a run's folder.
The resident memory, the traced Python memory and the number of Python objects are sampled on the
way. The series keeps its last 1000 steps, so the curve is judged from there on.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import time
import tracemalloc
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import headwise as hw
from bench import described
from headwise.devices import cpu_name
from headwise.models import GPT, GPTConfig
from headwise.watching.training_steps import IN_MEMORY

RESULTS = Path(__file__).parent / "results"
SMALL = GPTConfig(vocabulary=50, d_model=16, layers=1, heads=4, feed_forward=hw.nn.SwiGLU(16))


@dataclass(frozen=True)
class Sample:
    """The memory of this process after some steps."""

    step: int
    resident_mib: float
    traced_mib: float
    objects: int


def main() -> None:
    """Print the curve and write it to bench/results."""
    parser = described(__doc__ or "")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--json", type=Path, default=RESULTS / "soak.json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        samples = soaked(given.steps, max(1, given.steps // 20), Path(folder))
    machine = f"{cpu_name()}, one thread, torch {torch.__version__}"
    print(f"{machine}, {time.monotonic() - begun:.0f} s")
    print(f"{'step':>8}{'resident, MiB':>16}{'traced, MiB':>16}{'objects':>12}")
    for x in samples:
        print(f"{x.step:>8}{x.resident_mib:>16.2f}{x.traced_mib:>16.3f}{x.objects:>12}")
    growth = grown(samples)
    print(", ".join(f"{name}: {x:+.3g}" for name, x in growth.items()))
    found = {"machine": machine, "samples": [asdict(x) for x in samples], "per step": growth}
    given.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def soaked(steps: int, every: int, folder: Path) -> list[Sample]:
    """Train and watch for so many steps; the memory at every `every`-th of them."""
    model = GPT(SMALL)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    ids = torch.randint(SMALL.vocabulary, (2, 16))
    watch = hw.watch(model)
    samples = []
    tracemalloc.start()
    with watch, watch.record(folder / "run", seconds=1e9):
        for step in range(1, steps + 1):
            optimiser.zero_grad()
            model(ids).logsumexp(-1).mean().backward()
            optimiser.step()
            if step % every == 0:
                samples.append(sample(step))
    tracemalloc.stop()
    return samples


def sample(step: int) -> Sample:
    """The memory of this process now, without garbage."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    traced = tracemalloc.get_traced_memory()[0]
    return Sample(step, resident / 2**20, traced / 2**20, len(gc.get_objects()))


def grown(samples: list[Sample]) -> dict[str, float]:
    """What a step adds, from the first sample with a full series in memory to the last."""
    first = next((x for x in samples if x.step >= IN_MEMORY), samples[0])
    last = samples[-1]
    steps = max(1, last.step - first.step)
    return {
        "resident bytes": (last.resident_mib - first.resident_mib) * 2**20 / steps,
        "traced bytes": (last.traced_mib - first.traced_mib) * 2**20 / steps,
        "objects": (last.objects - first.objects) / steps,
    }


if __name__ == "__main__":
    main()
