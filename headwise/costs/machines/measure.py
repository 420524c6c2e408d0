"""Measures this machine: `headwise cost --measure`.

Rates come from large operations. Then a few attention calls and matrix products are timed, and the
coefficients of the time model are fitted to them: each kind of kernel takes a sum of counts times
seconds per count. The fit minimises relative errors, and no coefficient is negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.api import attention
from headwise.costs.machines.clock import Clock, Run
from headwise.costs.machines.hardware import Device
from headwise.costs.machines.speeds import AttentionSpeed, Speeds
from headwise.costs.machines.this_machine import hardware_name, memory_of
from headwise.mask import causal


@dataclass(frozen=True)
class TrialSizes:
    """The sizes of what is measured: large enough to fill the device, small enough to be quick."""

    square: int  # of the matrix product that shows the rate
    products: tuple[tuple[int, int, int], ...]  # m, n, k
    tokens: int  # batch · length of an attention call
    model: int  # heads · width
    widths: tuple[int, ...]
    lengths: tuple[int, int]
    cache: int  # numbers in the keys of a decoding call
    sequences: int  # among which these keys are divided
    stream: int  # numbers in a tensor beyond every cache
    tile: tuple[int, int]
    rounds: int
    slice: float  # seconds of a timed slice


CPU = TrialSizes(
    square=1536,
    products=(
        (640, 640, 640),
        (1024, 1536, 768),
        (1536, 96, 1536),
        (1, 4096, 3072),
        (24, 1536, 2048),
    ),
    tokens=1536,
    model=256,
    widths=(32, 64, 96, 128),
    lengths=(384, 1536),
    cache=6 << 20,
    sequences=1,
    stream=32 << 20,
    tile=(256, 512),
    rounds=7,
    slice=0.02,
)
CUDA = TrialSizes(
    square=8192,
    products=(
        (6144, 6144, 6144),
        (12288, 5120, 2048),
        (3072, 20480, 5120),
        (16384, 3072, 3072),
        (24576, 1536, 2560),
        (1, 16384, 12288),
    ),
    tokens=12288,
    model=2048,
    widths=(32, 64, 96, 128, 256),
    lengths=(1536, 6144),
    cache=512 << 20,
    sequences=16,
    stream=512 << 20,
    tile=(128, 128),
    rounds=7,
    slice=0.01,
)


@dataclass(frozen=True)
class Trial:
    """An attention call to time."""

    width: int
    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int

    @property
    def rows(self) -> float:
        """Query rows of all heads."""
        return float(self.batch * self.heads * self.queries)

    @property
    def pairs(self) -> float:
        """Pairs of all heads; every key is visible."""
        return self.rows * self.keys

    @property
    def stored(self) -> float:
        """Numbers in the keys and values."""
        return 2.0 * self.batch * self.kv_heads * self.keys * self.width

    def tensors(self, where: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v."""
        q = torch.randn(self.batch, self.heads, self.queries, self.width, device=where)
        k, v = torch.randn(
            2, self.batch, self.kv_heads, self.keys, self.width, device=where
        ).unbind()
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def forward(self, where: torch.device, dtype: torch.dtype) -> Run:
        """The call; a single query is causal, as in decoding."""
        q, k, v = self.tensors(where, dtype)
        mask = causal() if self.queries == 1 else None
        return lambda: attention(q, k, v, mask=mask)

    def backward(self, where: torch.device, dtype: torch.dtype) -> Run:
        """The backward of the call."""
        leaves = self.tensors(where, dtype)
        for leaf in leaves:
            leaf.requires_grad_()
        out = attention(*leaves)
        grad = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


DECODING = 8
"""Heads of the decoding calls: once each with its own keys, once four that share them."""

EXPONENTIALS = 64
"""Exponentials per number in the kernel that shows their rate on a GPU."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Report = Callable[[str, float], None]


def measure_device(
    where: torch.device,
    dtypes: Sequence[str] | None = None,
    report: Report = lambda stage, done: None,
    sizes: TrialSizes | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> Device:
    """Measure a device of this machine: a minute on a CPU, some seconds on a GPU.

    `report` is told each stage and the share that is done; `now` is the clock.
    """
    sizes = sizes or (CUDA if where.type == "cuda" else CPU)
    dtypes = dtypes or (("bf16", "fp16", "fp32") if where.type == "cuda" else ("fp32", "bf16"))
    clock = Clock(where, sizes.rounds, sizes.slice, now)
    steps = 2 + len(dtypes)
    with torch.no_grad():
        report("memory", 0.0)
        bandwidth = measure_bandwidth(clock, sizes)
        report("special functions", 1 / steps)
        special, launch = measure_special(clock)
    matrix, measured = {}, {}
    for done, name in enumerate(dtypes):
        report(f"matrix products and attention in {name}", (2 + done) / steps)
        matrix[name], measured[name] = calibrate(
            clock, sizes, DTYPES[name], bandwidth, special, launch
        )
    return Device(
        id="this",
        name=hardware_name(where),
        matrix=matrix,
        bandwidth=bandwidth,
        memory=memory_of(where),
        source="measured by headwise cost --measure",
        special=1 / special,
        units=_units(where),
        cpu=where.type == "cpu",
        measured=measured,
    )


def about_this_machine() -> dict[str, Any]:
    """The date and the versions that belong to a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def measure_bandwidth(clock: Clock, sizes: TrialSizes) -> float:
    """Bytes per second read and written by a sum of two tensors beyond every cache."""
    a, b = torch.ones(2, sizes.stream, device=clock.where).unbind()
    (found,) = clock.seconds([lambda: torch.add(a, b, out=b)])
    return 3 * a.nbytes / found


