"""The backward of Hopper GPUs, checked and compared: `python -m bench.gpu_backward`.

In the order of what matters most, so that a run that is cut short is still of use: one call, which
ends the run if it does not compile or is wrong; the time of the most common call; every kind of
call, compared with float32 gradients of the streaming engine on the GPU, twice, in processes side
by side; the times of other calls, in turns with cuDNN or with Triton's kernels. A part that fails
is reported, and the others go on. JSON goes to $OUT, or to --json.
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
from headwise.core.problem import Terms, pose
from headwise.core.row_sums import RowTotals
from headwise.engines.gradients import BackwardInputs
from headwise.engines.triton.host import hopper_backward_call as ours
from headwise.engines.triton.host.backward_call import differentiate_dot
from headwise.engines.triton.host.backward_choice import takes

DEVICE = "cuda"
Given = tuple[Any, ...]
CAUSAL, STATS = hw.mask.causal(), ("lse", "max_logit", "entropy")
FOUND: dict[str, Any] = {}
STOP = [0.0]
PATIENCE = 40.0  # seconds for a part: a kernel that waits forever would use up the machine
WORST = {torch.bfloat16: 5e-3, torch.float16: 1e-3}  # relative errors of gradients


def tensors(
    batch: int, heads: int, group: int, n: int, m: int, width: int, dtype: torch.dtype
) -> list[Tensor]:
    """Random q, k and v."""
    shapes = (batch, heads, n, width), *[(batch, heads // group, m, width)] * 2
    return [torch.randn(shape, device=DEVICE).to(dtype) for shape in shapes]


@contextmanager
def in_turns(asked: bool) -> Iterator[None]:
    """Let additions have a fixed order, if asked."""
    torch.use_deterministic_algorithms(asked)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def documents(n: int, length: int) -> hw.mask.Mask:
    """Causal documents of about the same length."""
    return CAUSAL & hw.mask.documents(torch.arange(n, device=DEVICE) // length)


def between(heads: int, n: int, m: int) -> hw.mask.Mask:
    """Any keys for any row and head, which leaves some keys to nobody."""
    generator = torch.Generator(DEVICE).manual_seed(3)
    first = torch.randint(100, m, (1, heads, n), generator=generator, device=DEVICE)
    return hw.mask.between(first, first + 300)


Check = tuple[tuple[int, int, int, int, int, int], Callable[[], dict[str, Any]]]
CHECKS: dict[str, Check] = {
    # batch, heads, group, queries, keys, width; then options
    "causal 128": ((2, 4, 2, 1024, 1024, 128), lambda: {"mask": CAUSAL}),
    "causal 64": ((2, 4, 2, 1024, 1024, 64), lambda: {"mask": CAUSAL}),
    "full 128": ((1, 4, 1, 1024, 1024, 128), dict),
    "full 64": ((1, 4, 1, 1024, 1024, 64), dict),
    "odd 128": ((2, 6, 3, 901, 1103, 128), lambda: {"mask": CAUSAL}),
    "odd 96": ((1, 3, 1, 777, 777, 96), lambda: {"mask": CAUSAL}),
    "odd 40": ((2, 4, 2, 333, 391, 40), dict),
    "window 128": ((1, 4, 2, 1500, 1500, 128), lambda: {"mask": CAUSAL & hw.mask.window(200)}),
    "both sides 64": ((1, 4, 1, 1500, 1500, 64), lambda: {"mask": hw.mask.window(150, 90)}),
    "rows see nothing": ((1, 4, 2, 900, 700, 128), lambda: {"mask": hw.mask.causal(offset=-200)}),
    "documents 128": ((2, 4, 2, 1500, 1500, 128), lambda: {"mask": documents(1500, 270)}),
    "documents 64": ((2, 4, 2, 1500, 1500, 64), lambda: {"mask": documents(1500, 270)}),
    "sinks and window 128": (
        (1, 4, 2, 1500, 1500, 128),
        lambda: {"mask": CAUSAL & (hw.mask.window(200) | hw.mask.prefix(4))},
    ),
    "sinks and window 64": (
        (1, 4, 2, 1500, 1500, 64),
        lambda: {"mask": CAUSAL & (hw.mask.window(200) | hw.mask.prefix(4))},
    ),
    "prefix, lengths 128": (
        (2, 4, 1, 700, 700, 128),
        lambda: {"mask": (CAUSAL | hw.mask.prefix([300, 0])) & hw.mask.lengths([650, 120])},
    ),
    "any 64": ((2, 4, 2, 500, 900, 64), lambda: {"mask": between(4, 500, 900), "hide": 100}),
    "any 128": ((2, 4, 2, 500, 900, 128), lambda: {"mask": between(4, 500, 900), "hide": 100}),
    "learned sinks 128": (
        (1, 4, 2, 700, 700, 128),
        lambda: {"mask": CAUSAL, "sinks": torch.linspace(-2, 3, 4, device=DEVICE)},
    ),
    "capped 128": ((1, 4, 2, 900, 900, 128), lambda: {"mask": CAUSAL, "softcap": 2.0}),
    "capped 64": ((1, 4, 2, 900, 900, 64), lambda: {"mask": documents(900, 270), "softcap": 2.0}),
    "one row": ((1, 2, 1, 1, 500, 128), dict),
    "long 128": ((1, 2, 1, 8192, 8192, 128), lambda: {"mask": CAUSAL}),
}


def check(name: str, dtype: torch.dtype, extra: bool, ordered: bool) -> dict[str, Any]:
    """The relative errors against float32, and whether bits repeat."""
    sizes, options = CHECKS[name][0], CHECKS[name][1]()
    hidden = options.pop("hide", 0)  # the first keys, which no row sees, hold NaN
    torch.manual_seed(0)
    q, k, v = tensors(*sizes, dtype)
    learns = [x.float().requires_grad_() for x in (q, k, v)]
    if "sinks" in options:
        learns.append(options["sinks"].clone().requires_grad_())
        options["sinks"] = learns[3]
    out, seen = hw.observe(*learns[:3], **options, stats=STATS, engine="streaming")
    grad, pull_lse, pull_entropy = (torch.randn_like(x) for x in (out, seen.lse, seen.entropy))
    grad, some = grad.to(dtype), seen.lse > -torch.inf
    total = (out * grad).sum()
    if extra:
        total = (
            total + (seen.lse[some] * pull_lse[some]).sum() + (seen.entropy * pull_entropy).sum()
        )
    truth = torch.autograd.grad(total, learns)
    top, lse = seen.max_logit.detach(), seen.lse.detach()
    totals = RowTotals(lse, top, torch.where(top > -torch.inf, lse - top, 0.0))
    more = (pull_lse.masked_fill(~some, 0), pull_entropy) if extra else ()
    rows = BackwardInputs(out.detach().to(dtype), totals, seen.entropy.detach(), grad, *more)
    k[:, :, :hidden], v[:, :, :hidden] = torch.nan, torch.nan
    options |= {"sinks": options["sinks"].detach()} if "sinks" in options else {}
    terms = pose("attention", q, k, v, Options(**options)).terms(banded=True)
    if not takes(q, k, v, terms, dtype):
        return {"taken": False}
    with in_turns(ordered):
        found, again = (ours.differentiate_hopper(q, k, v, terms, rows) for _ in range(2))
    torch.cuda.synchronize()
    both = [[x for x in (*g[:3], g.sinks) if x is not None] for g in (found, again)]
    error = [_error(x, y) for x, y in zip(both[0], truth, strict=True)]
    same = [torch.equal(x, y) for x, y in zip(*both, strict=True)]
    fine = all(x < WORST[dtype] for x in error) and all(same if ordered else same[1:])
    return {"ok": fine, "error": [float(f"{x:.2g}") for x in error], "same": same}


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.float() - truth).norm() / truth.norm().clamp_min(1e-30))


Kind = tuple[torch.dtype, bool, bool, bool]  # of kernels: type, 64 wide, all gradients, in turns
KINDS: list[Kind] = [
    (torch.bfloat16, narrow, extra, ordered)
    for narrow, extra, ordered in itertools.product((False, True), repeat=3)
] + [(torch.float16, narrow, True, False) for narrow in (False, True)]
PARTS = 2  # processes per kind


def checks(kind: Kind, part: int) -> None:
    """Check a part of the calls of one kind, and other tiles of the first."""
    dtype, narrow, extra, ordered = kind
    names = [name for name in CHECKS if (CHECKS[name][0][-1] <= 64) == narrow]
    if dtype == torch.float16 or (extra and ordered):
        names = [x for x in names if x.split()[0] in ("odd", "sinks")]
    label = f"{str(dtype)[6:]}{' all' * extra}{' turns' * ordered}"
    for name in names[part::PARTS]:
        attempt("checks", f"{name} {label}", lambda name=name: check(name, dtype, extra, ordered))
    if dtype == torch.bfloat16 and not extra and not ordered and part:
        ours.SHAPES[64 if narrow else 128] = ours.BackwardShape(3, 1)
        attempt("checks", f"{names[0]}, 3 stages", lambda: check(names[0], dtype, extra, ordered))


def all_checks(folder: Path) -> None:
    """Run the kinds side by side, since compiling takes most of the time."""
    command = [sys.executable, "-m", "bench.gpu_backward", "--kind"]
    parts = list(itertools.product(range(len(KINDS)), range(PARTS)))
    files = [folder / f"gpu_backward_{n}_{part}.json" for n, part in parts]
    running = [
        subprocess.Popen([*command, f"{n},{part}", "--json", str(file)])
        for (n, part), file in zip(parts, files, strict=True)
    ]
    other = subprocess.Popen([*command, "peers", "--json", os.devnull])
    for process, file, (n, part) in zip(running, files, parts, strict=True):
        try:
            status = process.wait(max(STOP[0] - 15 - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        if file.exists():
            FOUND.setdefault("checks", {}).update(json.loads(file.read_text()).get("checks", {}))
            file.unlink()
        if status:
            FOUND.setdefault("checks", {})[f"process of {KINDS[n]}, {part}"] = {"failed": status}
    try:
        other.wait(max(STOP[0] - 15 - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        other.kill()


def attempt(section: str, label: str, run: Callable[[], Any]) -> Any:
    """Run a part, and keep what it returns or why it failed."""
    if time.monotonic() > STOP[0]:
        return None
    alarm = threading.Timer(PATIENCE, lambda: give_up(label))
    alarm.start()
    try:
        found = run()
    except Exception as error:
        traceback.print_exc(limit=-4)
        found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    alarm.cancel()
    FOUND.setdefault(section, {})[label] = found
    if SAVE:
        SAVE[0].write_text(json.dumps(FOUND, indent=1))
    bad = isinstance(found, dict) and (found.get("ok") is False or "failed" in found)
    if section != "checks" or bad:
        print(f"{section}: {label}: {json.dumps(found)[:600]}", flush=True)
    return found


SAVE: list[Path] = []


def give_up(label: str) -> None:
    """End the process, since a kernel does not end."""
    print(f"{label} hangs; found before: {json.dumps(FOUND)}", flush=True)
    os._exit(3)


Shape = tuple[int, int, int, int, int, Callable[[int], hw.mask.Mask | None]]
WINDOW = CAUSAL & hw.mask.window(1023)
BOTH = CAUSAL & (hw.mask.window(1023) | hw.mask.prefix(4))
SHAPES: dict[str, Shape] = {  # batch, heads, group, n, width, and the mask
    "128, 8k causal": (2, 16, 1, 8192, 128, lambda n: CAUSAL),
    "128, 8k full": (2, 16, 1, 8192, 128, lambda n: None),
    "128, 8k documents of 1500": (2, 16, 1, 8192, 128, lambda n: documents(n, 1500)),
    "128, 16k window 1024": (1, 16, 4, 16384, 128, lambda n: WINDOW),
    "128, 16k sinks and window 1024": (1, 16, 4, 16384, 128, lambda n: BOTH),
    "64, 8k causal": (2, 32, 1, 8192, 64, lambda n: CAUSAL),
    "128, 16k causal, grouped": (1, 32, 4, 16384, 128, lambda n: CAUSAL),
    "128, 2k causal": (8, 16, 1, 2048, 128, lambda n: CAUSAL),
    "64, 8k full": (2, 32, 1, 8192, 64, lambda n: None),
    "64, 8k documents of 1500": (2, 32, 1, 8192, 64, lambda n: documents(n, 1500)),
}


PEERS = ("128, 8k documents of 1500", "128, 16k sinks and window 1024")  # Triton's are timed too


def peers() -> None:
    """Compile Triton's kernels for PEERS, beside the checks."""
    for name in PEERS:
        batch, heads, group, _, *rest = SHAPES[name]
        given = inputs((batch, heads, group, 2048, *rest))[0]  # type: ignore[arg-type]
        attempt("peers", name, lambda given=given: differentiate_dot(*given) and None)


