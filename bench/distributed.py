"""Times one rank's kernels alone, beside the bytes that the rank sends: ring, Ulysses, windows.

One GPU is enough, because a rank's work does not depend on the others once their keys are there.
A rank of a ring computes its rows over each rank's keys in turn and merges; a rank of Ulysses
computes a few heads over the whole sequence; with a window, a rank needs a few keys of its
neighbours.
PyTorch's ring is timed by its kernels, without its merges: one causal step, and one of the others
times their number. Times are of a layer with 32 heads and 8 key heads of width 128. Heads do not
depend on each other, so long calls are timed with fewer of them (`heads timed`), and the time is
scaled. Bytes are computed by `hw.distributed.explain`, which tests compare with real messages, and
the time that a link needs for them is computed from --bandwidth.

    python -m bench.distributed --json figures.json    # on a GPU: 128k to 1M tokens, 2 to 64 ranks
    python -m bench.distributed --tokens 2048 --ranks 2 4 --device cpu
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from headwise.core.problem import pose
from headwise.distributed.geometry import geometry
from headwise.distributed.key_blocks import KeyBlocks, Learnable, RunGradients
from headwise.distributed.key_exchange import KeyRun, within_part
from headwise.distributed.layouts import Layout
from headwise.distributed.ranges import union
from headwise.engines.gradients import RowGradients
from headwise.engines.plan import choose_partial
from headwise.mask import Mask

HEADS, KV_HEADS, WIDTH = 32, 8, 128
GROUP = HEADS // KV_HEADS
BANDWIDTHS = (450e9, 50e9)  # bytes per second and direction: NVLink 4; a port of 400 Gb/s
Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A sequence on a number of ranks, and where and how long its calls are timed."""

    tokens: int
    ranks: int
    device: torch.device
    dtype: torch.dtype
    speed: float  # floating-point operations per second, to guess a call's time
    longest: float  # seconds of a forward: longer ones are timed with fewer heads

    @property
    def part(self) -> int:
        """The positions of a rank."""
        return self.tokens // self.ranks

    def groups(self, pairs: int, most: int) -> int:
        """The key heads to time, so that a forward over this many pairs takes not too long."""
        found = most
        while found > 1 and self.guess(pairs, found * GROUP) > self.longest:
            found //= 2
        return found

    def guess(self, pairs: int, heads: int) -> float:
        """The seconds of a forward, roughly."""
        return 4 * pairs * heads * WIDTH / self.speed

    def random(self, heads: int, length: int, learns: bool = False) -> Tensor:
        """A tensor (1, heads, length, WIDTH)."""
        shape = 1, heads, length, WIDTH
        return torch.randn(shape, device=self.device, dtype=self.dtype, requires_grad=learns)


@dataclass(frozen=True)
class Figures:
    """A rank's kernels and messages of one layer, forward and backward."""

    tokens: int
    ranks: int
    way: str
    engine: str
    heads_timed: str
    ms: tuple[float, float] = (0.0, 0.0)
    tflops: tuple[float, float] = (0.0, 0.0)
    sent: tuple[int, int] = (0, 0)  # bytes
    failure: str = ""


