"""Processes that stay alive for many cases: starting one costs seconds, a case milliseconds."""

from __future__ import annotations

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

SECONDS = 60  # the process group's timeout; a case that should fail sooner has a group of its own


def serve(rank: int, count: int, meeting: str, seconds: float, pipe: Connection) -> None:
    """Run cases, each (function, size of the mesh, arguments), until there is None."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=count,
        timeout=timedelta(seconds=seconds),
    )  # fmt: skip
    meshes = {size: DeviceMesh("cpu", list(range(size))) for size in range(1, count + 1)}
    pipe.send_bytes(b"ready")
    while True:
        try:
            case = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        if case is None:
            break
        function, size, arguments = case
        try:
            answer = True, function(meshes[size], *arguments)
        except Exception as error:
            answer = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)  # at once: tearing an interpreter and its sockets down takes seconds


class Processes:
    """A group of processes on gloo, over the loopback interface."""

    def __init__(self, count: int, seconds: float = SECONDS) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        meeting = str(Path(self.folder.name) / "meeting")
        ends = [context.Pipe() for _ in range(count)]
        self.pipes = [ours for ours, _ in ends]
        self.members = [
            context.Process(target=serve, args=(rank, count, meeting, seconds, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(ends)
        ]
        for member in self.members:
            member.start()
        for _, theirs in ends:
            theirs.close()
        for pipe in self.pipes:
            assert pipe.recv_bytes() == b"ready"

    def run(self, function: Callable[..., Any], size: int, *arguments: object) -> list[Any]:
        """Run a function on the first `size` ranks and return its results; raise what it raises."""
        found = self.attempt(function, size, *arguments)
        for rank, (fine, value) in enumerate(found):
            assert fine, f"rank {rank}: {value}"
        return [value for _, value in found]

    def attempt(
        self, function: Callable[..., Any], size: int, *arguments: object
    ) -> list[tuple[bool, Any]]:
        """(True, value) or (False, error) of each of the first `size` ranks."""
        case = pickle.dumps((function, size, arguments))
        for pipe in self.pipes[:size]:
            pipe.send_bytes(case)
        found = []
        for pipe in self.pipes[:size]:
            wait([pipe], timeout=2 * SECONDS)
            try:
                found.append(pickle.loads(pipe.recv_bytes()))
            except EOFError:
                found.append((False, "the process ended"))
        return found

    def close(self) -> None:
        for pipe in self.pipes:
            with suppress(OSError):  # its process ended
                pipe.send_bytes(pickle.dumps(None))  # forked ranks hold the pipes of others open
            pipe.close()
        for member in self.members:
            member.join(timeout=10)
            if member.is_alive():
                member.kill()
        self.folder.cleanup()
