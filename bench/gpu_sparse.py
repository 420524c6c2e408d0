"""What few keys hold, and an indexer's loss, at 32k and 100k tokens on a GPU, beside the dense way.

    python -m bench.gpu_sparse [--lengths 32768 100000 8192] [--only WORD] [--seconds 75]

writes gpu_sparse.json to bench/results, or to $OUT, after every measurement. 8 query heads, 2 key
heads, width 128, bfloat16, causal; the indexer has 16 heads of width 64. Times are medians of three
runs after one, or of the second run if it takes long; memory is the peak beyond the inputs. The
dense way writes out the weights of all heads; where it is not tried, it takes all memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from bench.warmed import results_file, warm
from headwise.engines import failures

HEADS, KEY_HEADS, WIDTH, INDEX_HEADS, INDEX_WIDTH = 8, 2, 128, 16, 64
KEPT = 2048  # keys per row that policies keep
DENSE = {"kept(2048)": 32_768, "needed(0.95)": 16_384, "index_loss and its backward": 8_192}
LONG = 0.4  # seconds
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
        rows = torch.arange(n, device=device, dtype=torch.int32)[:, None]
        share = torch.rand(n, min(KEPT, n), device=device)  # of the keys that a row sees
        self.some = (share * (rows + 1)).to(torch.int32)[None]  # (1, N, K)

    def amap(self) -> hw.AttentionMap:
        return hw.attention_map(self.q, self.k, mask=CAUSAL)

    def chosen(self) -> hw.sparse.Indices:
        return hw.sparse.Indices(self.some[:, None])

    def weights(self) -> Tensor:
        """Every weight, (1, Hq, N, N) float32: the dense way."""
        k = self.k.repeat_interleave(HEADS // KEY_HEADS, 1)
        s = (self.q @ k.mT).float() * WIDTH**-0.5
        return s.masked_fill_(self.hidden(), -torch.inf).softmax(-1)

    def hidden(self) -> Tensor:
        n = self.q.shape[2]
        return torch.ones(n, n, dtype=torch.bool, device=self.q.device).triu_(1)

    def attend(self, policy: hw.sparse.Policy, learn: bool = False) -> None:
        q = self.q.detach().requires_grad_(learn)
        out = hw.sparse.attention(q, self.k, self.v, policy, mask=CAUSAL)
        if learn:
            out.sum().backward()

    def loss(self, selected: Tensor | None = None) -> None:
        hw.index_loss(self.q, self.k, *self.index, mask=CAUSAL, selected=selected).backward()

    def dense_loss(self) -> None:
        with torch.no_grad():
            target = self.weights().sum(1) / HEADS
        q, k, w = self.index
        scores = torch.einsum("bhn,bhnm->bnm", w, (q @ k[:, None].mT).relu()).float()
        log_q = scores.masked_fill(self.hidden(), -torch.inf).log_softmax(-1)
        log_q = log_q.masked_fill(self.hidden(), 0)
        (torch.xlogy(target, target) - target * log_q).sum(-1).mean().backward()


TOP, WINDOW = hw.sparse.TopK(KEPT), hw.sparse.Window(KEPT - 5, sinks=4)
MEAN, EXACT = hw.sparse.Blocks(64, KEPT // 64), hw.sparse.Blocks(64, KEPT // 64, by="exact")
WAYS: dict[str, Callable[[Inputs], object]] = {
    "lse": lambda x: x.amap().lse,
    "kept(64)": lambda x: x.amap().kept(64),
    "kept(2048)": lambda x: x.amap().kept(2048),
    "needed(0.95)": lambda x: x.amap().needed(0.95),
    "kept(Window)": lambda x: x.amap().kept(WINDOW),
    "kept(Blocks)": lambda x: x.amap().kept(MEAN),
    "kept(Blocks by max)": lambda x: x.amap().kept(hw.sparse.Blocks(64, KEPT // 64, by="max")),
    "kept(Blocks by exact)": lambda x: x.amap().kept(EXACT),
    "kept(Indices)": lambda x: x.amap().kept(x.chosen()),
    "recall(Indices)": lambda x: x.amap().recall(x.chosen()),
    "attention, TopK": lambda x: x.attend(TOP),
    "attention, TopK, and its backward": lambda x: x.attend(TOP, learn=True),
    "attention, Window": lambda x: x.attend(WINDOW),
    "attention, Blocks": lambda x: x.attend(MEAN),
    "attention, Blocks, and its backward": lambda x: x.attend(MEAN, learn=True),
    "attention, Indices, and its backward": lambda x: x.attend(x.chosen(), learn=True),
    "index_loss and its backward": lambda x: x.loss(),
    "index_loss(selected=), and its backward": lambda x: x.loss(x.some),
    "dense: kept(2048)": lambda x: x.weights().topk(min(KEPT, x.q.shape[2])).values.sum(-1),
    "dense: needed(0.95)": lambda x: (
        x.weights().sort(-1, descending=True).values.cumsum_(-1) < 0.95
    ).sum(-1),
    "dense: index_loss and its backward": lambda x: x.dense_loss(),
}


def measured(run: Callable[[], object], rounds: int = 3) -> dict[str, Any]:
    """Milliseconds and MiB, or why there are none."""
    cuda = torch.cuda.is_available()
    try:
        run()
        if cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if cuda else 0
        times: list[float] = []
        while len(times) < (rounds if sum(times) < LONG else 1):
            start = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if cuda else None
        return {"ms": round(1e3 * median(times), 2), "MiB": None if peak is None else round(peak)}
    except Exception as error:
        return {"ms": None, "MiB": None, "why": f"{type(error).__name__}: {error}"[:200]}
    finally:
        if cuda:
            torch.cuda.empty_cache()


def main() -> None:
    """Measure every length and write the results."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("--lengths", type=int, nargs="+", default=[32768, 100_000, 8192])
    parser.add_argument("--seconds", type=float, default=75.0, help="begin nothing after so many")
    parser.add_argument("--only", default="", help="ways whose name has this word")
    parser.add_argument(
        "--warm", metavar="WAY", help="compile one way's kernels, or `all`, and end"
    )
    parser.add_argument("--warmed", action="store_true", help="the kernels are compiled already")
    given, begun = parser.parse_args(), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ways = [name for name in WAYS if given.only in name]
    if device == "cuda" and not given.warmed and given.warm in (None, "all"):
        warm("bench.gpu_sparse", [name for name in ways if not name.startswith("dense")])
    if given.warm == "all":
        return
    if given.warm:
        WAYS[given.warm](Inputs(4096, device))
        return
    machine = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    found: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "lengths": {}}
    for n in given.lengths:
        inputs = Inputs(n, device)
        for name in ways:
            most = DENSE.get(name.removeprefix("dense: ")) if name.startswith("dense") else None
            figures: dict[str, Any] = {"ms": None, "MiB": None, "why": "not tried"}
            late = time.monotonic() - begun > given.seconds
            if not late and (most is None or n <= most):
                run = WAYS[name]
                figures = measured(lambda run=run, x=inputs: run(x))  # type: ignore[misc]
            found["lengths"].setdefault(str(n), {})[name] = figures
            found["failed"] = list(failures.failed().values())  # such calls are left to loops
            now = time.monotonic() - begun
            print(f"{now:5.1f} s  {n:>7}  {name:<40} {figures}", flush=True)
            results_file("gpu_sparse.json").write_text(json.dumps(found, indent=1) + "\n")
        del inputs


if __name__ == "__main__":
    main()
