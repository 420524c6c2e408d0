"""The backward of Hopper GPUs, checked and compared: `python -m bench.gpu_backward`.

Every kind of call is first compared with float32 gradients of the streaming engine, on the GPU, and
repeated; then the kernels are timed, in turns with those of Triton, cuDNN and FlashAttention. A
part that fails is reported, and the others go on. JSON goes to $OUT, or to --json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

import headwise as hw
from bench.gpu_timing import Fused, Run, backward_of, interleaved
from headwise.core.options import Options
from headwise.core.problem import pose
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs
from headwise.engines.triton.host import hopper_backward_call as ours
from headwise.engines.triton.host.attention_call import differentiate

DEVICE = "cuda"
Given = tuple[Any, ...]
CAUSAL, STATS = hw.mask.causal(), ("lse", "max_logit", "entropy")
FOUND: dict[str, Any] = {}
STOP = [0.0]
PATIENCE = 60.0  # seconds for a part: a kernel that waits forever would use up the machine


def tensors(
    batch: int, heads: int, group: int, n: int, m: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Random q, k and v."""
    shapes = (batch, heads, n, width), *[(batch, heads // group, m, width)] * 2
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


def inputs(q: Tensor, k: Tensor, v: Tensor, extra: bool = False, **options: Any) -> Given:
    """What a backward takes, from a forward of these tensors."""
    problem = pose("attention", q, k, v, Options(**options))
    out, seen = hw.observe(q, k, v, **options, stats=STATS, engine="triton")
    torch.manual_seed(1)
    grad, pull_lse, pull_entropy = (torch.randn_like(x) for x in (out, seen.lse, seen.entropy))
    some = seen.lse > -torch.inf
    log_total = torch.where(some, seen.lse - seen.max_logit, 0.0)
    more = (pull_lse.masked_fill(~some, 0), pull_entropy) if extra else ()
    given = BackwardInputs(
        out, RowTotals(seen.lse, seen.max_logit, log_total), seen.entropy, grad, *more
    )
    return q, k, v, problem.terms(banded=True), given


@contextmanager
def in_turns(asked: bool) -> Iterator[None]:
    """Let additions have a fixed order, if asked."""
    torch.use_deterministic_algorithms(asked)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CHECKS: dict[str, tuple[tuple[int, int, int, int, int, int], dict[str, Any]]] = {
    # batch, heads, group, queries, keys, width
    "full 128": ((1, 4, 1, 1024, 1024, 128), {}),
    "full 64": ((1, 4, 1, 1024, 1024, 64), {}),
    "causal 128": ((2, 4, 2, 1024, 1024, 128), {"mask": CAUSAL}),
    "causal 64": ((2, 4, 2, 1024, 1024, 64), {"mask": CAUSAL}),
    "odd 128": ((2, 6, 3, 901, 1103, 128), {"mask": CAUSAL}),
    "odd 96": ((1, 3, 1, 777, 777, 96), {"mask": CAUSAL}),
    "odd 40": ((2, 4, 2, 333, 391, 40), {}),
    "window 128": ((1, 4, 2, 1500, 1500, 128), {"mask": CAUSAL & hw.mask.window(200)}),
    "both sides 64": ((1, 4, 1, 1500, 1500, 64), {"mask": hw.mask.window(150, 90)}),
    "rows see nothing": ((1, 4, 2, 900, 700, 128), {"mask": hw.mask.causal(offset=-200)}),
    "one row": ((1, 2, 1, 1, 500, 128), {}),
    "long 128": ((1, 2, 1, 8192, 8192, 128), {"mask": CAUSAL}),
}  # fmt: skip


def check(name: str, dtype: torch.dtype, extra: bool, ordered: bool) -> dict[str, Any]:
    """The relative errors of ours and of Triton's against float32, and whether bits repeat."""
    sizes, options = CHECKS[name]
    torch.manual_seed(0)
    q, k, v = tensors(*sizes, dtype)
    given = inputs(q, k, v, extra, **options)
    if not ours.takes(*given):
        return {"taken": False}
    wide = [x.float().requires_grad_() for x in (q, k, v)]
    out, seen = hw.observe(*wide, **options, stats=STATS, engine="streaming")
    tail = given[4]
    total = (out * tail.grad_out).sum()
    if extra:
        some = seen.lse > -torch.inf
        total = total + (seen.lse[some] * tail.grad_lse[some]).sum()
        total = total + (seen.entropy * tail.grad_entropy).sum()
    truth = torch.autograd.grad(total, wide)
    with in_turns(ordered):
        found = ours.differentiate_hopper(*given)[:3]
        again = ours.differentiate_hopper(*given)[:3]
    theirs = differentiate(*given)[:3]
    torch.cuda.synchronize()
    error = [_error(x, y) for x, y in zip(found, truth, strict=True)]
    peer = [_error(x, y) for x, y in zip(theirs, truth, strict=True)]
    same = [torch.equal(x, y) for x, y in zip(found, again, strict=True)]
    fine = all(x < max(1.3 * y, 1e-4) for x, y in zip(error, peer, strict=True))
    fine &= all(same if ordered else same[1:])
    return {"ok": fine, "error": error, "triton": peer, "same": same}


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.float() - truth).norm() / truth.norm().clamp_min(1e-30))


