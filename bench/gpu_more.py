"""Maps, additive attention and decoding on one NVIDIA GPU: `python -m bench.gpu_more`.

Whole calls as a user makes them, beside what else there is, in rounds in which all take turns. The
table goes to the terminal, every number to bench/results/gpu_more.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import headwise as hw
from bench.gpu import Run, interleaved
from headwise.engines import tiles

RESULTS = Path(__file__).parent / "results" / "gpu_more.json"
SPECIAL = 132 * 16 * 1.755e9  # special functions a second, by the chip's own count
CELLS = {  # batch, query heads, key heads, keys
    "batch 1, 32/8 heads, 32k": (1, 32, 8, 32768),
    "batch 16, 32/8, 8k": (16, 32, 8, 8192),
    "batch 64, 32/8, 4k": (64, 32, 8, 4096),
    "batch 1, 32/32, 32k": (1, 32, 32, 32768),
    "batch 1, 64/8, 128k": (1, 64, 8, 131072),
}
FLEX = "--flex" in sys.argv
Row = dict[str, object]


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def say(row: Row) -> Row:
    print("  ", *(f"{x} {y}" for x, y in row.items()), sep="  ", flush=True)
    return row


def replayed(run: Run, calls: int = 5) -> Run:
    """The same work without a processor before it: a CUDA graph of some calls."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph.replay


def decoding() -> list[Row]:
    """One query against a long cache: useful bytes a second of whole calls, and of graphs."""
    rows: list[Row] = []
    for name, (batch, heads, key_heads, keys) in CELLS.items():
        q = normal(batch, heads, 1, 128)
        k, v = normal(batch, key_heads, keys, 128), normal(batch, key_heads, keys, 128)

        def fused(backend: SDPBackend, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        runs: dict[str, Run] = {
            "headwise": lambda q=q, k=k, v=v: hw.attention(q, k, v, mask=hw.mask.causal()),
            "cudnn": lambda fused=fused: fused(SDPBackend.CUDNN_ATTENTION),
            "flash": lambda fused=fused: fused(SDPBackend.FLASH_ATTENTION),
        }
        graphs = {f"{x}, graph": replayed(run) for x, run in runs.items()}
        if FLEX:  # a tenth of the others' speed, and seconds of compilation for each cell
            flex = torch.compile(flex_attention, dynamic=False)
            runs["flex"] = lambda q=q, k=k, v=v, f=flex: f(q, k, v, enable_gqa=True)
        for kind, cache in caches(batch, keys).items():
            cache.write(k, v)
            runs[kind] = lambda q=q, c=cache: c.attend(q, mask=hw.mask.causal())
        ms = interleaved(runs) | {x: t / 5 for x, t in interleaved(graphs).items()}
        whole = 2 * k.nbytes
        speed = {x: round(whole / t / 1e9, 2) for x, t in ms.items()}
        best = max(speed[x] for x in ("cudnn", "flash", "flex") if x in speed)
        rows.append(
            say({"cell": name} | speed | {"to the best": round(speed["headwise"] / best, 2)})
        )
    return rows


def caches(batch: int, keys: int) -> dict[str, hw.nn.Packed]:
    pool = hw.nn.PagePool(batch * keys // 128, page=128)
    return {"pages": hw.nn.PagedCache(pool), "int8": hw.nn.Int8Cache()}


def mapping() -> list[Row]:
    """A map of one head at n = 100,000, d 128, its lse included; and PyTorch's own loops."""
    n, rows = 100_000, []
    q, k = normal(1, 1, n, 128), normal(1, 1, n, 128)
    for name, mask in (("full", None), ("causal", hw.mask.causal())):

        def made(mask: hw.mask.Mask | None = mask) -> hw.AttentionMap:
            return hw.attention_map(q, k, mask=mask)

        lse = made().head(0, 0)._sums.at(made()._region.box)
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
            cells = tiles.Cells.evenly(n, 256)
            start = time.perf_counter()
            tiles.pool(region, lse, cells, cells, "mean")
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


def textbook(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Bahdanau's attention as it is taught."""
    scores = (weight[:, None, None] * torch.tanh(q[:, :, :, None] + k[:, :, None])).sum(-1)
    return scores.softmax(-1) @ v


def adding() -> list[Row]:
    """Additive attention, 8 heads, d 64: beside the compiled textbook, and where that can't run."""
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


SECTIONS = {"decoding": decoding, "mapping": mapping, "adding": adding}


def main() -> None:
    """Measure, print, and write the JSON after every section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--flex", action="store_true", help="decoding beside FlexAttention too")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_more measures an NVIDIA GPU, and PyTorch sees none here")
    torch.manual_seed(0)
    import triton

    results: dict[str, object] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name in given.only:
        print(name, flush=True)
        results[name] = SECTIONS[name]()
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
