"""Proof that a model's attention was read correctly: a few of its rows, computed once more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headwise.core.observation import sample_rows
from headwise.core.problem import pose
from headwise.engines.reference import REFERENCE
from headwise.nn.call import Call

ROWS = 8


def prove(call: Call, out: Tensor) -> bool:
    """Raise ValueError unless the call gives the model's output (B, N, Hq, Dv) in a few rows.

    Logits of low precision are rounded before the exponential, so the larger they are the further
    a correct output may be off. Rows that see nothing, NaN and infinities prove nothing; False if
    there was nothing else.
    """
    options = call.options()
    del options["dropout"], options["engine"]
    problem = pose("attention", call.q, call.k, call.v, **options)
    rows = sample_rows(ROWS, call.q.shape[2], call.q.device)
    if rows is not None:
        problem, out = problem.at(rows), out.index_select(1, rows)
    ours, seen = REFERENCE.observe(problem, ("max_logit",), sink_keys=1)
    shown = seen["max_logit"] > -torch.inf  # (B, Hq, N)
    theirs = out.transpose(1, 2)
    if theirs.shape != ours.shape:
        raise ValueError(f"its output is {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
    finite = ours.isfinite() & theirs.isfinite() & shown[..., None]
    if not bool(finite.any()):
        return False
    eps = max(torch.finfo(x.dtype).eps for x in (problem.q, out))
    largest = float(seen["max_logit"][finite.any(-1)].abs().max())
    width = float(call.v.abs().nan_to_num(0.0, posinf=0.0).max())
    allowed = width * (eps**0.5 + 4 * eps * largest)
    apart = float((theirs - ours)[finite].abs().max())
    if not apart <= allowed:
        raise ValueError(
            f"its output is not softmax(scale · q·k + mask) · v of its arguments: it is off by "
            f"{apart:.2g}, and rounding explains {allowed:.2g}"
        )
    return True


@contextmanager
def without_dropout(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Let a module drop nothing for a while, and use up no random numbers."""
    learning = [part for part in module.modules() if part.training]
    others = [] if device.type == "cpu" else [device]
    for part in learning:
        part.training = False
    try:
        with torch.random.fork_rng(others, device_type=others[0].type if others else "cuda"):
            yield
    finally:
        for part in learning:
            part.training = True