def seen_keys(terms: Terms, n: int) -> Tensor:
    """How many keys each row sees, (n,); all entries and heads see the same ones."""
    row = torch.arange(n, device=DEVICE)
    first, last = torch.zeros_like(row), torch.full_like(row, n)
    if terms.band is not None and len(terms.band) == 3:
        first, last = (row + terms.band[1]).clamp(0, n), (row + terms.band[2]).clamp(0, n)
    if terms.intervals is None:
        return (last - first).clamp_min(0).float()
    pieces = terms.intervals[:, :, 0, 0]
    lengths = torch.minimum(pieces[:, 1], last) - torch.maximum(pieces[:, 0], first)
    return lengths.clamp_min(0).sum(0).float()


def inputs(shape: Shape, sinks: bool = False) -> tuple[Given, Given, int]:
    """What backwards without and with gradients of lse and entropy take, and the pairs of a head.

    Only the time matters, so out is random, and lse what random logits have on average.
    """
    batch, heads, group, n, width, mask = shape
    q, k, v = tensors(batch, heads, group, n, n, width, torch.bfloat16)
    given = Options(mask=mask(n), sinks=torch.zeros(heads, device=DEVICE) if sinks else None)
    terms = pose("attention", q, k, v, given).terms(banded=True)
    count = seen_keys(terms, n)
    lse = (count.log() + 0.5).expand(batch, heads, n).contiguous()
    totals = RowTotals(lse, lse, torch.zeros_like(lse))
    rows = BackwardInputs(torch.randn_like(q), totals, lse, torch.randn_like(q))
    all_rows = rows._replace(grad_lse=torch.randn_like(lse), grad_entropy=torch.randn_like(lse))
    return (q, k, v, terms, rows), (q, k, v, terms, all_rows), int(count.double().sum())