Kind = tuple[torch.dtype, bool, bool, bool]  # of kernels: type, 64 wide, all gradients, in turns
KINDS: list[Kind] = [
    (dtype, narrow, extra, ordered)
    for dtype in (torch.bfloat16, torch.float16)
    for narrow, extra, ordered in itertools.product((False, True), repeat=3)
]


def checks(kind: Kind) -> None:
    """Check every call of one kind, and a few with other tiles."""
    dtype, narrow, extra, ordered = kind
    names = [name for name in CHECKS if (CHECKS[name][0][-1] <= 64) == narrow]
    for name in names if dtype == torch.bfloat16 else [x for x in names if "odd" in x]:
        label = f"{name} {str(dtype)[6:]}{' all' * extra}{' turns' * ordered}"
        attempt("checks", label, lambda name=name: check(name, dtype, extra, ordered))
    if dtype == torch.bfloat16 and not extra and not ordered:
        width = 64 if narrow else 128
        for halves, stages in ((1, 2), (1, 3)):
            ours.SHAPES[width] = ours.BackwardShape(stages, halves)
            label = f"{names[0]}, {halves} half, {stages} stages"
            attempt("checks", label, lambda: check(names[0], dtype, extra, ordered))


def all_checks(folder: Path) -> None:
    """Run the kinds side by side, one process each, since compiling takes most of the time."""
    command = [sys.executable, "-m", "bench.gpu_backward", "--seconds", "120", "--kind"]
    files = [folder / f"gpu_backward_{n}.json" for n in range(len(KINDS))]
    running = [
        subprocess.Popen([*command, str(n), "--json", str(file)]) for n, file in enumerate(files)
    ]
    for process, file, kind in zip(running, files, KINDS, strict=True):
        status = process.wait()
        if file.exists():
            FOUND.setdefault("checks", {}).update(json.loads(file.read_text()).get("checks", {}))
            file.unlink()
        if status:
            FOUND.setdefault("checks", {})[f"process of {kind}"] = {"failed": status}


def attempt(section: str, label: str, run: Callable[[], Any]) -> None:
    """Run a part, and keep what it returns or why it failed."""
    if time.monotonic() > STOP[0]:
        return
    alarm = threading.Timer(PATIENCE, lambda: give_up(label))
    alarm.start()
    try:
        found = run()
    except Exception as error:
        traceback.print_exc(limit=3)
        found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    alarm.cancel()
    FOUND.setdefault(section, {})[label] = found
    bad = isinstance(found, dict) and (found.get("ok") is False or "failed" in found)
    if section != "checks" or bad:
        print(f"{section}: {label}: {json.dumps(found)[:400]}", flush=True)


def give_up(label: str) -> None:
    """End the process, since a kernel does not end."""
    print(f"{label} hangs; found before: {json.dumps(FOUND)}", flush=True)
    os._exit(3)


SHAPES: dict[str, tuple[Any, ...]] = {  # batch, heads, group, n, width
    "128, 8k causal": (2, 16, 1, 8192, 128, {"mask": CAUSAL}),
    "128, 8k full": (2, 16, 1, 8192, 128, {}),
    "64, 8k causal": (2, 32, 1, 8192, 64, {"mask": CAUSAL}),
    "128, 2k causal": (8, 16, 1, 2048, 128, {"mask": CAUSAL}),
    "128, 16k causal, grouped": (1, 32, 4, 16384, 128, {"mask": CAUSAL}),
    "64, 8k full": (2, 32, 1, 8192, 64, {}),
    "128, 4k causal": (4, 16, 1, 4096, 128, {"mask": CAUSAL}),
    "128, 16k window 1024": (1, 16, 1, 16384, 128, {"mask": CAUSAL & hw.mask.window(1023)}),
}


