"""The GPU engine beside its peers, on one NVIDIA GPU: `python -m bench.gpu`.

Every figure is a median of rounds in which the contenders take turns, so that a clock that drifts
drifts for all. Outputs are allocated inside the timer, as in a user's call. The table goes to the
terminal, every number to bench/results/gpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import headwise as hw
from headwise.observation import STATISTICS
from headwise.place import Place

RESULTS = Path(__file__).parent / "results" / "gpu.json"
TOKENS, MODEL = 16384, 2048  # tokens in all; heads times width
WITHOUT_MOMENTS = tuple(name for name in STATISTICS if not name.startswith("logit_"))
Run = Callable[[], object]


def interleaved(runs: dict[str, Run], rounds: int = 7, slice_ms: float = 15.0) -> dict[str, float]:
    """Milliseconds of each contender, the median over rounds in which they take turns."""
    able, times = {}, {}
    for name, run in runs.items():
        try:
            for _ in range(3):
                run()
            torch.cuda.synchronize()
            able[name], times[name] = run, []
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"  {name}: {str(error).splitlines()[0][:90]}", file=sys.stderr)
    calls = {name: max(1, round(slice_ms / max(_once(run), 1e-3))) for name, run in able.items()}
    for _ in range(rounds):
        for name, run in able.items():
            times[name].append(_once(run, calls[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _once(run: Run, calls: int = 1) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        run()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / calls


def tensors(n: int, width: int, heads: int | None = None, learn: bool = False) -> list[Tensor]:
    """q, k, v in bfloat16: as many batch entries as make up TOKENS, or one of so many heads."""
    shape = (1, heads, n, width) if heads else (max(1, TOKENS // n), MODEL // width, n, width)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=learn)
        for _ in range(3)
    ]


def fused(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def contenders(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Tensor]]:
    mask = hw.mask.causal() if causal else None
    return {
        "headwise": lambda: hw.attention(q, k, v, mask=mask, engine="triton"),
        "cudnn": lambda: fused(SDPBackend.CUDNN_ATTENTION, q, k, v, causal),
        "flash": lambda: fused(SDPBackend.FLASH_ATTENTION, q, k, v, causal),
    }


def backward_of(forward: Callable[[], Tensor], leaves: list[Tensor]) -> Run:
    """The backward pass alone, of a forward that is run once."""
    out = forward()
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


def rate(ms: float, n: int, causal: bool, backward: bool = False) -> float:
    """TFLOP/s by the usual count: 4·n²·d forward, half of it when causal, 2.5 times it backward."""
    flops = 4 * TOKENS * n * MODEL * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return flops / ms / 1e9


def plain() -> list[dict[str, object]]:
    """Forward and backward beside PyTorch's own fused kernels."""
    rows = []
    for width in (64, 128, 256):
        for n in (1024, 4096, 16384):
            for causal in (False, True):
                q, k, v = tensors(n, width, learn=True)
                runs = contenders(q, k, v, causal)
                with torch.no_grad():
                    forward = interleaved(dict(runs))
                backward = interleaved(
                    {x: backward_of(run, [q, k, v]) for x, run in runs.items() if x in forward}
                )
                shape = {"d": width, "n": n, "causal": causal}
                rows.append(
                    shape
                    | {x: round(rate(ms, n, causal)) for x, ms in forward.items()}
                    | {f"{x} back": round(rate(ms, n, causal, True)) for x, ms in backward.items()}
                )
                print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


