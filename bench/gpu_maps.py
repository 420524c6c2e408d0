"""A section of `bench.gpu`: maps of one head over 100,000 tokens."""

from __future__ import annotations

import time

import torch

import headwise as hw
from bench.gpu_timing import Row, Run, interleaved, normal, say
from headwise.core.row_sums import RowTotals
from headwise.maps import blockwise
from headwise.maps.pooling import Cells


def mapping() -> list[Row]:
    """A map of one head at n = 100,000, d 128, its lse included, against loops in PyTorch."""
    n, rows = 100_000, []
    q, k = normal(1, 1, n, 128), normal(1, 1, n, 128)
    for name, mask in (("full", None), ("causal", hw.mask.causal())):

        def made(mask: hw.mask.Mask | None = mask) -> hw.AttentionMap:
            return hw.attention_map(q, k, mask=mask)

        lse = made().lse
        runs: dict[str, Run] = {
            "pool 256": lambda made=made: made().pool(256),
            "pool 256, lse known": lambda lse=lse, mask=mask: hw.attention_map(
                q, k, mask=mask, lse=lse
            ).pool(256),
            "largest of 256, lse known": lambda lse=lse, mask=mask: hw.attention_map(
                q, k, mask=mask, lse=lse
            ).pool(256, "max"),
            "received": lambda made=made: made().received(),
            "top 8": lambda made=made: made().top(8),
            "tile": lambda lse=lse, mask=mask: (
                hw.attention_map(q, k, mask=mask, lse=lse).head(0, 0).tile(8, 3, 100)
            ),
        }
        with torch.no_grad():
            ms = interleaved(runs, rounds=3)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            made().pool(256)
            beyond = (torch.cuda.max_memory_allocated() - before) / 2**20
            region = made()._region
            cells = Cells.evenly(n, 256)
            start = time.perf_counter()
            blockwise.pool(region, RowTotals.of_lse(lse), cells, cells, "mean")
            torch.cuda.synchronize()
            own = (time.perf_counter() - start) * 1e3
        rows.append(
            say(
                {"map": name, "MiB": round(beyond, 1)}
                | {f"{x} ms": round(t, 2) for x, t in ms.items()}
                | {"PyTorch's loops, lse known ms": round(own, 1)}
            )
        )
    return rows
