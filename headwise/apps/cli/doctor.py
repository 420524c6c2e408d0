"""`headwise doctor`: what this machine can run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headwise import attention, attention_map, explain, observe
from headwise.devices import cpu_info, cpu_name, usable_cores
from headwise.engines import cause_of, engines, failed_kernels, forget_prepared_calls
from headwise.mask import causal

PACKAGES = ("headwise", "torch", "triton", "numpy", "torchvision", "transformers")
"""The packages whose versions matter when something goes wrong."""


@dataclass(frozen=True)
class Processor:
    """A device that torch can compute on."""

    name: str
    kind: str
    detail: str


@dataclass(frozen=True)
class Trap:
    """A known problem and its cure."""

    name: str
    what: str
    cure: str


@dataclass(frozen=True)
class Facts:
    """Everything `headwise doctor` reports.

    `versions` maps a package to its version, None if it is not installed; `engines` maps an engine
    to None if it is usable, otherwise to the reason why it is not.
    """

    versions: dict[str, str | None]
    devices: tuple[Processor, ...]
    engines: dict[str, str | None]
    traps: tuple[Trap, ...]


def gather() -> Facts:
    """Collect the facts.

    >>> facts = gather()
    >>> facts.engines["reference"] is None
    True
    """
    versions = installed_versions()
    return Facts(
        versions=versions,
        devices=(cpu_device(), *gpu_devices()),
        engines=tried_engines(),
        traps=kernel_traps()
        + known_traps(
            flags=cpu_flags(),
            environ=os.environ,
            versions=versions,
            threads=torch.get_num_threads(),
            cores=usable_cores(),
            torchvision_error=import_error("torchvision") if versions["torchvision"] else None,
        ),
    )


def tried_engines() -> dict[str, str | None]:
    """Every engine with the reason why it can't be used here, after a small call of each."""
    found = engines()
    forget_prepared_calls()  # so that each is planned and launched, not repeated
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in [name for name, reason in found.items() if reason is None]:
        found[name] = tried(name, device)
    return found


def tried(engine: str, device: torch.device) -> str | None:
    """The reason why an engine fails in a small call or its gradients; None if it works."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the doctor prints what a warning would
        try:
            shape = (3, 1, 2, 128, 64)
            q, k, v = torch.randn(shape, device=device, dtype=dtype).requires_grad_().unbind(0)
            if engine == "sdpa":  # PyTorch's kernels return no statistics
                out = attention(q, k, v, mask=causal(), engine=engine)
            else:
                out, _ = observe(q, k, v, mask=causal(), engine=engine)
            out.sum().backward()
            attention_map(q, k, mask=causal()).pool(8)
            planned = explain(q, k, v, mask=causal(), observed=engine != "sdpa")
        except Exception as error:  # whatever it is, the doctor goes on
            return f"a small call failed: {cause_of(error)}"
    return planned.reasons[engine]


def kernel_traps() -> tuple[Trap, ...]:
    """Kernels other than those of attention that failed in this process."""
    return tuple(
        Trap(
            name=family.engine,
            what=f"Its kernels for {family.kernels} failed on this machine: {cause}",
            cure="They are computed without those kernels, more slowly.",
        )
        for family, cause in failed_kernels().items()
        if family.kernels in ("maps", "cached attention")
    )


def installed_versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that matter, None for missing ones."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    # Unlike its metadata, torch names its build (+cpu, +cu130), which decides what it can do.
    versions["torch"] = torch.__version__
    return versions


def cpu_flags() -> frozenset[str]:
    """The instruction sets that the CPU advertises (Linux); not all of them need to work."""
    for line in cpu_info().splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def cpu_device() -> Processor:
    """The CPU, its cores and the vector instructions torch uses on it."""
    cores, threads = usable_cores(), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    detail = f"cores: {cores}, torch threads: {threads}, vector instructions: {capability}"
    return Processor(name=cpu_name(), kind="cpu", detail=detail)


def gpu_devices() -> tuple[Processor, ...]:
    """Every CUDA or Apple GPU that torch sees."""
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        detail = f"compute capability {properties.major}.{properties.minor}, {memory:.0f} GiB"
        devices.append(Processor(name=properties.name, kind=f"cuda:{index}", detail=detail))
    if torch.backends.mps.is_available():
        devices.append(Processor(name="Apple GPU", kind="mps", detail="Metal"))
    return tuple(devices)


def import_error(module: str) -> str | None:
    """The reason why a module can't be imported, None if it can; tried in another process."""
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
    """The known problems of a machine with these properties.

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
                what="The CPU advertises AMX. Some virtual machines advertise it but crash with an "
                "illegal instruction in the first bf16 matrix product.",
                cure="If that happens: export ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16",
            )
        )
    if torchvision_error is not None:
        traps.append(
            Trap(
                name="torchvision",
                what="torchvision is installed but can't be imported with this torch, which breaks "
                f"packages that import it, such as transformers: {torchvision_error}",
                cure="pip uninstall torchvision, or install the build that matches torch",
            )
        )
    if release(versions.get("triton")) == (3, 6) and release(versions.get("numpy")) >= (2, 4):
        traps.append(
            Trap(
                name="triton-numpy",
                what="triton 3.6's interpreter (TRITON_INTERPRET=1) fails with numpy 2.4 and newer "
                "on loops whose bounds are known only at run time.",
                cure="pip install 'numpy<2.4', or a newer triton",
            )
        )
    if threads == 1 and cores > 1:
        traps.append(
            Trap(
                name="one-thread",
                what=f"torch uses one thread on {cores} cores, usually because OMP_NUM_THREADS "
                "is 1: the CPU engines are slower than they could be.",
                cure="unset OMP_NUM_THREADS, or torch.set_num_threads(...)",
            )
        )
    return tuple(traps)


def release(version: str | None) -> tuple[int, int]:
    """The first two numbers of a version; zeros if there is none.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    if version is None:
        return (0, 0)
    major, minor, *_ = [*version.split("."), "0"]
    return (int(major), int(minor))


