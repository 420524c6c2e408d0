"""The contract of an engine: one way to compute attention, exactly or not at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from headwise.core.problem import Problem
from headwise.core.row_sums import RowResults

Results = tuple[Tensor, ...]  # out (B, Hq, N, Dv), then the requested statistics, (B, Hq, N) each
Prepared = Callable[..., Results]
"""A call that is ready to run: it takes the tensors of any call of the same description, which are
q, k, v, then the sinks and the mask's tensors, if it has any."""


class Engine(Protocol):
    """One way to compute attention. Engines are stateless objects; `plan.ENGINES` lists them."""

    name: str
    rank: int  # its place in the order in which "auto" asks engines, lowest first
    devices: tuple[str, ...] = ()  # the types of device on which "auto" may choose it; () for all
    forward_mode: bool = False  # it has forward-mode derivatives, and second ones
    functional: bool = False  # torch.func.grad can differentiate it
    partial: bool = False  # `run` computes any part of the keys

    def absent(self, device: torch.device) -> str | None:
        """Return why this engine can't run on a device at all, or None if it can."""
        return None

    def refuses(self, problem: Problem, observed: bool) -> str | None:
        """Return why this engine can't serve a problem exactly, or None if it can."""
        return None

    def priority(self, problem: Problem) -> int:
        """Return its rank for this problem, which may be better or worse than usual."""
        return self.rank

    def attend(self, problem: Problem) -> Tensor:
        """Return out (B, Hq, N, Dv)."""
        ...

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return out (B, Hq, N, Dv) and the named statistics, (B, Hq, N) each."""
        ...

    def run(self, problem: Problem, wants: int) -> RowResults:
        """Return the output and the results that `wants` names, if the engine is `partial`."""
        raise ValueError(f"the {self.name} engine computes whole calls only")

    def backward(self, problem: Problem) -> str:
        """Return in words what computes the gradients of a problem, and why."""
        ...

    def first(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int, tensors: tuple[Tensor, ...]
    ) -> tuple[Results, Prepared | None]:
        """Compute the first call of a description, whose tensors these are.

        Returns its results, and a call for those that follow; None if preparing one saves nothing,
        or if they depend on more than their description. No names mean attention alone.
        """
        return compute(self, problem, names, sink_keys), None


def compute(engine: Engine, problem: Problem, names: tuple[str, ...], sink_keys: int) -> Results:
    """Return out and the named statistics in their order."""
    if not names:
        return (engine.attend(problem),)
    out, values = engine.observe(problem, names, sink_keys)
    return (out, *(values[name] for name in names))
