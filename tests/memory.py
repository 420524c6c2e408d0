"""The peak of PyTorch's CPU memory during a call, counted in bytes by its allocator."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that was allocated at once, beyond what was there before.

    What the call returns is kept until the end, and temporaries inside PyTorch's kernels count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = call()
    del kept
    events = seen.profiler.kineto_results.events()
    changes = sorted((x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
