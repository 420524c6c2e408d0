"""Joining the processes that torchrun has started, and naming the one that fails."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from headwise import devices
from headwise.apps.train.ranks import ALONE, TrainingRanks
from headwise.distributed import RankError

TIMEOUT = timedelta(minutes=30)
"""The longest that a rank waits for another: the first may have to fetch and read the data."""

ANSWER = 5.0
"""Seconds in which a rank whose exchange has failed hears from those that still live."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """True in a process that torchrun, or another launcher that sets its variables, started."""
    return all(name in os.environ for name in VARIABLES)


def own_device(name: str | None) -> torch.device:
    """This process's device: the GPU of its number on this machine, or what `name` says."""
    if not launched() or name not in (None, "cuda") or not torch.cuda.is_available():
        return devices.chosen(name)
    number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= there:
        raise ValueError(
            f"process {number} of this machine has no GPU of its own: there are {there}; use "
            f"torchrun --nproc-per-node {there}, or --device cpu"
        )
    return torch.device("cuda", number)


@contextmanager
def joined(
    device: torch.device, *, context: int = 1, sharded: bool = False
) -> Iterator[TrainingRanks]:
    """Join the other processes of torchrun until the block ends; `ALONE` without torchrun.

    If a process fails, every other one that still lives raises a RankError that names it.
    """
    if not launched():
        if context > 1 or sharded:
            raise ValueError(
                "to split texts or to shard parameters takes several processes; start them with "
                "torchrun --nproc-per-node 2 -m headwise train …"
            )
        yield ALONE
        return
    store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = PrefixStore("groups", store)
    dist.init_process_group(store=groups, rank=rank, world_size=count, timeout=TIMEOUT)
    try:
        with naming_failures(PrefixStore("accounts", store), rank, count):
            mesh = init_device_mesh(device.type, (count,))
            yield TrainingRanks.over(mesh, context=context, sharded=sharded)
    except BaseException:
        if device.type == "cpu":  # NCCL would wait for the others here
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


@contextmanager
def naming_failures(store: Store, rank: int, count: int) -> Iterator[None]:
    """Let an error that ends the block be known to all ranks, and raise one that names its rank."""
    try:
        yield
    except Exception as error:
        lost = isinstance(error, RankError | dist.DistError) or "gloo" in str(error)
        store.set(str(rank), "" if lost else f"{type(error).__name__}: {error}")
        if not lost:
            raise
        raise RankError(_blamed(store, rank, count) or str(error)) from error


def _blamed(store: Store, rank: int, count: int) -> str:
    """A sentence that names the rank that failed, or those that ended without a word, or ""."""
    others = [other for other in range(count) if other != rank]
    silent, until = others, time.monotonic() + ANSWER
    while True:
        silent = [other for other in silent if not store.check([str(other)])]
        for other in others:
            if other not in silent and (said := store.get(str(other)).decode()):
                return f"rank {other} of {count} failed: {said}"
        if not silent or time.monotonic() > until:
            break
        time.sleep(0.1)
    if not silent:  # all live, and none knows more
        return ""
    names = " and ".join(str(other) for other in silent)
    return f"rank {names} of {count} ended without a word; was it killed, or out of memory?"
