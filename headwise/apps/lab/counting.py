"""Counts and times of a call: operations, bytes kept for the backward pass, fewest seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headwise.apps.lab.laboratory import CPU

FINE = time.get_clock_info("thread_time").resolution < 1e-6
"""True if the clock of a thread can time a call."""


def parameters(module: nn.Module) -> int:
    """The number of parameters of a module.

    >>> parameters(nn.Linear(3, 4))
    16
    """
    return sum(parameter.numel() for parameter in module.parameters())


def flops(call: Callable[[], object]) -> int:
    """The operations of a forward pass, two per multiply-add; on the meta device it takes no time.

    >>> a = torch.empty(4, 8, device="meta")
    >>> flops(lambda: a @ a.T)
    256
    """
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def kept_bytes(call: Callable[[], object], leave_out: Sequence[Tensor] = ()) -> int:
    """The bytes that autograd keeps between forward and backward, each storage counted once.

    `leave_out` are tensors that are there anyway, such as parameters.
    """
    kept: dict[int, int] = {}
    known = {x.untyped_storage()._cdata for x in leave_out}

    def note(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in known:
            kept[storage._cdata] = storage.nbytes()
            alive.append(x)  # so that no later storage takes its address
        return x

    alive: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        call()
    return sum(kept.values())


def in_turns(
    calls: Sequence[Callable[[], object]], repeats: int = 5, device: torch.device = CPU
) -> list[float]:
    """The fewest seconds of each call, measured in turns to be fair.

    On a CPU it is the time of one thread, which other programs hardly change; on a GPU that of the
    clock on the wall, from an idle device to an idle device.
    """
    on_gpu = device.type == "cuda"
    clock = time.perf_counter if on_gpu or not FINE else time.thread_time
    taken: list[list[float]] = [[] for _ in calls]
    with torch.no_grad(), one_thread():
        for call in calls:
            call()  # the first one pays for preparation
        for _ in range(repeats):
            for call, seconds in zip(calls, taken, strict=True):
                if on_gpu:
                    torch.cuda.synchronize(device)
                start = clock()
                call()
                if on_gpu:
                    torch.cuda.synchronize(device)
                seconds.append(clock() - start)
    return [max(min(seconds), 1e-9) for seconds in taken]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
