"""`headwise doctor --warm`: compiles the kernels of common calls, in processes beside each other.

A kernel is compiled for each combination of options that it is called with, not for lengths or
batches, and Triton keeps what it compiled on disk: the calls of later processes find it there.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise import attention, attention_map, mask, observe, watch
from headwise.devices import usable_cores

N = 2048  # long enough for the kernels of long calls, and short enough to take no time
FEW = ("lse", "entropy", "max_logit", "top_prob", "sink_mass")
WIDTHS, DTYPES = (64, 128), ("bfloat16", "float16")
MASKS = ("full", "causal", "window", "documents", "sinks and window")
OTHERS = ("a watched model", "decoding", "a map")
MEMORY = 2  # GB that each process may take


@dataclass(frozen=True)
class Warmed:
    """Calls of one kind, and the seconds that they took; `error` is why they failed."""

    calls: str
    seconds: float
    error: str | None = None


def kinds() -> list[str]:
    """The kinds of calls: a mask or another use, a head width and a dtype."""
    return [" · ".join(map(str, x)) for x in itertools.product((*MASKS, *OTHERS), WIDTHS, DTYPES)]


def warm(processes: int | None = None) -> Iterator[Warmed]:
    """Make calls of every kind, each in a process of its own, and tell when they are done."""
    if processes is None:
        free, _ = torch.cuda.mem_get_info()
        processes = max(1, min(usable_cores(), int(free / 2**30) // MEMORY))
    with ThreadPoolExecutor(processes) as pool:
        for done in as_completed([pool.submit(in_process, kind) for kind in kinds()]):
            yield done.result()


def in_process(kind: str) -> Warmed:
    """Make the calls of one kind in another process."""
    start = time.monotonic()
    command = [sys.executable, "-m", "headwise.apps.cli.warming", kind]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stderr.strip().splitlines()
    error = (
        (lines[-1] if lines else f"it ended with {done.returncode}") if done.returncode else None
    )
    return Warmed(kind, round(time.monotonic() - start, 1), error)


def make(kind: str, device: str = "cuda", n: int = N) -> None:
    """Make the calls of one kind."""
    use, width, dtype = kind.split(" · ")

    def tensor(heads: int, length: int = n) -> Tensor:
        given = torch.randn(1, heads, length, int(width), device=device)
        return given.to(getattr(torch, dtype)).requires_grad_()

    q, k, v = tensor(4), tensor(2), tensor(2)
    if use in MASKS:
        _attend(q, k, v, masks(n, device)[use])
    else:
        OTHER_USES[use](q, k, v)


def masks(n: int, device: str) -> dict[str, mask.Mask | None]:
    """The masks by their names."""
    causal, window = mask.causal(), mask.window(n // 8)
    ids = torch.arange(n, device=device)[None] // 600
    return {
        "full": None,
        "causal": causal,
        "window": causal & window,
        "documents": causal & mask.documents(ids),
        "sinks and window": causal & (window | mask.prefix(4)),
    }


def _attend(q: Tensor, k: Tensor, v: Tensor, shown: mask.Mask | None) -> None:
    """Train, with and without statistics, and infer."""
    attention(q, k, v, mask=shown).float().sum().backward()
    for stats in (None, FEW, ("entropy",)):
        out, seen = observe(q, k, v, mask=shown, stats=stats)
        (out.float().sum() + seen.entropy.sum()).backward()
        with torch.no_grad():
            observe(q, k, v, mask=shown, stats=stats)
    with torch.no_grad():
        attention(q, k, v, mask=shown)


def _watch(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Watch a model that attends with PyTorch's kernels."""
    heads, length, width = q.shape[1:]
    model = nn.MultiheadAttention(
        heads * width, heads, batch_first=True, device=q.device, dtype=q.dtype
    )
    x = q.detach().transpose(1, 2).reshape(1, length, -1)
    hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
    for rows, stats in ((None, None), (64, None), (None, FEW)):
        with watch(model, rows=rows, stats=stats):
            model(x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)


@torch.no_grad()
def _decode(q: Tensor, k: Tensor, v: Tensor) -> None:
    attention(q[:, :, -1:], k, v)
    observe(q[:, :, -1:], k, v)


@torch.no_grad()
def _map(q: Tensor, k: Tensor, v: Tensor) -> None:
    seen = attention_map(q, k, mask=mask.causal())
    seen.pool(16), seen.received(), seen.top(8), seen[0, 0, :64, :64]


OTHER_USES: dict[str, Callable[[Tensor, Tensor, Tensor], None]] = dict(
    zip(OTHERS, (_watch, _decode, _map), strict=True)
)


if __name__ == "__main__":
    make(sys.argv[1])
    print(json.dumps(sys.argv[1]))
