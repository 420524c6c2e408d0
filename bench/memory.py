"""Memory of `observe` at n = 16384 beyond its inputs and results, in MiB: python -m bench.memory"""

from __future__ import annotations

import re
from pathlib import Path

import torch

import headwise as hw


def peak() -> float:
    """The peak memory of this process, in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) / 1024


def main() -> None:
    hw.observe(*torch.randn(3, 1, 8, 600, 64).unbind(0), mask=hw.mask.causal())  # loads libraries
    q, k, v = torch.randn(3, 1, 8, 16_384, 64).unbind(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak()
    out, seen = hw.observe(q, k, v, mask=hw.mask.causal())
    results = sum(x.nbytes for x in (out, *seen.values.values())) / 2**20
    print(round(peak() - before - results, 1))


if __name__ == "__main__":
    main()
