"""Effects of edges on this machine's GPU: the largest edges of a head, and a watched backward.

    python -m bench.gpu_effects

The 100 largest edges of one head of 100,000 tokens, with the memory they take at half and at the
whole length; and the time of forward and backward of a layer with and without a watch, alone and
with all rows of all heads pooled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from bench import described
from bench.pairs import shortest

RESULTS = Path(__file__).parent / "results" / "gpu_effects.json"
ROUNDS = 5


def main() -> None:
    """Print the figures and write them to bench/results."""
    described(__doc__ or "").parse_args()
    found = {
        "device": torch.cuda.get_device_name(),
        "largest": [largest(n, d) for d in (64, 128) for n in (50_000, 100_000)],
        "watched": [watched(n) for n in (4096, 16384, 32768)],
    }
    for name in ("largest", "watched"):
        for row in found[name]:
            print("  ".join(f"{key} {value}" for key, value in row.items()))
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


def largest(n: int, width: int) -> dict[str, Any]:
    """The 100 largest edges of a causal head in bf16, totals included."""
    q, k, v, grad = (
        torch.randn(1, 1, n, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )

    def run() -> object:
        return hw.effect_map(q, k, v, grad, mask=hw.mask.causal()).largest(100)

    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    beyond = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "n": n,
        "d": width,
        "ms": round(shortest({"ms": run}, ROUNDS)["ms"], 2),
        "MiB": round(beyond, 1),
    }


def watched(n: int) -> dict[str, Any]:
    """Forward and backward of a Transformer block: blind, watched, and with every head pooled."""
    torch.manual_seed(0)
    config = hw.models.GPTConfig(vocabulary=1024, context=n, d_model=2048, layers=2, heads=16)
    model = hw.models.GPT(config).to("cuda", torch.bfloat16)
    ids = torch.randint(0, 1024, (1, n), device="cuda")

    def step() -> None:
        model.zero_grad(set_to_none=True)
        hw.watching.sequence_loss(model(ids), ids).backward()

    def looking(pooled: bool, **options: Any) -> Callable[[], object]:
        def run() -> object:
            with hw.watch(model, maps=False, **options) as seen:
                step()
            if not pooled:
                return None
            return [seen.effects(layer, h).pool(256) for layer in (0, 1) for h in range(16)]

        return run

    few = {"stats": ("lse",), "rows": 64}  # the cost of statistics is another question
    runs = {
        "blind": step,
        "watched": looking(False, **few),
        "with effects": looking(False, effects=True, **few),
        "pooled": looking(True, effects=True, **few),
    }
    ms = shortest(runs, ROUNDS)
    times = {f"{name} ms": round(x, 2) for name, x in ms.items()}
    ratios = {f"{name} ×": round(x / ms["blind"], 3) for name, x in ms.items() if name != "blind"}
    return {"n": n, **times, **ratios}


if __name__ == "__main__":
    main()