def own(
    given: Given, ordered: bool = False, shape: ours.BackwardShape | None = None, size: int = 0
) -> Run:
    """A backward of ours, with another pipeline or size of a section if given."""
    width, usual, together = max(64, given[0].shape[-1]), dict(ours.SHAPES), ours.TOGETHER

    def run() -> object:
        ours.SHAPES[width], ours.TOGETHER = shape or usual[width], size or together
        try:
            with in_turns(ordered):
                return ours.differentiate_hopper(*given)
        finally:
            ours.SHAPES[width], ours.TOGETHER = usual[width], together

    return run


def timed(name: str, first: bool = False) -> dict[str, Any]:
    """Milliseconds and TFLOP/s (10 · pairs · width) of every backward of one kind of call.

    `first`: only what is compiled already, or not by us.
    """
    batch, heads, _, n, width, mask = SHAPES[name]
    given, more, pairs = inputs(SHAPES[name])
    with_sinks = inputs(SHAPES[name], sinks=True)[0]
    runs: dict[str, Run] = {
        "ours": own(given), "turns": own(given, True), "entropy": own(more),
        "learned sinks": own(with_sinks),
    }  # fmt: skip
    if name == "128, 8k causal":
        runs |= {
            "3 stages": own(given, shape=ours.BackwardShape(3, 1)),
            "8 MB": own(given, size=8 << 20), "64 MB": own(given, size=64 << 20),
        }  # fmt: skip
    if mask(n) is None or mask(n) is CAUSAL:
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        fused = Fused(SDPBackend.CUDNN_ATTENTION, *leaves, mask(n) is CAUSAL)
        runs["cudnn"] = backward_of(fused, leaves)
    elif name in PEERS:
        runs["triton"] = lambda: differentiate_dot(*given)
    if first:
        runs = {label: runs[label] for label in ("ours", "cudnn")}
    times = interleaved(runs, rounds=5, slice_ms=8)
    flops = 10 * batch * heads * width * pairs
    return {label: [round(ms, 4), round(flops / ms / 1e9)] for label, ms in times.items()}


