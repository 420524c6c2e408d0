"""headwise on a CPU compared with PyTorch's attention: python -m bench.cpu"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from bench import described
from bench.pairs import Figure, at_least, at_most, median_seconds, ratio, report

HEADS, WIDTH = 8, 64
sdpa = F.scaled_dot_product_attention


def main() -> None:
    described(__doc__).parse_args()
    torch.manual_seed(0)
    figures: list[Figure] = []
    for group in (attending, windows, observing, sampling, remembering, differentiating, mapping):
        found = group()
        figures += found
        print(
            f"{group.__name__}: {', '.join(f'{figure.value:.2f}' for figure in found)}", flush=True
        )
    print()
    report(figures, "cpu.json")


def attending() -> list[Figure]:
    figures = [figure for n in (512, 2048, 4096) for figure in attending_to(n)]
    q, k, v = problem(2000)
    one = q[:, :, :1]
    decode = ratio(
        lambda: hw.attention(one, k, v, mask=hw.mask.causal()), lambda: sdpa(one, k, v), 500
    )
    short = problem(16)
    tiny = ratio(
        lambda: hw.attention(*short, mask=hw.mask.causal()),
        lambda: sdpa(*short, is_causal=True),
        500,
    )
    return [
        *figures,
        at_most("one query, 2000 keys, against SDPA", decode, 1.5),
        at_most("attention, n 16, causal, against SDPA", tiny, 2.0),
    ]


def attending_to(n: int) -> list[Figure]:
    q, k, v = problem(n)
    pairs = 200 if n == 512 else 30
    full = ratio(lambda: hw.attention(q, k, v), lambda: sdpa(q, k, v), pairs)
    causal = ratio(
        lambda: hw.attention(q, k, v, mask=hw.mask.causal()),
        lambda: sdpa(q, k, v, is_causal=True),
        pairs,
    )
    return [
        at_most(f"attention, n {n}, against SDPA", full, 1.05),
        at_most(f"attention, n {n}, causal, against SDPA", causal, 1.05),
    ]


def windows() -> list[Figure]:
    q, k, v = problem(8192)
    mask = hw.mask.causal() & hw.mask.window(256)
    dense = torch.ones(8192, 8192, dtype=torch.bool).tril().triu(-256)
    found = ratio(lambda: sdpa(q, k, v, dense), lambda: hw.attention(q, k, v, mask=mask))
    return [at_least("window 256, n 8192, SDPA with a dense mask against it", found, 12)]


def observing() -> list[Figure]:
    q, k, v = problem(4096)
    plain = ratio(lambda: hw.observe(q, k, v), lambda: sdpa(q, k, v))
    causal = ratio(
        lambda: hw.observe(q, k, v, mask=hw.mask.causal()), lambda: sdpa(q, k, v, is_causal=True)
    )
    weights = ratio(lambda: eager(q, k, v), lambda: hw.observe(q, k, v))
    short = problem(128, batch=32, heads=12)
    many = ratio(lambda: hw.observe(*short), lambda: sdpa(*short), 100)
    return [
        at_most("observe, every statistic, n 4096, against SDPA", plain, 2.0),
        at_most("observe, every statistic, n 4096, causal, against SDPA", causal, 2.0),
        at_least("eager weights and entropy, n 4096, against observe", weights, 3.5),
        at_most("observe, batch 32, 12 heads, n 128, against SDPA", many, 2.5),
    ]


def sampling() -> list[Figure]:
    q, k, v = problem(8192)
    found = ratio(lambda: hw.observe(q, k, v, rows=256), lambda: sdpa(q, k, v))
    return [at_most("observe, rows=256, n 8192, against SDPA", found, 1.15)]


def remembering() -> list[Figure]:
    """Measure memory in a separate process, which has its own peak."""
    command = [sys.executable, "-m", "bench.memory"]
    found = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return [at_most("observe, n 16384, memory beyond inputs and results", found, 64, "MiB")]


def differentiating() -> list[Figure]:
    q, k, v = problem(4096)
    grad = torch.randn_like(q)
    ours = backward(lambda *x: hw.attention(*x, engine="streaming"), (q, k, v), grad)
    found = ratio(ours, backward(sdpa, (q, k, v), grad))
    return [at_most("backward of streaming, n 4096, against SDPA's", found, 3.0)]


def mapping() -> list[Figure]:
    q, k, _ = problem(100_000, heads=1)
    lse = torch.full(q.shape[:-1], 12.0)  # any value: the work is the same
    amap = hw.attention_map(q, k, mask=hw.mask.causal(), lse=lse)
    last = amap.levels - 1
    tile = median_seconds(lambda: amap.tile(last, 100, 200), 200)
    q, k, v = problem(16_384, heads=1)
    lse = hw.observe(q, k, v, stats=("lse",))[1].lse
    known = ratio(lambda: hw.attention_map(q, k, lse=lse).pool(256), lambda: sdpa(q, k, v))
    unknown = ratio(lambda: hw.attention_map(q, k).pool(256), lambda: sdpa(q, k, v))
    return [
        at_most("a leaf tile of a 100,000-token map, lse known", tile * 1e3, 2, "ms"),
        at_most("pool(256), n 16384, lse known, against SDPA", known, 1.0),
        at_most("pool(256), n 16384, against SDPA", unknown, 2.0),
    ]


def problem(n: int, batch: int = 1, heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, batch, heads, n, WIDTH).unbind(0)
    return q, k, v


def eager(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The usual fallback: weights in memory, and the entropy from them."""
    weights = torch.softmax(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, -1)
    entropy = torch.special.entr(weights).sum(-1)
    return weights @ v, weights, entropy


def backward(
    attention: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor
) -> Callable[[], object]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attention(*leaves)
    return lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)


if __name__ == "__main__":
    main()