def seconds(run: Run, case: Case, guess: float) -> float:
    """The median time of a call; a long one is timed once, its kernels being compiled already."""
    taken = []
    for _ in range(1 if guess > 0.5 else 2 if guess > 0.1 else 4):
        _synchronize(case.device)
        begin = time.perf_counter()
        run()
        _synchronize(case.device)
        taken.append(time.perf_counter() - begin)
    timed = sorted(taken[1:] or taken)
    return timed[len(timed) // 2]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def over_keys(case: Case, way: str, mask: Mask, layout: Layout, visible: int) -> Figures:
    """A rank of a ring, or of `ranges`: its rows over the keys of all ranks, run by run."""
    rank, lengths = case.ranks // 2, (case.part,) * case.ranks
    groups = case.groups(visible, KV_HEADS)
    q, k = case.random(GROUP * groups, case.part), case.random(groups, case.part)
    v = case.random(groups, case.part)
    place = geometry(mask, 1, GROUP * groups, lengths, lengths, layout)
    problem = pose("attention", q, k, v)
    engine = choose_partial(problem).name
    blocks = KeyBlocks(problem, place, rank, engine, 0, (), 1)
    given = Learnable(q, None, None, None, None, None)
    runs: list[KeyRun] = []
    for owner in range(case.ranks):
        for keys, (i, j) in zip(
            place.moves(rank, owner),
            within_part(place.moves(rank, owner), union(place.keys[owner])),
            strict=True,
        ):
            runs.append(KeyRun(*keys, k[:, :, i:j], v[:, :, i:j]))
    sums = blocks.forward(given, WIDTH, runs).rows
    rows = RunGradients(blocks, given, sums, RowGradients(torch.randn_like(q), None, None), False)
    found = _timed(
        case, GROUP * groups, visible,
        lambda: blocks.forward(given, WIDTH, runs),
        lambda: [rows.add_run(run) for run in runs],
    )  # fmt: skip
    move = "ring" if way == "ring" else "ranges"
    return _figures(case, way, engine, (GROUP * groups, HEADS), visible, found, mask, layout, move)


def ring(case: Case) -> Figures:
    """A rank of a causal ring; `head_tail` gives every rank the same work."""
    visible = case.tokens * case.part // 2
    return over_keys(case, "ring", hw.mask.causal(), hw.distributed.head_tail(), visible)


def window(case: Case) -> Figures:
    """A rank whose rows see 4096 keys each: it receives what its first rows see of others."""
    mask = hw.mask.causal() & hw.mask.window(4095)
    visible = case.part * min(4096, case.tokens)
    return over_keys(case, "window of 4096", mask, hw.distributed.contiguous(), visible)


def ulysses(case: Case) -> Figures:
    """A rank of Ulysses: its heads over all positions, as any call of `hw.attention`."""
    mask, all_pairs = hw.mask.causal(), case.tokens**2 // 2
    heads, kv_heads = max(1, HEADS // case.ranks), max(1, KV_HEADS // case.ranks)
    share = heads  # of this rank
    if heads > GROUP:
        kv_heads = case.groups(all_pairs, kv_heads)
        heads = GROUP * kv_heads
    given = [case.random(n, case.tokens, learns=True) for n in (heads, kv_heads, kv_heads)]
    out = hw.attention(*given, mask=mask)
    found = _timed(
        case, heads, all_pairs, partial(_unlearned, lambda: hw.attention(*given, mask=mask)),
        _backward(out, given),
    )  # fmt: skip
    engine = hw.explain(*given, mask=mask).engine
    layout = hw.distributed.head_tail()
    return _figures(
        case, "ulysses", engine, (heads, share), all_pairs, found, mask, layout, "ulysses"
    )


def pytorch_ring(case: Case) -> Figures:
    """The kernels of PyTorch's ring with its load balance, which sends as much as ours."""
    visible = case.tokens * case.part // 2
    groups = case.groups(visible, KV_HEADS)
    q = case.random(GROUP * groups, case.part, learns=True)
    k, v = (case.random(groups, case.part, learns=True) for _ in range(2))
    half = case.part // 2
    kernels: AbstractContextManager[object] = nullcontext()
    if case.device.type == "cuda":
        kernels = sdpa_kernel(
            [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True
        )
    found = 0.0, 0.0
    with kernels:
        for times, keys, causal in ((1, case.part, True), (case.ranks - 1, half, False)):
            call = _Library(q, k[:, :, :keys], v[:, :, :keys], causal)
            pairs = case.part * keys // (2 if causal else 1)
            each = _timed(
                case, GROUP * groups, pairs, partial(_unlearned, call),
                _backward(call(), [call.q, call.k, call.v]),
            )  # fmt: skip
            found = found[0] + times * each[0], found[1] + times * each[1]
    return _figures(
        case, "PyTorch's ring", "cuDNN or flash", (GROUP * groups, HEADS), visible, found,
        hw.mask.causal(), hw.distributed.head_tail(), "ring",
    )  # fmt: skip


@dataclass(frozen=True)
class _Library:
    """A call of PyTorch's attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool

    def __call__(self) -> Tensor:
        return F.scaled_dot_product_attention(
            self.q, self.k, self.v, is_causal=self.causal, enable_gqa=True
        )


def _unlearned(run: Run) -> None:
    with torch.no_grad():
        run()


def _backward(out: Tensor, given: list[Tensor]) -> Run:
    grad = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, given, grad, retain_graph=True)


def _timed(case: Case, heads: int, pairs: int, forward: Run, backward: Run) -> tuple[float, float]:
    guess = case.guess(pairs, heads)
    return seconds(forward, case, guess), seconds(backward, case, 2.5 * guess)


def _figures(
    case: Case, way: str, engine: str, heads: tuple[int, int], pairs: int,
    found: tuple[float, float], mask: Mask, layout: Layout, move: str,
) -> Figures:  # fmt: skip
    """The times of all heads, from those of `heads[0]` of `heads[1]`, and the bytes sent."""
    moved = hw.distributed.explain(
        case.tokens, case.ranks, mask=mask, layout=layout, heads=HEADS, kv_heads=KV_HEADS,
        width=WIDTH, dtype=case.dtype, move=move,
    )  # fmt: skip
    operations = 4 * pairs * WIDTH * heads[0] / 1e12
    forward, backward = (1e3 * x * heads[1] / heads[0] for x in found)
    return Figures(
        case.tokens, case.ranks, way, engine, f"{heads[0]} of {heads[1]}", (forward, backward),
        (operations / found[0], 2.5 * operations / found[1]),
        (max(moved.sent), max(moved.returned)),
    )  # fmt: skip


WAYS = {"ring": ring, "ulysses": ulysses, "window of 4096": window, "PyTorch's ring": pytorch_ring}


def measured(case: Case) -> Iterator[Figures]:
    """Every way on this case; one that fails says why."""
    for name, way in WAYS.items():
        if name == "ulysses" and case.ranks > HEADS:
            continue  # half of the ranks would have nothing to do
        try:
            yield way(case)
        except RuntimeError as error:  # out of memory too
            why = str(error).splitlines()[0][:200]
            yield Figures(case.tokens, case.ranks, name, "", "", failure=why)
        if case.device.type == "cuda":
            torch.cuda.empty_cache()


def table(found: list[Figures], bandwidths: tuple[float, ...]) -> str:
    """The figures as Markdown; the times of links are computed."""
    links = [f"link at {each / 1e9:.0f} GB/s" for each in bandwidths]
    head = ["tokens", "ranks", "way", "engine", "heads timed", "kernels", "TFLOP/s", "sent", *links]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for x in found:
        cells = [
            f"{x.tokens:,}", str(x.ranks), x.way, x.engine, x.heads_timed,
            "{:.1f} / {:.1f} ms".format(*x.ms), "{:.0f} / {:.0f}".format(*x.tflops),
            "{:.0f} / {:.0f} MiB".format(*(n / 2**20 for n in x.sent)),
            *("{:.1f} / {:.1f} ms".format(*(1e3 * n / b for n in x.sent)) for b in bandwidths),
        ]  # fmt: skip
        cells = [*cells[:3], x.failure] if x.failure else cells
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1 << 17, 1 << 18, 1 << 20])
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 32, 16, 8, 4, 2])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--bandwidth", type=float, nargs="+", default=BANDWIDTHS,
        help="bytes per second that a rank can send (default: NVLink 4, and 400 Gb/s)",
    )  # fmt: skip
    parser.add_argument(
        "--longest", type=float, default=0.06,
        help="seconds of a forward that is timed with all heads (default: 0.06)",
    )  # fmt: skip
    parser.add_argument("--json", help="write the figures into this file")
    given = parser.parse_args()
    device, found = torch.device(given.device), []
    gpu = device.type == "cuda"
    dtype, speed = (torch.bfloat16, 5e14) if gpu else (torch.float32, 2e10)
    machine = torch.cuda.get_device_name(device) if gpu else "CPU"
    begin = time.perf_counter()
    for tokens in given.tokens:  # from short to long, so that kernels are compiled in short calls
        for ranks in given.ranks:
            case = Case(tokens, ranks, device, dtype, speed, given.longest)
            for figures in measured(case):
                found.append(figures)
                print(f"{time.perf_counter() - begin:6.1f} s", table([figures], ()).splitlines()[2])
            if given.json:
                about = {"machine": machine, "torch": torch.__version__}
                with open(given.json, "w", encoding="utf-8") as file:
                    json.dump(about | {"figures": list(map(asdict, found))}, file, indent=2)
    print(f"\n{machine}, torch {torch.__version__}; forward / backward of a layer, per rank\n")
    print(table(found, tuple(given.bandwidth)))


if __name__ == "__main__":
    main()
