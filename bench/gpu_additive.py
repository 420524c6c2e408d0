"""A section of `bench.gpu`: additive attention against the compiled textbook form."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import headwise as hw
from bench.gpu_timing import Row, interleaved, normal, say

SPECIAL = 132 * 16 * 1.755e9  # special-function results per second, from the chip's specification


def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Bahdanau's attention as textbooks write it."""
    scores = (weight[:, None, None] * torch.tanh(q[:, :, :, None] + k[:, :, None])).sum(-1)
    return scores.softmax(-1) @ v


def adding() -> list[Row]:
    """Additive attention, 8 heads, d 64: against the compiled textbook, and where it can't run."""
    rows = []
    compiled = torch.compile(textbook)
    for n, dtype in ((2048, torch.float32), (2048, torch.bfloat16), (32768, torch.bfloat16)):
        leaves = [normal(1, 8, n, 64, dtype=dtype).requires_grad_() for _ in range(3)]
        leaves.append(normal(8, 64, dtype=dtype).requires_grad_())
        q, k, v, weight = leaves

        def own(q: Tensor = q, k: Tensor = k, v: Tensor = v, w: Tensor = weight) -> Tensor:
            return hw.attention(q, k, v, score=hw.Additive(w))

        runs: dict[str, Callable[[], Tensor]] = {"headwise": own}
        if n == 2048:
            runs["compiled"] = lambda leaves=leaves: compiled(*leaves)
        with torch.no_grad():
            ms = interleaved(dict(runs), rounds=3)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            own()
            beyond = (torch.cuda.max_memory_allocated() - before) / 2**20
        out = own()
        grad = torch.randn_like(out)
        back = interleaved(
            {"back": lambda o=out, x=leaves, g=grad: torch.autograd.grad(o, x, g, None, True)},
            rounds=3,
        )
        limit = 8 * n * n * 64 / SPECIAL * 1e3
        rows.append(
            say(
                {"n": n, "dtype": str(dtype)[6:], "MiB": round(beyond, 1)}
                | {f"{x} ms": round(t, 3) for x, t in (ms | back).items()}
                | {"one special function a pair ms": round(limit, 3)}
            )
        )
    return rows
