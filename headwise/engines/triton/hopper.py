"""The Hopper forward: the Triton engine with a faster forward kernel, in Gluon, for some problems.

In the plan it is an engine of its own; gradients and statistics are the Triton engine's.
"""

from __future__ import annotations

from typing import Any

import torch

from headwise.core.problem import Problem
from headwise.engines.triton.engine import TRITON, Triton
from headwise.engines.triton.limits import WIDEST

HOPPER_GENERATION = 9
LONG = 4096  # queries and keys from which this forward is faster than cuDNN's (docs/gpu.md)


class Hopper(Triton):
    """Plain and capped dot scores in 16-bit dtypes, under any mask but a dense one."""

    name = "hopper"
    rank = 2
    partial = False  # its kernel writes outputs in 16 bits, and parts are float32

    def absent(self, device: torch.device) -> str | None:
        needs = "it needs an NVIDIA Hopper GPU, such as an H100 or H200"
        if device.type != "cuda" or torch.version.hip is not None:
            return needs
        missing = TRITON.absent(device)
        if missing is not None:
            return missing
        found = self._host().card(device)
        if found.major != HOPPER_GENERATION:
            return f"{needs}, and this is {found.name}"
        return self._loaded()

    def refuses(self, problem: Problem, observed: bool) -> str | None:
        q, v = problem.q, problem.v
        if q.dtype not in (torch.bfloat16, torch.float16):
            return f"it takes bfloat16 and float16, and this is {q.dtype}"
        v = v if v.shape[-1] else problem.k  # without values the keys stand in for them
        if max(q.shape[-1], v.shape[-1]) > WIDEST:
            return f"heads are {q.shape[-1]} and {v.shape[-1]} wide; it takes 1 to {WIDEST}"
        if v.shape[-1] % 8:
            return f"values are {v.shape[-1]} wide; it takes multiples of 8"
        if problem.additive is not None or problem.bias is not None:
            return "it takes dot scores, plain or capped, without a bias"
        if problem.dropout:
            return "it has no dropout"
        return self._refuses_mask(problem) or self._refuses_scale(problem)

    def _refuses_mask(self, problem: Problem) -> str | None:
        if problem.mask is not None and problem.mask.pieces == 0:
            return "it takes masks of intervals, such as causal() and documents(), not dense ones"
        if problem.k.shape[2] == 0:
            return "there are no keys, so there is nothing to compute"
        if self._host().few(problem.q, problem.k):
            return "few queries meet many keys, which is faster with the keys split over the GPU"
        return None

    def _refuses_scale(self, problem: Problem) -> str | None:
        scale, cap = problem.scale, problem.softcap
        if not 1e-6 < (cap or scale) < 1e6:  # so that scores times it are finite
            name, value = ("caps", cap) if cap else ("scales", scale)
            return f"it takes {name} between a millionth and a million, and this is {value:g}"
        if self._host().cap_of(scale, cap) == 2:
            return f"it takes scales of 1/10000 to 10000 times a cap, and this is {scale / cap:g}"
        return None

    def priority(self, problem: Problem) -> int:
        """Come before PyTorch's kernels for long inputs of wide heads without gradients."""
        q, k, v = problem.q, problem.k, problem.v
        learning = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        long = min(q.shape[2], k.shape[2]) >= LONG
        ahead = long and not learning and q.shape[-1] > 64
        return 0 if ahead else self.rank

    @property
    def _forward(self) -> Any:
        from headwise.engines.triton.host import hopper_call  # needs Gluon, used on Hopper only

        return hopper_call.FORWARD

    @property
    def _run(self) -> Any:
        from headwise.engines.triton.host import hopper_call

        return hopper_call.run_hopper_forward


HOPPER = Hopper()