def kernels(name: str) -> dict[str, float]:
    """Microseconds of each kernel in one call of ours."""
    given = inputs(SHAPES[name])[0]
    ours.differentiate_hopper(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(3):
            ours.differentiate_hopper(*given)
        torch.cuda.synchronize()
    return {x.key[:60]: round(x.device_time_total / x.count, 1) for x in seen.key_averages()}


def main() -> None:
    """Check, time, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=80, help="start no part after this")
    folder = os.environ.get("OUT", ".")
    parser.add_argument("--json", type=Path, default=Path(folder) / "gpu_backward.json")
    parser.add_argument("--kind", help="only check a part of the calls of a kind: `3,0`")
    parser.add_argument("--only", choices=["checks", "times"], help="one part")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_backward needs a Hopper GPU, and PyTorch finds none here")
    begun = time.monotonic()
    STOP[0] = begun + asked.seconds
    SAVE.append(asked.json)
    if asked.kind == "peers":
        peers()
        return
    if asked.kind is not None:
        kind, part = map(int, asked.kind.split(","))
        checks(KINDS[kind], part)
        return
    first = attempt(
        "first", "causal 128", lambda: check("causal 128", torch.bfloat16, False, False)
    )
    if first is None or "failed" in first:
        sys.exit("the first call failed, so nothing else was tried")
    headline = "128, 8k causal"
    attempt("times", f"{headline}, first", lambda: timed(headline, True))
    attempt("kernels", headline, lambda: kernels(headline))
    if asked.only != "times":
        print(f"checks begin after {time.monotonic() - begun:.0f} s", flush=True)
        all_checks(asked.json.parent)
        print(f"checks end after {time.monotonic() - begun:.0f} s", flush=True)
    for name in SHAPES if asked.only != "checks" else ():
        attempt("times", name, lambda name=name: timed(name))
    asked.json.write_text(json.dumps(FOUND, indent=1))
    every = FOUND.get("checks", {})
    bad = [name for name, x in every.items() if not x.get("ok", False)]
    print(f"{len(every)} checks, {len(bad)} bad: {bad}; {time.monotonic() - begun:.0f} s")
    for name, found in FOUND.get("times", {}).items():
        print(name, found)


if __name__ == "__main__":
    main()
