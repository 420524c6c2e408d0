"""The plan of a call: which engine serves it, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import TransformType
from torch.autograd import forward_ad

from headwise.core.problem import Problem
from headwise.engines import failures
from headwise.engines.calls import learns
from headwise.engines.contract import Engine
from headwise.engines.failures import Family
from headwise.engines.reference import REFERENCE
from headwise.engines.sdpa import SDPA
from headwise.engines.streaming.engine import STREAMING
from headwise.engines.triton.engine import TRITON
from headwise.engines.triton.hopper import HOPPER

ENGINES: tuple[Engine, ...] = (HOPPER, TRITON, SDPA, STREAMING, REFERENCE)
"""The engines; "auto" asks them in the order of their ranks."""

NAMES = tuple(engine.name for engine in ENGINES)


@dataclass(frozen=True)
class Plan:
    """The engine that serves a call, and each engine's reason not to (None if it could)."""

    engine: str
    reasons: dict[str, str | None]
    requested: bool = False  # by its name
    backward: str | None = None  # what computes the gradients, and why; None if there are none

    def __str__(self) -> str:
        lines, why = [], "was requested" if self.requested else "is preferred"
        for name, reason in self.reasons.items():
            chosen = name == self.engine
            note = "chosen" if chosen else reason or f"could, but {self.engine} {why}"
            lines.append(f"{'→' if chosen else ' '} {name:<10} {note}")
        if self.backward is not None:
            lines.append(f"← backward   {self.backward}")
        return "\n".join(lines)


def choose(problem: Problem, engine: str = "auto", observed: bool = False) -> Engine:
    """Return the engine that serves a problem; ValueError if the requested one can't."""
    if engine == "auto":
        return _best(problem, observed)
    check_engine(engine)
    chosen = ENGINES[NAMES.index(engine)]
    reason = refusal(chosen, problem, observed)
    if reason is not None:
        raise ValueError(
            f"engine={engine!r} can't serve this call: {reason}. engine='auto' picks one that can"
        )
    return chosen


def choose_partial(problem: Problem, engine: str = "auto") -> Engine:
    """Return the engine that computes a part of a problem's keys; ValueError if it can't."""
    able = [each for each in ENGINES if each.partial]
    if engine == "auto":
        here = (each for each in able if not each.devices or problem.q.device.type in each.devices)
        for each in here:
            reason = refusal(each, problem, True)
            if reason is None:
                return each
        raise ValueError(
            f"no engine can compute a part of this call's keys: {each.name} can't, because "
            f"{reason}. hw.attention and hw.observe, of all keys, have engines that can"
        )
    chosen = choose(problem, engine, True)
    if not chosen.partial:
        names = " and ".join(repr(each.name) for each in able)
        raise ValueError(
            f"engine={engine!r} computes whole calls only; {names} compute parts of the keys"
        )
    return chosen


def check_engine(engine: object) -> None:
    """Raise ValueError unless `engine` is "auto" or the name of an engine."""
    if not isinstance(engine, str) or engine not in ("auto", *NAMES):
        raise ValueError(
            f"engine={engine!r} is unknown; choose 'auto' or one of {', '.join(map(repr, NAMES))}"
        )


def plan(problem: Problem, engine: str = "auto", observed: bool = False) -> Plan:
    """Return the choice with every engine's reasons; ValueError if the requested one can't."""
    chosen = choose(problem, engine, observed)
    reasons = {each.name: refusal(each, problem, observed) for each in ENGINES}
    backward = chosen.backward(problem) if _learns(problem) else None
    return Plan(chosen.name, reasons, requested=engine != "auto", backward=backward)


def _learns(problem: Problem) -> bool:
    """Return whether gradients follow a call."""
    terms = problem.terms()
    tensors = (problem.q, problem.k, problem.v, *(x for x in terms if isinstance(x, Tensor)))
    return learns(tensors)


def _best(problem: Problem, observed: bool) -> Engine:
    """Return the engine with the lowest priority number that can serve the problem."""
    best, lowest = None, 0
    for engine in ENGINES:
        if engine.devices and problem.q.device.type not in engine.devices:
            continue
        priority = engine.priority(problem)
        if best is not None and priority > lowest:
            continue
        if refusal(engine, problem, observed) is None:
            best, lowest = engine, priority
    assert best is not None  # `reference` serves everything
    return best


def refusal(engine: Engine, problem: Problem, observed: bool) -> str | None:
    """Return why an engine can't serve the problem, or None if it can."""
    missing = engine.absent(problem.q.device)
    if missing is not None:
        return missing
    return _transformed(engine) or engine.refuses(problem, observed) or _failed(engine, problem)


def _failed(engine: Engine, problem: Problem) -> str | None:
    """Return why an engine's kernels can't serve the problem, if they failed before."""
    return failures.reason(family(engine, problem)) if failures.failed() else None


def family(engine: Engine, problem: Problem) -> Family:
    """Return the calls of an engine that would fail together with this one."""
    given = (problem.q, problem.k, problem.v, problem.additive, problem.sinks)
    learning = learns(tuple(x for x in given if x is not None))
    return failures.family_of_problem(engine.name, problem, learning)


def _transformed(engine: Engine) -> str | None:
    """Return why an engine can't serve inside an active derivative transform, or None if it can.

    Without this check, forward mode would silently lose the tangents.
    """
    if torch.compiler.is_compiling():
        return None
    if not engine.forward_mode and forward_ad._current_level >= 0:
        return "it has no forward-mode derivative"
    if torch._C._are_functorch_transforms_active():
        stack = torch._C._functorch.get_interpreter_stack()
        times = sum(transform.key() == TransformType.Grad for transform in stack)
        if times and not engine.functional:
            return "torch.func.grad does not support custom operators"
        if times > 1 and not engine.forward_mode:
            return "it has no second derivative"
    return None


def engines() -> dict[str, str | None]:
    """Return every engine's name and, if it can't run on this machine at all, the reason."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {engine.name: engine.absent(device) for engine in ENGINES}