def pairs(n: int, mask: Any) -> int:
    """The pairs that rows see."""
    if mask is None:
        return n * n
    causal = n * (n + 1) // 2
    return causal if mask is CAUSAL else causal - (n - 1024) * (n - 1023) // 2


def timed(name: str) -> dict[str, Any]:
    """Milliseconds and TFLOP/s (10 · pairs · width) of every backward of one kind of call."""
    batch, heads, group, n, width, options = SHAPES[name]
    q, k, v = tensors(batch, heads, group, n, n, width, torch.bfloat16)
    given = inputs(q, k, v, **options)
    entropic = inputs(q, k, v, True, **options)
    usual, together = dict(ours.SHAPES), ours.TOGETHER

    def own(
        stages: int = 2,
        halves: int = 2,
        ordered: bool = False,
        size: int = together,
        what: Given = given,
    ) -> Run:
        def run() -> object:
            ours.SHAPES[width], ours.TOGETHER = ours.BackwardShape(stages, halves), size
            with in_turns(ordered):
                return ours.differentiate_hopper(*what)

        return run

    runs: dict[str, Run] = {
        "ours": own(), "1 half": own(halves=1), "3 stages": own(3, 1), "turns": own(ordered=True),
        "entropy": own(what=entropic), "8 MB": own(size=8 << 20), "64 MB": own(size=64 << 20),
        "triton": lambda: differentiate(*given),
    }  # fmt: skip
    mask = options.get("mask")
    if mask is None or mask is CAUSAL:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        for label, backend in (
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
            ("flash", SDPBackend.FLASH_ATTENTION),
        ):
            fused = Fused(backend, *leaves, mask is CAUSAL)
            runs[label] = backward_of(fused, leaves)
    times = interleaved(runs, rounds=5, slice_ms=8)
    ours.SHAPES.update(usual)
    ours.TOGETHER = together
    flops = 10 * batch * heads * width * pairs(n, mask)
    return {label: [round(ms, 4), round(flops / ms / 1e9)] for label, ms in times.items()}


def kernels() -> dict[str, float]:
    """Microseconds of each kernel in one call of ours."""
    batch, heads, group, n, width, options = SHAPES["128, 8k causal"]
    given = inputs(*tensors(batch, heads, group, n, n, width, torch.bfloat16), **options)
    ours.differentiate_hopper(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            ours.differentiate_hopper(*given)
        torch.cuda.synchronize()
    return {x.key[:60]: x.device_time_total / x.count for x in seen.key_averages()}


def main() -> None:
    """Check, time, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=150, help="start no part after this")
    folder = os.environ.get("OUT", ".")
    parser.add_argument("--json", type=Path, default=Path(folder) / "gpu_backward.json")
    parser.add_argument("--kind", type=int, help="only check calls of this kind")
    parser.add_argument("--only", choices=["checks", "times"], help="one part")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_backward needs a Hopper GPU, and PyTorch finds none here")
    begun = time.monotonic()
    STOP[0] = begun + asked.seconds
    if asked.kind is not None:
        checks(KINDS[asked.kind])
        asked.json.write_text(json.dumps(FOUND))
        return
    if asked.only != "times":
        all_checks(asked.json.parent)
        print(f"checks took {time.monotonic() - begun:.0f} s", flush=True)
    for name in SHAPES if asked.only != "checks" else ():
        attempt("times", name, lambda x=name: timed(x))
        asked.json.write_text(json.dumps(FOUND, indent=1))
        if name == "128, 8k causal":
            attempt("kernels", name, kernels)
    asked.json.write_text(json.dumps(FOUND, indent=1))
    every = FOUND.get("checks", {})
    bad = [name for name, x in every.items() if not x.get("ok", not x.get("taken", True))]
    print(f"{len(every)} checks, {len(bad)} bad: {bad}; {time.monotonic() - begun:.0f} s")
    for name, found in FOUND.get("times", {}).items():
        print(name, found)


if __name__ == "__main__":
    main()
