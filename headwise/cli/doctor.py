"""What this machine can run, and what about it may hurt: facts only, nothing is printed here."""

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from headwise.engines import plan

PACKAGES = ("headwise", "torch", "triton", "numpy", "torchvision", "transformers")
"""Whose versions matter when something goes wrong."""


@dataclass(frozen=True)
class Device:
    """Something torch can compute on."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Trap:
    """A known way for this machine to go wrong, and the way out."""

    name: str
    what: str
    cure: str


@dataclass(frozen=True)
class Facts:
    """Everything `headwise doctor` reports.

    `versions` maps a package to its version, or None where it is not installed; `engines` maps
    an engine to None where it is usable, or to the reason why it is not.
    """

    versions: dict[str, str | None]
    devices: tuple[Device, ...]
    engines: dict[str, str | None]
    traps: tuple[Trap, ...]


def gather() -> Facts:
    """Look at this machine.

    >>> facts = gather()
    >>> facts.engines["reference"] is None
    True
    """
    versions = installed_versions()
    return Facts(
        versions=versions,
        devices=(cpu_device(), *gpu_devices()),
        engines=plan.engines(),
        traps=known_traps(
            flags=cpu_flags(),
            environ=os.environ,
            versions=versions,
            threads=torch.get_num_threads(),
            cores=usable_cores(),
            torchvision_error=import_error("torchvision") if versions["torchvision"] else None,
        ),
    )


def installed_versions() -> dict[str, str | None]:
    """Python's version and those of the packages that matter, None for what is missing."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # torch knows more than its metadata: the build (+cpu, +cu130) decides what it can do.
    versions["torch"] = torch.__version__
    return versions


def usable_cores() -> int:
    """How many cores this process may use, which can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_info() -> str:
    """The kernel's description of the CPU, empty where there is none to read."""
    file = Path("/proc/cpuinfo")
    return file.read_text(errors="replace") if file.exists() else ""


def cpu_flags() -> frozenset[str]:
    """The instruction sets the CPU advertises (Linux); whether they work is another matter."""
    for line in cpu_info().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_device() -> Device:
    """The CPU, its cores and the vector instructions torch uses on it."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in cpu_info().splitlines()
            if line.startswith("model name")
        ),
        platform.processor() or platform.machine(),
    )
    cores, threads = usable_cores(), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"cores: {cores}, torch threads: {threads}, vector instructions: {capability}"
    return Device(name=model, kind="cpu", detail=detail)


def gpu_devices() -> tuple[Device, ...]:
    """Every CUDA or Apple GPU that torch sees."""
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        detail = f"compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB"
        devices.append(Device(name=properties.name, kind=f"cuda:{index}", detail=detail))
    if torch.backends.mps.is_available():
        devices.append(Device(name="Apple GPU", kind="mps", detail="Metal"))
    return tuple(devices)


def import_error(module: str) -> str | None:
    """Why a module does not import, None where it does; asked of another process."""
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def known_traps(
    *,
    flags: frozenset[str],
    environ: Mapping[str, str],
    versions: Mapping[str, str | None],
    threads: int,
    cores: int,
    torchvision_error: str | None,
) -> tuple[Trap, ...]:
    """The traps a machine with these properties has.

    >>> traps = known_traps(flags=frozenset({"amx_bf16"}), environ={}, versions={},
    ...                     threads=4, cores=4, torchvision_error=None)
    >>> [trap.name for trap in traps]
    ['amx']
    """
    traps = []
    if "amx_bf16" in flags and "ONEDNN_MAX_CPU_ISA" not in environ:
        traps.append(
            Trap(
                name="amx",
                what="The CPU advertises AMX. Some virtual machines advertise it and then die "
                "with an illegal instruction in the first bf16 matrix product.",
                cure="If that happens: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
            )
        )
    if torchvision_error is not None:
        traps.append(
            Trap(
                name="torchvision",
                what="torchvision is installed but does not import beside this torch, and breaks "
                f"what imports it (transformers among others): {torchvision_error}",
                cure="pip uninstall torchvision, or install the build that matches torch",
            )
        )
    if release(versions.get("triton")) == (3, 6) and release(versions.get("numpy")) >= (2, 4):
        traps.append(
            Trap(
                name="triton-numpy",
                what="triton 3.6's interpreter (TRITON_INTERPRET=1) fails with numpy 2.4 and newer "
                "on a loop whose bound is known only at run time.",
                cure="pip install 'numpy<2.4', or a newer triton",
            )
        )
    if threads == 1 and cores > 1:
        traps.append(
            Trap(
                name="one-thread",
                what=f"torch uses one thread of {cores} cores, usually because OMP_NUM_THREADS "
                "is 1: the CPU engines run slower than they could.",
                cure="unset OMP_NUM_THREADS, or torch.set_num_threads(...)",
            )
        )
    return tuple(traps)


def release(version: str | None) -> tuple[int, int]:
    """The first two numbers of a version; zeros where there is none.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    if version is None:
        return (0, 0)
    major, minor, *_ = [*version.split("."), "0"]
    return (int(major), int(minor))
