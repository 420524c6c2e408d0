"""The time that spans add to hw.observe and hw.watch, on this machine's GPU or CPU.

    python -m bench.spans

A span is a second, smaller call over its own keys, so its share of the time should be about its
share of the keys. The figures are the shortest of several runs taken in turns.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import headwise as hw
from bench import described
from headwise.devices import cpu_name

RESULTS = Path(__file__).parent / "results"
CUDA = torch.cuda.is_available()
KEYS = 8192 if CUDA else 2048
SPANS = {"64 keys": (0, 64), "a quarter": (0, KEYS // 4), "all keys": (0, KEYS)}
ROUNDS = 20 if CUDA else 12
Run = Callable[[], object]


def main() -> None:
    """Print a table and write it to bench/results."""
    described(__doc__ or "").parse_args()
    times = {"hw.observe": observed(), "hw.watch": watched()}
    where = torch.cuda.get_device_name() if CUDA else f"{cpu_name()}, one thread"
    print(f"{where}, 8 heads of width 64, {KEYS} tokens, causal")
    for call, found in times.items():
        plain = found.pop("plain")
        print(f"{call}: {plain:.2f} ms")
        for name, each in found.items():
            print(f"  a span of {name}: {each - plain:+.2f} ms, {each / plain - 1:+.1%}")
        found["plain"] = plain
    file = RESULTS / ("spans_gpu.json" if CUDA else "spans_cpu.json")
    file.write_text(json.dumps({"machine": where, "keys": KEYS, "ms": times}, indent=2) + "\n")


def observed() -> dict[str, float]:
    """hw.observe with every statistic, without spans and with one."""
    kind = {"device": "cuda", "dtype": torch.bfloat16} if CUDA else {}
    q, k, v = torch.randn(3, 1, 8, KEYS, 64, **kind).unbind(0)  # type: ignore[arg-type]

    def run(**options: object) -> Run:
        return lambda: hw.observe(q, k, v, mask=hw.mask.causal(), **options)  # type: ignore[arg-type]

    runs = {"plain": run()}
    return shortest(runs | {name: run(spans={"a": span}) for name, span in SPANS.items()})


def watched() -> dict[str, float]:
    """A watched layer of 8 heads with 64 rows observed, without spans and with one."""
    kind = {"device": "cuda", "dtype": torch.bfloat16} if CUDA else {}
    model: nn.Module = hw.nn.MultiHeadAttention(512, 8, mask=hw.mask.causal()).to(**kind)  # type: ignore[call-overload]
    x = torch.randn(1, KEYS, 512, **kind)  # type: ignore[arg-type]

    def run(**options: object) -> Run:
        watch = hw.watch(model, rows=64, maps=False, **options)  # type: ignore[arg-type]

        def forward() -> None:
            with watch, torch.no_grad():
                model(x)

        return forward

    runs = {"plain": run()}
    return shortest(runs | {name: run(spans={"a": span}) for name, span in SPANS.items()})


def shortest(runs: dict[str, Run]) -> dict[str, float]:
    """The shortest time of each run in milliseconds, taken in turns."""
    found = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            if CUDA:
                torch.cuda.synchronize()
            found[name] = min(found[name], 1000 * (time.perf_counter() - begun))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
