"""The cost of seeing in training on one GPU: `python -m bench.watch_gpu`.

Observed calls are compared with cuDNN's forward and backward, and watched training steps of a Llama
(8 layers × 1024, n 4096, batch 4, bfloat16) with unwatched ones: eager, compiled, and with
mode="reduce-overhead". Statistics computed inside attention are also compared with headwise's
attention unwatched. Every figure is a median over rounds in which the contenders alternate. A
way that is refused, or for which no time is left, is listed with that reason. Each compiled way
takes about half a minute to compile; with `--only`, several runs add to one file,
bench/results/watch_gpu.json. From it and from bench/results/watch.json, `--table` prints the table
of docs/watch.md. `--tiny` tests the benchmark itself, on a CPU too.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from bench import described
from bench.pairs import (
    RESULTS,
    Figure,
    Way,
    alternated,
    at_least,
    at_most,
    machine,
    say_figures,
)
from bench.watched_steps import (
    FIVE,
    INSIDE,
    SMALL,
    UNWATCHED,
    UNWATCHED_INSIDE,
    Size,
    WatchedLlama,
)

Results = dict[str, Any]
SHAPES = (  # batch, query heads, key heads, n, d, causal
    (4, 16, 16, 4096, 64, True),
    (2, 16, 4, 5000, 96, True),
    (2, 32, 8, 4096, 128, True),
    (1, 32, 8, 16384, 128, True),
    (1, 16, 16, 8192, 128, False),
    (1, 8, 8, 4096, 256, True),
)
TINY_SHAPES = ((1, 4, 2, 40, 16, True), (1, 2, 2, 33, 16, False))
MOST = {  # times an unwatched step: eager, compiled, with CUDA graphs
    "rows=64, beside": (1.03, 1.03, 1.10),
    "all rows, five statistics, beside": (1.06, 1.06, 1.10),
    "all rows, five statistics, inside": (1.04, 1.06, 1.10),
    "all rows, every statistic, beside": (1.12, 1.15, 1.15),
    "all rows, every statistic, inside": (1.12, 1.15, 1.15),
}
MODES = {"eager": None, "compiled": "default", "reduce-overhead": "reduce-overhead"}


class Bench:
    """The sections, and the time that is left for them."""

    def __init__(self, device: str, tiny: bool, seconds: float) -> None:
        self.device, self.tiny = device, tiny
        self.stop = time.monotonic() + seconds
        self.size = SMALL if tiny else Size()

    def observed(self) -> Results:
        """Five statistics in forward and backward, against the fused kernel without any."""
        return {
            _shape(shape): compared(shape, self.device, 3 if self.tiny else 8)
            for shape in (TINY_SHAPES if self.tiny else SHAPES)
        }

    def watched(self, mode: str) -> Results:
        """Milliseconds of each way to make a step, and why others are refused."""
        if MODES[mode] is not None:
            torch._dynamo.reset()
            torch._dynamo.config.recompile_limit = 64  # every way is a variant of the same code
        gc.collect()
        llama = WatchedLlama(self.size, self.device, MODES[mode])
        ways: dict[str, Way] = {}
        refused: dict[str, str] = {}
        for name in (UNWATCHED, UNWATCHED_INSIDE, *MOST):
            if time.monotonic() > self.stop:
                refused[name] = "no time left"
                continue
            try:
                ways[name] = llama.way(name)
            except (ValueError, RuntimeError, NotImplementedError) as error:
                refused[name] = str(error).splitlines()[0]
        found = alternated(ways, self.size.rounds, self.size.steps)
        made: Results = {"ms": found, "refused": refused}
        if mode == "eager":
            made["skipped µs"] = llama.skipped()
            made["memory"] = llama.memory("all rows, every statistic, beside")
        return made


def compared(shape: tuple[int, ...], device: str, rounds: int) -> Results:
    """Milliseconds of observed attention and of a fused kernel, forward and backward."""
    batch, heads, key_heads, n, width, causal = shape
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [
        torch.randn(batch, h, n, width, device=device, dtype=dtype, requires_grad=True)
        for h in (heads, key_heads, key_heads)
    ]
    grad = torch.randn(batch, heads, n, width, device=device, dtype=dtype)
    mask = hw.mask.causal() if causal else None

    def plain() -> tuple[Tensor, ...]:
        q, k, v = leaves
        grouped = heads != key_heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=grouped)
        return torch.autograd.grad(out, leaves, grad)

    def seeing() -> tuple[Tensor, ...]:
        return torch.autograd.grad(hw.observe(*leaves, mask=mask, stats=FIVE)[0], leaves, grad)

    fused = SDPBackend.CUDNN_ATTENTION if device == "cuda" else SDPBackend.FLASH_ATTENTION
    ways = {"fused": Way(plain, lambda: sdpa_kernel(fused)), "observed": Way(seeing)}
    found = alternated(ways, rounds, 3)
    plan = hw.explain(*leaves, mask=mask, observed=True)
    return found | {"engine": plan.engine, "backward": plan.backward}


def figures(results: Results) -> list[Figure]:
    """The targets of the sections that were measured."""
    made = []
    for shape, row in results.get("observed", {}).items():
        least = 0.95 if "d 256" in shape else 0.97
        name = f"observed forward and backward, to cuDNN's, {shape}"
        made.append(at_least(name, row["fused"] / row["observed"], least))
    for number, mode in enumerate(MODES):
        ms = results.get(mode, {"ms": {}})["ms"]
        for name, most in MOST.items():
            for base in (UNWATCHED, UNWATCHED_INSIDE) if name in INSIDE else (UNWATCHED,):
                if name in ms and base in ms:
                    to = "" if base == UNWATCHED else f", to {base}"
                    said = f"step, {mode}: {name}{to}"
                    made.append(at_most(said, ms[name] / ms[base], most[number]))
    eager = results.get("eager", {})
    if "skipped µs" in eager:
        made.append(at_most("a step that is passed over", eager["skipped µs"], 50, "µs more"))
    if eager.get("memory") is not None:
        name = "memory that a watch without maps keeps"
        made.append(at_most(name, eager["memory"] / 2**20, 1, "MiB"))
    return made


def table(results: Results, watched_on_cpu: Results) -> list[str]:
    """The rows of the table of docs/watch.md."""
    found = [_row(x.name, x) for x in figures(results)]
    for mode in MODES:
        refused = results.get(mode, {}).get("refused", {})
        found += [f"| step, {mode}: {name} | {why} | |" for name, why in refused.items()]
    on_cpu = [Figure(**x) for x in watched_on_cpu.get("figures", [])]
    name = "training step watched, "
    return found + [
        _row(f"CPU, one thread: {x.name.removeprefix(name)}", x)
        for x in on_cpu
        if x.name.startswith(name)
    ]


def _row(name: str, x: Figure) -> str:
    return f"| {name} | {x.value:.2f} {x.unit} | {x.target}{'' if x.met else ', **missed**'} |"


def main() -> None:
    """Measure and print, and write the JSON after every section."""
    parser = described(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test the benchmark")
    parser.add_argument("--only", nargs="*", choices=["observed", *MODES])
    parser.add_argument("--seconds", type=float, default=200, help="begin no new way after this")
    parser.add_argument("--json", type=Path, default=RESULTS / "watch_gpu.json")
    parser.add_argument("--table", action="store_true", help="print the table of the file")
    given = parser.parse_args()
    if given.table:
        print("\n".join(table(_read(given.json), _read(RESULTS / "watch.json"))))
        return
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("bench.watch_gpu needs an NVIDIA GPU, and PyTorch finds none here")
    bench = Bench(given.device, given.tiny, given.seconds)
    about: Results = {"machine": machine()}
    if given.device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    before = _read(given.json)
    results = before if before.get("machine") == about["machine"] else about
    sections: dict[str, Callable[[], Results]] = {"observed": bench.observed}
    sections |= {mode: lambda mode=mode: bench.watched(mode) for mode in MODES}  # type: ignore[misc]
    for name in given.only or sections:
        if time.monotonic() > bench.stop:
            print(f"{name}: no time left")
            continue
        started = time.monotonic()
        results[name] = sections[name]()
        print(f"{name}, {time.monotonic() - started:.0f} s: {results[name]}", flush=True)
        given.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    say_figures(figures(results))


def _shape(shape: tuple[int, ...]) -> str:
    batch, heads, key_heads, n, width, causal = shape
    kind = "causal" if causal else "full"
    return f"batch {batch}, {heads}/{key_heads} heads, n {n}, d {width}, {kind}"


def _read(file: Path) -> Results:
    return json.loads(file.read_text("utf-8")) if file.exists() else {}


if __name__ == "__main__":
    main()