def measure_special(clock: Clock) -> tuple[float, float]:
    """Seconds of an exponential and of a launch."""
    cuda = clock.where.type == "cuda"
    x = torch.rand((1 << 24) if cuda else (1 << 16), device=clock.where)
    out, one = torch.empty_like(x), x[:1].clone()
    many = _many_exponentials(x) if cuda else None
    exponentials = many or (lambda: torch.exp2(x, out=out))
    took, launch = clock.seconds([exponentials, lambda: one.neg()])
    return took / x.numel() / (1 if many is None else EXPONENTIALS), launch


def _many_exponentials(x: Tensor) -> Run | None:
    """A kernel of many exponentials per number: with one, a GPU would wait for its memory.

    None if this machine can't compile it.
    """
    code = f"for (int i = 0; i < {EXPONENTIALS}; i++) x = exp2f(-x); return x;"
    code = f"template <typename T> T exponentials(T x) {{ {code} }}"
    try:
        kernel = torch.cuda.jiterator._create_jit_fn(code)
        kernel(x)
    except Exception:  # whatever a missing or another compiler raises
        return None
    return lambda: kernel(x)


def calibrate(
    clock: Clock,
    sizes: TrialSizes,
    dtype: torch.dtype,
    bandwidth: float,
    special: float,
    launch: float,
) -> tuple[float, Speeds]:
    """The matrix rate in a dtype, and the speeds that the time model needs."""
    overlap = clock.where.type == "cuda"
    with torch.no_grad():
        rate, flop, flop_byte = _products(clock, sizes, dtype, overlap)
    speeds = Speeds(
        flop=flop,
        flop_byte=flop_byte,
        byte=1 / bandwidth,
        special=special,
        launch=launch,
        attention=tuple(_attention(clock, sizes, dtype, width) for width in sizes.widths),
        overlap=overlap,
        tile=sizes.tile,
    )
    return rate, speeds


def _products(
    clock: Clock, sizes: TrialSizes, dtype: torch.dtype, overlap: bool
) -> tuple[float, float, float]:
    """The rate of a large product; seconds per FLOP and per byte of those of other shapes."""
    shapes = [(sizes.square,) * 3, *sizes.products]
    runs = [_product(clock.where, dtype, *shape) for shape in shapes]
    times = clock.seconds(runs)
    flops = [2.0 * m * n * k for m, n, k in shapes]
    size = dtype.itemsize
    traffic = [float(size * (m * k + n * k + m * n)) for m, n, k in shapes]
    rate = max(work / took for work, took in zip(flops, times, strict=True))
    if not overlap:
        flop, byte = fit([flops, traffic], times)
        return rate, flop, byte
    # Where one of the two decides, only that one is fitted.
    wide = [i for i, (m, _, _) in enumerate(shapes) if m > 1]
    narrow = [i for i, (m, _, _) in enumerate(shapes) if m == 1]
    (flop,) = fit([[flops[i] for i in wide]], [times[i] for i in wide])
    (byte,) = fit([[traffic[i] for i in narrow]], [times[i] for i in narrow])
    return rate, flop, byte


def _product(where: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Run:
    x = torch.randn(m, k, device=where).to(dtype)
    weight = torch.randn(n, k, device=where).to(dtype)
    return lambda: F.linear(x, weight)


def _attention(clock: Clock, sizes: TrialSizes, dtype: torch.dtype, width: int) -> AttentionSpeed:
    """The speed of attention with heads of a width: forward, backward and decoding."""
    heads = max(2, sizes.model // width)
    short, long = (
        Trial(width, max(1, sizes.tokens // length), heads, heads, length, length)
        for length in sizes.lengths
    )
    keys = sizes.cache // (DECODING * width * sizes.sequences)
    separate = Trial(width, sizes.sequences, DECODING, DECODING, 1, keys)
    shared = Trial(width, 8 * sizes.sequences, DECODING, DECODING // 4, 1, keys // 2)
    trials = (short, long, separate, shared)
    *times, back = clock.seconds(
        [
            *(each.forward(clock.where, dtype) for each in trials),
            long.backward(clock.where, dtype),
        ]
    )
    pair, row = fit([[short.pairs, long.pairs], [short.rows, long.rows]], times[:2])
    size = float(dtype.itemsize)
    stored = [size * separate.stored, size * shared.stored]
    decode_pair, decode_byte = fit([[separate.pairs, shared.pairs], stored], times[2:])
    return AttentionSpeed(width, pair, row, decode_pair, decode_byte, back / long.pairs)


def fit(counts: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[float, ...]:
    """Seconds per unit of one or two counts, none negative, with the least relative errors.

    >>> fit([[1.0, 2.0, 4.0], [4.0, 1.0, 0.0]], [9.0, 4.0, 4.0])
    (1.0, 2.0)
    """
    columns = torch.tensor([[x / t for x, t in zip(count, times, strict=True)] for count in counts])
    columns = columns.double()
    scale = columns.norm(dim=1, keepdim=True)
    ones = torch.ones(len(times), 1, dtype=torch.float64)
    found = (torch.linalg.lstsq((columns / scale).T, ones).solution / scale).flatten().tolist()
    if len(found) == 2 and min(found) < 0:
        kept = 0 if found[0] >= found[1] else 1
        (only,) = fit([counts[kept]], times)
        found = [only, 0.0] if kept == 0 else [0.0, only]
    return tuple(float(f"{value:.6g}") for value in found)


def _units(where: torch.device) -> int:
    if where.type == "cuda":
        return int(torch.cuda.get_device_properties(where).multi_processor_count)
    return torch.get_num_threads()
