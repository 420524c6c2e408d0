"""The Triton engine: one fused forward and backward for NVIDIA GPUs since Ampere."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from headwise.core.problem import Problem, Terms
from headwise.core.row_sums import LOG_TOTAL, RowResults
from headwise.core.statistics import wanted
from headwise.engines import calls, failures, library_backward
from headwise.engines.contract import Engine, Prepared, Results
from headwise.engines.triton.limits import (
    GRID,
    LIBRARY_ON,
    OLDEST,
    WIDEST,
    WIDEST_ADDITIVE,
    fits_grid,
    interpreting,
)

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch.compile can't trace this


class Triton(Engine):
    """The engine of `kernels`. Only `host` imports Triton, and is loaded when a call needs it."""

    name = "triton"
    rank = 3
    devices = ("cuda",)  # the interpreter serves only callers that ask for it by name
    partial = True

    def absent(self, device: torch.device) -> str | None:
        if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
            return "it needs an NVIDIA GPU (or TRITON_INTERPRET=1, to test on a CPU)"
        if not _HAS_TRITON:
            return "Triton is not installed: pip install 'headwise[triton]'"
        if torch.version.hip is not None:
            return "its kernels are written for NVIDIA GPUs"
        broken = self._loaded()
        if broken is not None:
            return broken
        found = self._host().card(device)
        if found.major < OLDEST:
            return f"it needs an Ampere GPU or a later one, and this is {found.name}"
        return None

    def _loaded(self) -> str | None:
        """Return why the modules with the kernels can't be imported, or None if they are."""
        if failures.unusable(self.name) is None:
            try:
                _ = self._run
            except Exception as error:  # whatever an unknown version of Triton raises
                failures.record_unusable(self.name, error)
        return failures.unusable(self.name)

    def refuses(self, problem: Problem, observed: bool) -> str | None:
        q, v = problem.q, problem.v
        if problem.additive is not None:
            if problem.bias is not None:
                return "its additive kernels take no bias"
            if max(q.shape[-1], v.shape[-1]) > WIDEST_ADDITIVE:
                return f"its additive kernels take head widths of 1 to {WIDEST_ADDITIVE}"
        if q.dtype == torch.float64:
            return "it computes in float32, so float64 would lose precision"
        if not 1 <= q.shape[-1] <= WIDEST or v.shape[-1] > WIDEST:
            return f"heads are {q.shape[-1]} and {v.shape[-1]} wide; it takes 1 to {WIDEST}"
        if not fits_grid(q.shape):
            return f"a GPU's grid has room for {GRID} heads and batch entries each; split the batch"
        if problem.k.shape[2] == 0:
            return "there are no keys, so there is nothing to compute"
        return None

    def attend(self, problem: Problem) -> Tensor:
        return self.run(problem, 0).out

    def observe(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        terms = problem.terms(banded=True)
        rows = self._rows(problem, terms, wanted(names))
        return rows.out, self._host().complete(problem, terms, rows, names, sink_keys)

    def run(self, problem: Problem, wants: int) -> RowResults:
        return self._rows(problem, problem.terms(banded=True), wants)

    def _rows(self, problem: Problem, terms: Terms, wants: int) -> RowResults:
        tensors = (problem.q, problem.k, problem.v)
        if calls.learns((*tensors, *terms)):  # the rounding of lse would show in the weights
            wants |= LOG_TOTAL
        found: RowResults = self._forward(*tensors, *terms, wants)
        return found

    def backward(self, problem: Problem) -> str:
        q, k, v = problem.q, problem.k, problem.v
        terms, host = problem.terms(banded=True), self._host()
        own = "hopper" if host.serves(q, k, v, terms, q.dtype) else "triton"
        if host.ahead(q, k, v, terms):
            return f"{own}'s own, which is faster than PyTorch's"
        return library_backward.described(own, LIBRARY_ON, q, k, v, terms)

    def first(
        self, problem: Problem, names: tuple[str, ...], sink_keys: int, tensors: tuple[Tensor, ...]
    ) -> tuple[Results, Prepared | None]:
        host, run = self._host(), self._run
        found: tuple[Results, Prepared | None]
        if calls.learns((problem.q, problem.k, problem.v, problem.sinks)):
            found = host.first_with_gradients(
                self._forward, run, problem, names, sink_keys, tensors
            )
        else:
            found = host.recorded(
                lambda launches: host.results(launches, run, problem, names, sink_keys), tensors
            )
        return found

    @property
    def _forward(self) -> Any:
        """The forward operator."""
        return self._host().FORWARD

    @property
    def _run(self) -> Any:
        """The function behind the operator, which takes `Launches` first."""
        return self._host().run

    def _host(self) -> Any:
        from headwise.engines.triton.host import attention_call

        return attention_call


TRITON = Triton()
