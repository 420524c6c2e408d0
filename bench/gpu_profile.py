"""The time of each kernel of a call on a GPU: `python -m bench.gpu_profile`.

Profiles the cells of `bench.gpu` that miss their targets, and the calls they are compared with.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import headwise as hw
from bench import described
from bench.gpu_decoding import CELLS
from bench.gpu_timing import Run, backward_of, normal, tensors

CALLS = 5  # calls of each, after two that compile


def kernels(run: Run) -> dict[str, float]:
    """Microseconds of each kernel of one call, longest first."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    found = {
        event.key: event.device_time_total / CALLS
        for event in seen.key_averages()
        if event.device_type == DeviceType.CUDA
    }
    return dict(sorted(found.items(), key=lambda x: -x[1]))


def runs() -> dict[str, Run]:
    """The calls by name."""
    made: dict[str, Run] = {}
    q, k, v = tensors(16384, 128)
    for name, mask in {"full": None, "causal": hw.mask.causal()}.items():
        for engine in ("hopper", "triton"):
            given = {"mask": mask, "engine": engine}
            made[f"{engine}, {name}"] = partial(hw.attention, q, k, v, **given)
            made[f"{engine}, {name}, every statistic"] = partial(hw.observe, q, k, v, **given)
    window = hw.mask.causal() & hw.mask.window(1023)  # of 1024 keys, as `gpu_fused.masked`
    for engine in ("hopper", "triton"):
        made[f"{engine}, window 1024"] = partial(hw.attention, q, k, v, mask=window, engine=engine)
    leaves = tensors(16384, 128, learn=True)
    for name, cap in {"backward": None, "backward, capped": 30.0}.items():
        forward = partial(hw.attention, *leaves, softcap=cap, engine="triton")
        made[name] = backward_of(forward, leaves)
    batch, heads, key_heads, keys = next(iter(CELLS.values()))
    step, cached = normal(batch, heads, 1, 128), normal(2, batch, key_heads, keys, 128)
    made["decode"] = partial(hw.attention, step, *cached)
    made["decode, PyTorch"] = partial(
        F.scaled_dot_product_attention, step, *cached, enable_gqa=True
    )
    return made


def main() -> None:
    """Print the kernels of every call."""
    described(__doc__).parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.gpu_profile needs an NVIDIA GPU, and PyTorch finds none here")
    for name, run in runs().items():
        print(name, flush=True)
        for kernel, took in kernels(run).items():
            print(f"  {took:9.1f} µs  {kernel[:70]}", flush=True)


if __name__ == "__main__":
    main()
