"""Kernels that failed on this machine: remembered by the kind of call, and reported once.

A kernel may fail to compile or to launch: this version of Triton lacks a function, there is no C
compiler, the driver is too old. That is a reason to choose another engine, not the caller's error.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from headwise.bias import ALiBi, RelativeBuckets, parts_of
from headwise.core.problem import Problem, Terms

Kernels = Literal[
    "attention",
    "additive attention",
    "cached attention",
    "maps",
    "packed requests",
    "recorded statistics",
    "sparse attention",
    "an indexer's loss",
]


class KernelError(RuntimeError):
    """A kernel that did not compile or did not launch on this machine."""


class Family(NamedTuple):
    """Calls that fail together: those of one engine that compile much the same kernels."""

    engine: str
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    widths: tuple[int, ...]  # of the heads of queries and values, if it depends on them
    options: tuple[bool, ...]  # those that compile another version of a kernel, in use or not
    learns: bool  # gradients follow


class _Thread(threading.local):
    replans = False  # an eager call is under way, which plans again if its kernel fails


_FAILED: dict[Family, str] = {}
_UNUSABLE: dict[str, str] = {}  # by the engine whose modules could not be imported
_THREAD = _Thread()


def family(
    engine: str,
    kernels: Kernels,
    q: Tensor,
    v: Tensor,
    learns: bool,
    options: tuple[bool, ...] = (),
) -> Family:
    """Return the family of a call with these queries and values."""
    widths = int(q.shape[-1]), int(v.shape[-1])
    return Family(engine, kernels, q.device, q.dtype, widths, options, learns)


def family_of_terms(engine: str, q: Tensor, v: Tensor, terms: Terms, learns: bool) -> Family:
    """Return the family of an operator's call."""
    kernels: Kernels = "attention" if terms.additive is None else "additive attention"
    tensors = (terms.bias, terms.slopes, terms.relative, terms.dense, terms.sinks)
    numbers = (terms.softcap > 0, terms.dropout > 0)
    options = (*(x is not None for x in tensors), *numbers)
    return family(engine, kernels, q, v, learns, options)


def family_of_problem(engine: str, problem: Problem, learns: bool) -> Family:
    """Return the family of a call that is being planned: that of its operator's call."""
    kernels: Kernels = "attention" if problem.additive is None else "additive attention"
    (bias, added), mask = parts_of(problem.bias), problem.mask
    options = (
        added is not None,
        isinstance(bias, ALiBi),
        isinstance(bias, RelativeBuckets),
        mask is not None and mask.pieces == 0,
        problem.sinks is not None,
        problem.softcap > 0,
        problem.dropout > 0,
    )
    return family(engine, kernels, problem.q, problem.v, learns, options)


def record(failed: Family, error: Exception) -> None:
    """Remember that the kernels of a family failed; warn, unless the same was reported before."""
    cause = cause_of(error)
    known = {(each.engine, why) for each, why in _FAILED.items()}
    _FAILED[failed] = cause
    if (failed.engine, cause) not in known:
        dtype, widths = str(failed.dtype).removeprefix("torch."), dict.fromkeys(failed.widths)
        wide = " and ".join(str(width) for width in widths)
        heads = f" of {dtype} heads {wide} wide" if widths else ""
        _warn(failed.engine, f"can't serve {failed.kernels}{heads}", cause)


def record_unusable(engine: str, error: Exception) -> None:
    """Remember that an engine can't be loaded at all, and warn."""
    cause = cause_of(error)
    _UNUSABLE[engine] = f"it can't be loaded: {cause}"
    _warn(engine, "can't be loaded", cause)


def unusable(engine: str) -> str | None:
    """Return why an engine could not be loaded, or None if nothing is known against it."""
    return _UNUSABLE.get(engine)


def reason(family: Family) -> str | None:
    """Return why an engine can't serve the calls of a family, or None if none has failed."""
    cause = _FAILED.get(family)
    return None if cause is None else f"its kernels failed on this machine: {cause}"


def failed() -> dict[Family, str]:
    """Return what has failed in this process, with the causes.

    A compiled call is traced again when this changes.
    """
    return _FAILED


def forget() -> None:
    """Forget every failure, so that engines are tried again."""
    _FAILED.clear()
    _UNUSABLE.clear()


@contextmanager
def replanned() -> Iterator[None]:
    """Mark an eager call, which catches a KernelError and plans again.

    Elsewhere, in a compiled graph or a backward pass, operators must deal with failures themselves.
    """
    before, _THREAD.replans = _THREAD.replans, True
    try:
        yield
    finally:
        _THREAD.replans = before


def caller_replans() -> bool:
    """Return whether the caller catches a KernelError and plans again."""
    return _THREAD.replans


def cause_of(error: BaseException) -> str:
    """Return the innermost cause of an error in one line: compilers wrap it in their source."""
    if isinstance(error, KernelError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = f"{type(error).__name__}: {lines[-1]}" if lines else type(error).__name__
    return told if len(told) <= 300 else told[:297] + "..."


def failure(kernel: str, error: Exception) -> KernelError | None:
    """Return the failure of a kernel behind an error from its launch.

    None if the error should pass unchanged: memory ran out, or it is a KernelError already.
    """
    if isinstance(error, KernelError | torch.OutOfMemoryError) or "out of memory" in str(error):
        return None
    return KernelError(f"{kernel}: {cause_of(error)}")


def _warn(engine: str, what: str, cause: str) -> None:
    warnings.warn(
        f"headwise's {engine} engine {what} on this machine: {cause}. Other engines serve such "
        "calls; hw.explain and headwise doctor tell why",
        RuntimeWarning,
        stacklevel=2,
    )
