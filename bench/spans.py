"""The time that spans add to hw.observe and hw.watch, on this machine's GPU or CPU.

    python -m bench.spans

A span is a second, smaller call over its own keys, so its share of the time should be about its
share of the keys. The figures are the shortest of several runs taken in turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import headwise as hw
from bench import described
from bench.pairs import Way, alternated
from headwise.devices import cpu_name

RESULTS = Path(__file__).parent / "results"
CUDA = torch.cuda.is_available()
KEYS = 8192 if CUDA else 2048
SPANS = {"64 keys": (0, 64), "a quarter": (0, KEYS // 4), "all keys": (0, KEYS)}
ROUNDS = 20 if CUDA else 12
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def main() -> None:
    """Print a table and write it to bench/results."""
    described(__doc__ or "").parse_args()
    check()
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


def check() -> None:
    """Compare the weights on spans with the sums of the map's columns, on this device."""
    q, k, v = torch.randn(3, 2, 8, 1000, 64, device=DEVICE, dtype=DTYPE).unbind(0)
    k, v, mask = k[:, :2], v[:, :2], hw.mask.causal() & hw.mask.window(700)
    spans = {"start": (0, 57), "middle": (300, 900), "none": (4, 4)}
    _, seen = hw.observe(q, k, v, mask=mask, sinks=q.new_zeros(8), spans=spans)
    amap = hw.attention_map(q, k, mask=mask, sinks=q.new_zeros(8))
    for name, span in spans.items():
        torch.testing.assert_close(seen.spans[name], amap.mass(*span), atol=1e-5, rtol=1e-4)


def observed() -> dict[str, float]:
    """hw.observe with every statistic, without spans and with one."""
    q, k, v = torch.randn(3, 1, 8, KEYS, 64, device=DEVICE, dtype=DTYPE).unbind(0)

    def run(**options: Any) -> Way:
        return Way(lambda: hw.observe(q, k, v, mask=hw.mask.causal(), **options))

    return timed(run)


def watched() -> dict[str, float]:
    """A watched layer of 8 heads with 64 rows observed, without spans and with one."""
    model: nn.Module = hw.nn.MultiHeadAttention(512, 8, mask=hw.mask.causal()).to(DEVICE, DTYPE)
    x = torch.randn(1, KEYS, 512, device=DEVICE, dtype=DTYPE)

    def run(**options: Any) -> Way:
        watch = hw.watch(model, rows=64, maps=False, **options)

        def forward() -> None:
            with watch, torch.no_grad():
                model(x)

        return Way(forward)

    return timed(run)


def timed(run: Callable[..., Way]) -> dict[str, float]:
    """The shortest time in milliseconds without spans, and with each of them."""
    ways = {"plain": run()} | {name: run(spans={"a": span}) for name, span in SPANS.items()}
    return alternated(ways, ROUNDS, of=min)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