def seeing() -> list[dict[str, object]]:
    """What statistics cost: the engine's own plain forward against one that reports."""
    rows = []
    for width in (64, 128):
        for causal in (False, True):
            q, k, v = tensors(TOKENS, width)
            options = {"mask": hw.mask.causal() if causal else None, "engine": "triton"}
            runs: dict[str, Run] = {
                "plain": lambda q=q, k=k, v=v, o=options: hw.attention(q, k, v, **o),
                "entropy": lambda q=q, k=k, v=v, o=options: hw.observe(
                    q, k, v, stats=("entropy",), **o
                ),
                "all but moments": lambda q=q, k=k, v=v, o=options: hw.observe(
                    q, k, v, stats=WITHOUT_MOMENTS, **o
                ),
                "all": lambda q=q, k=k, v=v, o=options: hw.observe(q, k, v, **o),
            }
            with torch.no_grad():
                ms = interleaved(runs)
            share = {f"{x} / plain": round(ms["plain"] / t, 3) for x, t in ms.items()}
            rows.append({"d": width, "n": TOKENS, "causal": causal, **share})
            print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


def capped() -> list[dict[str, object]]:
    """A softcap, beside compiled FlexAttention."""
    flex = torch.compile(flex_attention, dynamic=False)

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return 30.0 * torch.tanh(score / 30.0)

    rows = []
    for width in (64, 128):
        q, k, v = tensors(TOKENS, width, learn=True)
        runs = {
            "headwise": lambda q=q, k=k, v=v: hw.attention(q, k, v, softcap=30.0, engine="triton"),
            "flex": lambda q=q, k=k, v=v: flex(q, k, v, score_mod=cap),
        }
        with torch.no_grad():
            ms = interleaved(dict(runs))
        back = interleaved({x: backward_of(run, [q, k, v]) for x, run in runs.items() if x in ms})
        rows.append(
            {"d": width, "n": TOKENS}
            | {x: round(rate(t, TOKENS, False)) for x, t in ms.items()}
            | {f"{x} back": round(rate(t, TOKENS, False, True)) for x, t in back.items()}
        )
        print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


def masked() -> list[dict[str, object]]:
    """Masks that hide most pairs: the time against the visible share of the full time."""
    flex = torch.compile(flex_attention, dynamic=False)
    n, width = TOKENS, 128
    q, k, v = tensors(n, width)
    ids = torch.arange(n, device="cuda") // 2048
    masks = {
        "window 1024": (
            hw.mask.causal() & hw.mask.window(1023),
            lambda b, h, i, j: (j <= i) & (i - j < 1024),
        ),
        "documents of 2048": (
            hw.mask.causal() & hw.mask.documents(ids[None]),
            lambda b, h, i, j: (j <= i) & (ids[i] == ids[j]),
        ),
    }
    rows = []
    for name, (mask, predicate) in masks.items():
        first, last = mask.intervals(Place(1, 1, n, n, device=q.device))[0]
        visible = float((last - first.clamp_min(0)).sum() / (n * n))
        blocks = create_block_mask(predicate, None, None, n, n, device="cuda")
        runs: dict[str, Run] = {
            "full": lambda: hw.attention(q, k, v, engine="triton"),
            "headwise": lambda mask=mask: hw.attention(q, k, v, mask=mask, engine="triton"),
            "flex": lambda blocks=blocks: flex(q, k, v, block_mask=blocks),
        }
        with torch.no_grad():
            ms = interleaved(runs)
        rows.append(
            {"mask": name, "visible": round(visible, 4)}
            | {f"{x} ms": round(t, 3) for x, t in ms.items()}
            | {"times the visible share": round(ms["headwise"] / (ms["full"] * visible), 2)}
        )
        print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Weights as everybody writes them, and their entropy."""
    p = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float().softmax(-1)
    return p.to(v.dtype) @ v, torch.special.entr(p).sum(-1)


def observing() -> list[dict[str, object]]:
    """Time and memory of `observe` where eager weights still fit, and where they no longer do."""
    rows = []
    for n in (8192, 32768):
        q, k, v = tensors(n, 128, heads=16)
        runs: dict[str, Run] = {
            "observe": lambda q=q, k=k, v=v: hw.observe(q, k, v, engine="triton"),
            "eager": lambda q=q, k=k, v=v: eager(q, k, v),
        }
        with torch.no_grad():
            ms = interleaved(runs, rounds=3)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out, seen = hw.observe(q, k, v, engine="triton")
            kept = sum(x.nbytes for x in (out, *seen.values.values()))
            beyond = (torch.cuda.max_memory_allocated() - before - kept) / 2**20
        rows.append(
            {"n": n, "MiB beyond inputs and outputs": round(beyond, 1)}
            | {f"{x} ms": round(t, 2) for x, t in ms.items()}
        )
        print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


def precise() -> list[dict[str, object]]:
    """The relative error against float64, beside that of PyTorch's kernels."""
    rows = []
    cases = {"random": (1.0, 2048), "large logits": (8.0, 2048), "long": (1.0, 16384)}
    for name, (size, n) in cases.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            q, k, v = (torch.randn(1, 2, n, 128, device="cuda", dtype=dtype) for _ in range(3))
            q = q * size
            truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())

            def error(out: Tensor, truth: Tensor = truth) -> float:
                return float((out.double() - truth).norm() / truth.norm())

            own = error(hw.attention(q, k, v, engine="triton"))
            theirs = error(F.scaled_dot_product_attention(q, k, v))
            rows.append(
                {"input": name, "dtype": str(dtype)[6:], "headwise": own, "sdpa": theirs}
                | {"ratio": round(own / theirs, 2)}
            )
            print("  ", *(f"{x} {y}" for x, y in rows[-1].items()), sep="  ", flush=True)
    return rows