app = typer.Typer()


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Measure the GPU kernels' block shapes and keep the fastest."),
    ] = False,
    warm: Annotated[
        bool,
        typer.Option("--warm", help="Compile the GPU kernels of common calls, which are kept."),
    ] = False,
) -> None:
    """Check this machine: versions, devices, engines, and known problems with their cures.

    [b]Examples[/b]

    headwise doctor

    headwise doctor --json > machine.json

    headwise doctor --tune

    headwise doctor --warm
    """
    if tune:
        tune_kernels(as_json)
    if warm:
        warm_kernels(as_json)
    if tune or warm:
        return
    facts = gather()
    if as_json:
        print_json(dataclasses.asdict(facts))
        return
    console = Console()
    section(console, "versions")
    for package, version in facts.versions.items():
        item(console, package, version or "not installed", "" if version else "dim")
    section(console, "devices")
    for device in facts.devices:
        item(console, device.kind, device.name, "", device.detail)
    section(console, "engines")
    for engine, reason in facts.engines.items():
        item(console, engine, reason or "ready", "yellow" if reason else "green")
    section(console, "known problems of this machine")
    for trap in facts.traps:
        item(console, trap.name, trap.what, "yellow", trap.cure)
    if not facts.traps:
        item(console, "none", "no known problem", "green")


def need_gpu(option: str) -> None:
    """Raise SystemExit if the kernels of a GPU can't run here."""
    reason = engines()["triton"] if torch.cuda.is_available() else "there is none here"
    if reason is not None:
        raise SystemExit(f"headwise doctor {option} needs an NVIDIA GPU: {reason}")


def warm_kernels(as_json: bool) -> None:
    """Compile the kernels of common calls, and say what is done."""
    need_gpu("--warm")
    from headwise.apps.cli import warming

    if as_json:
        print_json([dataclasses.asdict(one) for one in warming.warm()])
        return
    console, start, count = Console(), time.monotonic(), len(warming.kinds())
    section(console, f"kernels of common calls on {torch.cuda.get_device_name()}")
    for number, one in enumerate(warming.warm(), 1):
        said = f"{one.seconds:.1f} s" if one.error is None else one.error
        item(console, f"{number}/{count}", one.calls, "" if one.error is None else "yellow", said)
    seconds = time.monotonic() - start
    item(console, "done", f"in {seconds:.0f} s; Triton keeps what it compiled on disk", "green")


def tune_kernels(as_json: bool) -> None:
    """Measure the block shapes of each kernel, print the gains, and keep the fastest."""
    need_gpu("--tune")
    from headwise.engines.triton import tuning

    console, device = Console(), torch.device("cuda", torch.cuda.current_device())
    if as_json:
        tuned = list(tuning.tune(device))
        kept = str(tuning.keep(device, tuned))
        print_json({"kernels": [dataclasses.asdict(x) for x in tuned], "kept_in": kept})
        return
    section(console, f"block shapes on {torch.cuda.get_device_name(device)}")
    found = []
    for x in tuning.tune(device):
        tile = (
            f"{x.chosen.rows} x {x.chosen.keys}, {x.chosen.warps} warps, {x.chosen.stages} stages"
        )
        gain = f"{tile}: {x.usual / x.best:.2f} times as fast as the usual shape"
        item(console, f"{x.kernel} {x.width}", gain, "")
        found.append(x)
    item(console, "kept in", str(tuning.keep(device, found)), "green")


def section(console: Console, title: str) -> None:
    """Print the title of a list."""
    console.print(Text(f"\n{title}", style="bold"))


def item(console: Console, name: str, value: str, style: str, more: str = "") -> None:
    """Print a name and its value in columns that line up across lists."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=14, style="cyan")
    grid.add_column(overflow="fold")
    # Text, not str: "pip install 'headwise[triton]'" is not markup.
    grid.add_row(Text(f"  {name}"), Text(value, style=style))
    if more:
        grid.add_row("", Text(more, style="dim"))
    console.print(grid)


def print_json(value: object) -> None:
    """Print JSON, the same on a terminal and in a pipe."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
