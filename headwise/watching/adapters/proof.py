"""Proof that a foreign function was understood: a few of its rows, computed once more."""

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
    """ValueError unless the call gives what the function gave, out (B, N, Hq, Dv), in a few rows.

    Logits of low precision are rounded before the exponential, so the larger they are the further
    an honest output may be off. Rows that see nothing, and numbers that are none any more, are no
    proof of anything; False where there was nothing else.
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
        raise ValueError(f"its output is {tuple(theirs.shape)} where {tuple(ours.shape)} was due")
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
            f"its output is not softmax(scale · q·k + mask) · v as its arguments say: off by "
            f"{apart:.2g} where rounding explains {allowed:.2g}"
        )
    return True


@contextmanager
def without_dropout(module: nn.Module, device: torch.device) -> Iterator[None]:
    """A module that drops nothing for a while, and where no random number is used up."""
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
