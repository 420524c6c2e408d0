"""What few keys hold, and an indexer's loss, at 32k and 100k tokens on a GPU, beside the dense way.

python -m bench.gpu_sparse [--lengths 8192 32768 100000] writes bench/results/gpu_sparse.json

8 query heads, 2 key heads, width 128, bfloat16, causal; the indexer has 16 heads of width 64. Times
are medians of three runs after one, memory is the peak beyond the inputs. The dense way writes out
the weights of all heads, and is not tried above 16,384 tokens, where it takes all memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import headwise as hw

RESULTS = Path(__file__).parent / "results" / "gpu_sparse.json"
HEADS, KEY_HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 8, 2, 128, 16, 64
MOST_DENSE = 16_384  # tokens: beyond it sorting the weights of 8 heads leaves no memory
CAUSAL = hw.mask.causal()


class Inputs:
    """The tensors of a length."""

    def __init__(self, n: int, device: str) -> None:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        torch.manual_seed(0)
        self.q, self.k = 2 * normal(1, HEADS, n, WIDTH), normal(1, KEY_HEADS, n, WIDTH)
        self.v = normal(1, KEY_HEADS, n, WIDTH)
        self.index = [normal(1, INDEX_HEADS, n, INDEX_WIDTH), normal(1, n, INDEX_WIDTH)]
        self.index.append(normal(1, INDEX_HEADS, n).abs() / 8)
        self.index = [x.requires_grad_() for x in self.index]

    def amap(self) -> hw.AttentionMap:
        return hw.attention_map(self.q, self.k, mask=CAUSAL)

    def weights(self) -> Tensor:
        """Every weight, (1, Hq, N, N) float32: the dense way."""
        k = self.k.repeat_interleave(HEADS // KEY_HEADS, 1)
        s = (self.q @ k.mT).float() * WIDTH**-0.5
        return s.masked_fill_(self.hidden(), -torch.inf).softmax(-1)

    def hidden(self) -> Tensor:
        n = self.q.shape[2]
        return torch.ones(n, n, dtype=torch.bool, device=self.q.device).triu_(1)

    def loss(self, dense: bool) -> None:
        if not dense:
            hw.index_loss(self.q, self.k, *self.index, mask=CAUSAL).backward()
            return
        with torch.no_grad():
            target = self.weights().sum(1) / HEADS
        q, k, w = self.index
        scores = torch.einsum("bhn,bhnm->bnm", w, (q @ k[:, None].mT).relu()).float()
        log_q = scores.masked_fill(self.hidden(), -torch.inf).log_softmax(-1)
        log_q = log_q.masked_fill(self.hidden(), 0)
        (torch.xlogy(target, target) - target * log_q).sum(-1).mean().backward()


def ways(given: Inputs) -> dict[str, Callable[[], object]]:
    """Each measurement and its dense counterpart."""
    top = hw.sparse.TopK(2048)

    def attend(policy: hw.sparse.Policy, learn: bool = False) -> Tensor:
        q = given.q.detach().requires_grad_(learn)
        return hw.sparse.attention(q, given.k, given.v, policy, mask=CAUSAL)

    return {
        "lse": lambda: given.amap().lse,
        "kept(64)": lambda: given.amap().kept(64),
        "kept(2048)": lambda: given.amap().kept(2048),
        "needed(0.95)": lambda: given.amap().needed(0.95),
        "kept(Window(4096, 4))": lambda: given.amap().kept(hw.sparse.Window(4096, 4)),
        "kept(Blocks(64, 32))": lambda: given.amap().kept(hw.sparse.Blocks(64, 32)),
        "sparse.attention, TopK(2048)": lambda: attend(top),
        "sparse.attention, TopK(2048), and its backward": lambda: (
            attend(top, learn=True).sum().backward()
        ),
        "sparse.attention, Window(4096, 4)": lambda: attend(hw.sparse.Window(4096, 4)),
        "index_loss and its backward": lambda: given.loss(dense=False),
        "dense: kept(2048)": lambda: (
            given.weights().topk(min(2048, given.q.shape[2])).values.sum(-1)
        ),
        "dense: needed(0.95)": lambda: (
            given.weights().sort(-1, descending=True).values.cumsum_(-1) < 0.95
        ).sum(-1),
        "dense: index_loss and its backward": lambda: given.loss(dense=True),
    }


def measured(run: Callable[[], object], device: str, rounds: int = 3) -> dict[str, Any]:
    """Milliseconds and MiB, or why there are none."""
    cuda = device == "cuda"
    try:
        run()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - start))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
        return {"ms": round(median(times), 2), "MiB": None if peak is None else round(peak)}
    except torch.OutOfMemoryError:
        return {"ms": None, "MiB": None, "why": "out of memory"}
    finally:
        if cuda:
            torch.cuda.empty_cache()


def main() -> None:
    """Measure every length and write the results."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 100_000])
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    found: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "lengths": {}}
    for n in given.lengths:
        inputs = Inputs(n, device)
        for name, run in ways(inputs).items():
            figures: dict[str, Any]
            if name.startswith("dense") and n > MOST_DENSE:
                figures = {"ms": None, "MiB": None, "why": f"not tried above {MOST_DENSE} tokens"}
            else:
                figures = measured(run, device)
            found["lengths"].setdefault(str(n), {})[name] = figures
            print(f"{n:>7}  {name:<48} {figures}", flush=True)
        del inputs
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