_FIRST = """
import time, torch, headwise as hw
q = torch.randn(1, 8, 1000, 64, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize(); start = time.perf_counter()
hw.attention(q, q, q, mask=hw.mask.causal(), engine="triton"); torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def first_calls() -> list[dict[str, object]]:
    """Seconds of a process' first call, with nothing compiled and from the cache on disk."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TRITON_CACHE_DIR": folder}
        command = [sys.executable, "-c", _FIRST]
        found = [
            float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            for _ in range(2)
        ]
    rows: list[dict[str, object]] = [
        {"cold s": round(found[0], 2), "from the cache s": round(found[1], 2)}
    ]
    print("  ", *(f"{x} {y}" for x, y in rows[0].items()), sep="  ", flush=True)
    return rows


def calls() -> list[dict[str, object]]:
    """Microseconds of a processor for a call whose kernel takes next to nothing."""
    q, k, v = (torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    causal, ids = hw.mask.causal(), torch.arange(64, device="cuda")[None] // 16
    documents = causal & hw.mask.documents(ids)
    runs: dict[str, Run] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "attention": lambda: hw.attention(q, k, v, mask=causal, engine="triton"),
        "documents": lambda: hw.attention(q, k, v, mask=documents, engine="triton"),
        "every statistic": lambda: hw.observe(q, k, v, mask=causal, engine="triton"),
    }
    row: dict[str, object] = {}
    for name, run in runs.items():
        found = []
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(20):
                run()
            found.append((time.perf_counter() - start) / 20 * 1e6)
        row[f"{name} µs"] = round(statistics.median(found))
    print("  ", *(f"{x} {y}" for x, y in row.items()), sep="  ", flush=True)
    return [row]


SECTIONS: dict[str, Callable[[], list[dict[str, object]]]] = {
    "calls": calls,
    "precise": precise,
    "plain": plain,
    "seeing": seeing,
    "capped": capped,
    "masked": masked,
    "observing": observing,
    "first calls": first_calls,
}


def main() -> None:
    """Measure, print, and write the JSON after every section."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=600, help="start no section after this")
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu measures an NVIDIA GPU, and PyTorch sees none here")
    torch.manual_seed(0)
    stop = time.monotonic() + given.seconds
    import triton

    results: dict[str, object] = json.loads(given.json.read_text()) if given.json.exists() else {}
    results |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    for name in given.only:
        if time.monotonic() > stop:
            print(f"{name}: no time left")
            continue
        print(name, flush=True)
        results[name] = SECTIONS[name]()
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
