"""The engine that takes over when kernels fail and nobody can plan the call again.

That is so in a compiled graph and in a backward pass: their engine was chosen before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from headwise.core.problem import Terms
from headwise.engines import failures
from headwise.engines.failures import KernelError, family_of_terms

SAFE = "streaming"
_FORWARDS: dict[str, Callable[..., Any]] = {}  # by engine
_BACKWARDS: dict[str, Callable[..., Any]] = {}


def safe_forward(engine: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's forward `run`, whose calls the SAFE engine computes if its kernels fail.

    If they do, calls with gradients and without are planned for another engine from then on.
    """
    _FORWARDS[engine] = run
    return _or_safe(engine, run, _FORWARDS, (False, True))


def safe_backward(engine: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return an engine's backward `run`, whose calls the SAFE engine computes if its kernels fail.

    If they do, calls with gradients are planned for another engine from then on.
    """
    _BACKWARDS[engine] = run
    return _or_safe(engine, run, _BACKWARDS, (True,))


def _or_safe(
    engine: str,
    run: Callable[..., Any],
    safe: dict[str, Callable[..., Any]],
    learns: tuple[bool, ...],
) -> Callable[..., Any]:
    """`learns`: the calls that fail with one, those without gradients (False) and with (True)."""

    def call(q: Tensor, k: Tensor, v: Tensor, terms: Terms, *rest: Any) -> Any:
        calls = [family_of_terms(engine, q, v, terms, each) for each in learns]
        if failures.caller_replans() or failures.reason(calls[0]) is None:
            try:
                return run(q, k, v, terms, *rest)
            except KernelError as failure:
                if failures.caller_replans():
                    raise
                for each in calls:
                    failures.record(each, failure)
        terms = terms.without_band(q.shape[2], k.shape[2])
        return safe[SAFE](q, k, v, terms, *rest)

    return call
