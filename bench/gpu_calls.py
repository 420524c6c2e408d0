"""Sections of `bench.gpu`: the cost of a call before its kernel runs."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

import headwise as hw
from bench.gpu_fused import serving
from bench.gpu_timing import Row, Run, say

_FIRST = """
import sys, time, torch, headwise as hw
q = torch.randn(1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize(); start = time.perf_counter()
hw.attention(q, q, q, mask=hw.mask.causal(), engine=sys.argv[1]); torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_calls() -> list[Row]:
    """Seconds of a process's first call, with nothing compiled and with the cache on disk."""
    rows = []
    q = torch.empty(1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)
    for engine in serving(q, q, q, mask=hw.mask.causal()):
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"TRITON_CACHE_DIR": folder}
            command = [sys.executable, "-c", _FIRST, engine]
            cold, cached = (
                float(subprocess.run(command, env=environment, stdout=-1, check=True).stdout)
                for _ in range(2)
            )
        rows.append(
            say({"engine": engine, "cold s": round(cold, 2), "from the cache s": round(cached, 2)})
        )
    return rows


class Lengths:
    """Calls no two of which have the same length."""

    def __init__(self) -> None:
        self.length = 100
        self.kept = torch.randn(1, 2, 2000, 64, device="cuda", dtype=torch.bfloat16)

    def __call__(self) -> None:
        self.length += 1
        x = self.kept[:, :, : self.length]
        hw.attention(x, x, x, mask=hw.mask.causal(), engine="triton")


def calls() -> list[Row]:
    """CPU microseconds of a call whose kernel takes almost no time.

    Repeated calls are replayed; calls of ever new lengths are prepared each time.
    """
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    causal, ids = hw.mask.causal(), torch.arange(64, device="cuda")[None] // 16
    documents = causal & hw.mask.documents(ids)
    runs: dict[str, Run] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention": lambda: hw.attention(q, k, v, mask=causal, engine="triton"),
        "documents": lambda: hw.attention(q, k, v, mask=documents, engine="triton"),
        "every statistic": lambda: hw.observe(q, k, v, mask=causal, engine="triton"),
        "attention, auto": lambda: hw.attention(q, k, v, mask=causal),
        "window, auto": lambda: hw.attention(q, k, v, mask=causal & hw.mask.window(9)),
        "every statistic, auto": lambda: hw.observe(q, k, v, mask=causal),
        "another length each time": Lengths(),
    }
    return [say(microseconds(runs)), say(microseconds(small_calls()))]


def small_calls() -> dict[str, Run]:
    """A call of 16 heads, n 256 and d 64, as a user makes it."""
    q, k, v = (torch.randn(1, 16, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    causal = hw.mask.causal()
    observed = {
        "observe, entropy": ("entropy",),
        "observe, five": ("lse", "entropy", "max_logit", "top_prob", "sink_mass"),
        "observe, every statistic": None,
    }
    return {
        "small: sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "small: attention": lambda: hw.attention(q, k, v, mask=causal),
        "small: attention, triton": lambda: hw.attention(q, k, v, mask=causal, engine="triton"),
    } | {
        f"small: {name}": lambda stats=stats: hw.observe(q, k, v, mask=causal, stats=stats)  # type: ignore[misc]
        for name, stats in observed.items()
    }


def microseconds(runs: dict[str, Run]) -> Row:
    """The wall time of each call while nothing waits for the GPU, and with it at the end."""
    row: Row = {}
    for name, run in runs.items():
        ahead, whole = [], []
        for _ in range(20):
            run()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                run()
            ahead.append((time.perf_counter() - start) / 20 * 1e6)
            torch.cuda.synchronize()
            whole.append((time.perf_counter() - start) / 20 * 1e6)
        row[f"{name} µs"] = round(statistics.median(ahead))
        if name.startswith("small"):
            row[f"{name}, waited for µs"] = round(statistics.median(whole))
    return row
