"""The cost of watching a training step on a GPU: `python -m bench.watch_gpu`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headwise as hw
from bench import described
from headwise.models import GPT, GPTConfig
from headwise.nn import SwiGLU

RESULTS = Path(__file__).parent / "results" / "watch_gpu.json"
CONFIG = GPTConfig(
    vocabulary=8192, context=8192, d_model=1024, layers=8, heads=8, feed_forward=SwiGLU(2816)
)
ROUNDS = 7
WAYS: dict[str, dict[str, Any] | None] = {
    "unwatched": None,
    "rows=64": {"rows": 64, "maps": False},
    "every row": {"maps": False},
}


def main() -> None:
    described(__doc__).parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.watch_gpu needs an NVIDIA GPU, and PyTorch finds none here")
    torch.manual_seed(0)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for n in (2048, 8192):
        found[f"n={n}"] = measured(n, 16384 // n)
        print(f"n={n}", found[f"n={n}"], flush=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def measured(n: int, batch: int) -> dict[str, float]:
    """Milliseconds of a step of each kind: medians over rounds in which they alternate."""
    model = GPT(CONFIG).cuda()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, CONFIG.vocabulary, (batch, n + 1), device="cuda")

    def step(options: dict[str, Any] | None) -> None:
        watch = None if options is None else hw.watch(model, **options).attach()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(ids[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
        if watch is not None:
            watch.step()
            watch.detach()

    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for round_ in range(ROUNDS + 2):
        for name, options in WAYS.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step(options)
            stop.record()
            torch.cuda.synchronize()
            if round_ >= 2:  # the first steps compile
                times[name].append(start.elapsed_time(stop))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    medians["rows=64, against unwatched"] = medians["rows=64"] / medians["unwatched"]
    medians["every row, against unwatched"] = medians["every row"] / medians["unwatched"]
    return {name: round(value, 3) for name, value in medians.items()}


if __name__ == "__main__":
    main()
