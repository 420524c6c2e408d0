"""Times one rank's kernels of a ring and of Ulysses alone, beside the bytes that each moves.

One GPU is enough: a step of a ring is this rank's rows over one other rank's keys, and Ulysses is a
call of few heads over the whole sequence. The time that a link needs for the bytes is computed from
--bandwidth, and said to be.

    python -m bench.distributed                        # on a GPU: 128k to 1M tokens, 2 to 64 ranks
    python -m bench.distributed --tokens 2048 --ranks 2 --device cpu
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch

import headwise as hw
from headwise.core.problem import pose
from headwise.core.sums import ENTROPY
from headwise.distributed.geometry import geometry
from headwise.distributed.key_blocks import KeyBlocks, Learnable, RunGradients
from headwise.distributed.key_exchange import KeyRun
from headwise.engines.plan import choose_partial

HEADS, KV_HEADS, WIDTH = 32, 8, 128


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median time of a call."""
    taken = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return sorted(taken[1:])[repeats // 2]


def step(tokens: int, ranks: int, device: torch.device, dtype: torch.dtype) -> dict[str, object]:
    """One step of a causal ring: the last rank's rows over another rank's keys, all visible."""
    part = tokens // ranks
    q = torch.randn(1, HEADS, part, WIDTH, device=device, dtype=dtype)
    k, v = torch.randn(2, 1, KV_HEADS, part, WIDTH, device=device, dtype=dtype).unbind(0)
    mask, layout = hw.mask.causal(), hw.distributed.contiguous()
    lengths = (part,) * ranks
    place = geometry(mask, 1, HEADS, lengths, lengths, layout)
    problem = pose("attention", q, k, v)
    engine = choose_partial(problem).name
    blocks = KeyBlocks(problem, place, ranks - 1, engine, ENTROPY, (), 1)
    given, run = Learnable(q, None, None, None, None, None), KeyRun(0, part, k, v)
    sums = blocks.forward(given, WIDTH, [run]).sums
    rows = RunGradients(blocks, given, sums, torch.randn_like(q), None, None, False)
    return {
        "tokens": tokens,
        "ranks": ranks,
        "move": "one step of a ring",
        "engine": engine,
        "forward_ms": 1e3 * seconds(lambda: blocks.forward(given, WIDTH, [run]), device),
        "backward_ms": 1e3 * seconds(lambda: rows.of(run), device),
        "bytes": 2 * KV_HEADS * part * WIDTH * dtype.itemsize,
    }


def by_heads(
    tokens: int, ranks: int, device: torch.device, dtype: torch.dtype
) -> dict[str, object]:
    """All of a causal call that one rank of Ulysses computes: its heads over all positions."""
    mask = hw.mask.causal()
    heads, kv_heads = HEADS // ranks, KV_HEADS // ranks
    given = [
        torch.randn(1, n, tokens, WIDTH, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, kv_heads, kv_heads)
    ]
    with torch.no_grad():
        forward = seconds(lambda: hw.attention(*given, mask=mask), device)
    out = hw.attention(*given, mask=mask)
    grad = torch.randn_like(out)

    def backward() -> None:
        torch.autograd.grad(out, given, grad, retain_graph=True)

    moved = hw.distributed.explain(
        tokens, ranks, mask=mask, heads=HEADS, kv_heads=KV_HEADS, width=WIDTH, dtype=dtype,
        move="ulysses",
    )  # fmt: skip
    return {
        "tokens": tokens,
        "ranks": ranks,
        "move": "ulysses",
        "engine": hw.explain(*given, mask=mask).engine,
        "forward_ms": 1e3 * forward,
        "backward_ms": 1e3 * seconds(backward, device),
        "bytes": max(moved.sent),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 18, 1 << 20])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--bandwidth", type=float, default=50e9, help="bytes per second of a link")
    parser.add_argument("--longest", type=int, default=1 << 15, help="positions per rank at most")
    parser.add_argument("--json", help="write the figures into this file")
    given = parser.parse_args()
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    found = []
    for tokens in given.tokens:
        for ranks in given.ranks:
            if tokens // ranks > given.longest:
                continue
            for time_one in (step, *([by_heads] if KV_HEADS % ranks == 0 else [])):
                figures = time_one(tokens, ranks, device, dtype)
                figures["link_ms_computed"] = 1e3 * float(str(figures["bytes"])) / given.bandwidth
                print({n: round(x, 3) if isinstance(x, float) else x for n, x in figures.items()})
                found.append(figures)
    if given.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({"machine": name, "torch": torch.__version__, "steps": found}, file, indent=2)


if __name__ == "__main__":
    main()
