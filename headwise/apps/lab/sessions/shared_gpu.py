"""NVIDIA's multi-process service: kernels of several processes on one GPU at the same time.

Without it a GPU works for one process after the other, which is slow where each has small kernels.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

CONTROL = "nvidia-cuda-mps-control"
PATIENCE = 25.0
"""Seconds that the service may take to answer."""


@contextmanager
def sharing(device: torch.device) -> Iterator[Mapping[str, str]]:
    """Start the service, if it is there and works; the environment that processes need to use it.

    The environment is empty if they have to do without.

    >>> with sharing(torch.device("cpu")) as environment:
    ...     print(environment)
    {}
    """
    control = shutil.which(CONTROL)
    if device.type != "cuda" or control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        started = _succeeds([control, "-d"], environment)
        probe = "import torch; torch.ones(8, device='cuda').sum().item()"
        works = started and _succeeds([sys.executable, "-c", probe], environment)
        try:
            yield environment if works else {}
        finally:
            if started:
                _succeeds([control], environment, "quit -t 5\n")


def _succeeds(command: list[str], environment: Mapping[str, str], said: str = "") -> bool:
    try:
        done = subprocess.run(
            command,
            input=said.encode(),
            env={**os.environ, **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
