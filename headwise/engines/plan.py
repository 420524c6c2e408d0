"""Which engine serves a problem, and why not the others."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType

import torch
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from headwise.core.problem import Problem
from headwise.engines import reference, sdpa
from headwise.engines.streaming import engine as streaming

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # compilers can't follow the question
ENGINES = ("hopper", "triton", "sdpa", "streaming", "reference")  # the first that can, as a rule
HOPPER = 9  # the generation of these GPUs
LONG = 4096  # rows and keys from which Hopper's forward is ahead of cuDNN's (docs/gpu.md)
KERNELS = ("hopper", "triton")  # written for GPUs; the second runs on Triton's interpreter too


@dataclass(frozen=True)
class Plan:
    """The engine that serves a call, and each engine's reason not to (None: it could)."""

    engine: str
    reasons: dict[str, str | None]
    asked: bool = False  # for this engine, by its name

    def __str__(self) -> str:
        lines, why = [], "was asked for" if self.asked else "is preferred"
        for name, reason in self.reasons.items():
            chosen = name == self.engine
            said = "chosen" if chosen else reason or f"could, but {self.engine} {why}"
            lines.append(f"{'→' if chosen else ' '} {name:<10} {said}")
        return "\n".join(lines)


def choose(problem: Problem, engine: str = "auto", observed: bool = False) -> ModuleType:
    """The engine's module: the first that can, or the one asked for; ValueError where it can't."""
    if engine == "auto":
        return _module(_first(problem, observed))
    if engine not in ENGINES:
        raise ValueError(
            f"engine={engine!r} is unknown; there are 'auto', {', '.join(map(repr, ENGINES))}"
        )
    reason = refusal(engine, problem, observed)
    if reason is not None:
        raise ValueError(
            f"engine={engine!r} can't serve this call: {reason}. engine='auto' picks one that can"
        )
    return _module(engine)


def plan(problem: Problem, engine: str = "auto", observed: bool = False) -> Plan:
    """The choice with every engine's reasons; ValueError where the one asked for can't."""
    if engine != "auto":
        choose(problem, engine, observed)
    reasons = {name: refusal(name, problem, observed) for name in ENGINES}
    if engine != "auto":
        return Plan(engine, reasons, asked=True)
    return Plan(_first(problem, observed), reasons)


def _first(problem: Problem, observed: bool) -> str:
    """The first engine that can, in the order of speed.

    PyTorch's own kernels are the fastest where they need no mask tensor, cuDNN's on Hopper; but not
    where few queries meet many keys, and not where Hopper's own forward leads. Triton's
    interpreter serves whom asks for it, and nobody else.
    """
    q, k = problem.q, problem.k
    decoding = q.is_cuda and q.shape[2] <= 16 and k.shape[2] >= 1024
    order: tuple[str, ...] = ENGINES
    if sdpa.maskless(problem) and not decoding:
        order = ("hopper", "sdpa", *ENGINES) if _ahead(problem) else ("sdpa", *ENGINES)
    interpreted = q.device.type == "cpu"
    able = (name for name in order if not (name in KERNELS and interpreted))
    return next(name for name in able if refusal(name, problem, observed) is None)


def _ahead(problem: Problem) -> bool:
    """Whether the hopper engine, if it can, is the one to ask: not where gradients follow."""
    q, k = problem.q, problem.k
    learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, problem.v))
    return q.is_cuda and not learning and min(q.shape[2], k.shape[2]) >= LONG and q.shape[-1] > 64


def refusal(name: str, problem: Problem, observed: bool) -> str | None:
    """Why an engine can't serve the problem; None: it can."""
    if name in KERNELS:
        missing = _missing(name, problem.q.device)
        if missing is not None:
            return missing
    reason: str | None = _transformed(name) or _module(name).refuses(problem, observed)
    return reason


def _transformed(name: str) -> str | None:
    """Why an engine can't serve inside a derivative of PyTorch's that its kernels do not know.

    Forward mode would lose the tangents without a word; `reference` is plain PyTorch and can.
    """
    if name == "reference" or torch.compiler.is_compiling():
        return None
    if forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    if name != "sdpa" and torch._C._are_functorch_transforms_active():
        stack = torch._C._functorch.get_interpreter_stack()
        if any(transform.key() == TransformType.Grad for transform in stack):
            return "torch.func.grad takes no custom operators"
    return None


def engines() -> dict[str, str | None]:
    """Every engine's name and, where it can't run on this machine at all, the reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {name: _missing(name, device) if name in KERNELS else None for name in ENGINES}


def _missing(name: str, device: torch.device) -> str | None:
    """Why an engine of the KERNELS can't run on a device at all; None: it can."""
    needs = "it needs an NVIDIA Hopper GPU, such as an H100 or H200"
    if name == "hopper" and (device.type != "cuda" or torch.version.hip is not None):
        return needs
    missing = triton_missing(device.type)
    if missing is None and name == "hopper":
        from headwise.engines.triton.host.cards import (
            card,
        )  # the engine itself loads for such a GPU only

        found = card(device)
        return None if found.major == HOPPER else f"{needs}, and this is {found.name}"
    return missing


def triton_missing(device: str) -> str | None:
    """Why engines written for Triton can't run on a kind of device at all; None: they can."""
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return "it needs an NVIDIA GPU (or TRITON_INTERPRET=1, to test on a CPU)"
    if not _HAS_TRITON:
        return "Triton is not installed: pip install 'headwise[triton]'"
    return None


def interpreting() -> bool:
    """Whether Triton's interpreter runs kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _module(name: str) -> ModuleType:
    if name == "triton":
        from headwise.engines import triton  # optional; a statement, which torch.compile can follow

        return triton
    if name == "hopper":
        from headwise.engines.triton import hopper

        return hopper
    return {"sdpa": sdpa, "streaming": streaming, "reference": reference}[name]
