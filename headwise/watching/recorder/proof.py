"""Proof that a model's attention was read correctly: a few of its rows, computed once more.

The comparison is a figure, recorded like the others. It is judged at once only where reading it
waits for nothing, or where a strict watch asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headwise.core.observation import sample_rows
from headwise.core.problem import pose
from headwise.engines.reference import REFERENCE
from headwise.nn.call import Call
from headwise.watching.recorder.board import waits

ROWS = 8


@dataclass
class Proofs:
    """The forms of calls that were compared with the model's output, each of a layer once."""

    strict: bool
    _forms: dict[str, set[tuple[object, ...]]] = field(default_factory=dict)
    _waiting: set[str] = field(default_factory=set)  # modules that were compared and not judged

    def known(self, name: str, form: tuple[object, ...]) -> bool:
        """True if a call of this form was compared already."""
        return form in self._forms.get(name, ())

    def compare(
        self, name: str, form: tuple[object, ...], call: Call, out: Callable[[], Tensor]
    ) -> Tensor | None:
        """How far the model's output (B, N, Hq, Dv) is off, for the first call of a form.

        None for the others. ValueError if it is too far off and that is known without waiting.
        """
        forms = self._forms.setdefault(name, set())
        if form in forms:
            return None
        off = distance(call, out())
        forms.add(form)
        if self.strict or not waits(off.device):
            self.judge(name, float(off))
        else:
            self._waiting.add(name)
        return off

    def take(self) -> set[str]:
        """The modules that were compared and are to be judged by whoever asks."""
        waiting, self._waiting = self._waiting, set()
        return waiting

    def judge(self, name: str, off: float) -> None:
        """Raise ValueError if a layer was misread; where nothing is proved, compare again."""
        if not -math.inf < off <= 1:
            self._forms.pop(name, None)
        if not off <= 1:
            raise ValueError(
                "its output is not softmax(scale · q·k + mask) · v of its arguments: it is off by "
                f"{off:.2g} times what rounding explains"
            )


def distance(call: Call, out: Tensor) -> Tensor:
    """How far the model's output (B, N, Hq, Dv) is from the call's, in a few rows: a number.

    1 is what rounding explains. Logits of low precision are rounded before the exponential, so the
    larger they are the further a correct output may be off. Rows that see nothing, NaN and
    infinities prove nothing; -inf if there was nothing else.
    """
    problem = pose("attention", *call[:3], call.given._replace(dropout=0.0))
    rows = sample_rows(ROWS, call.q.shape[2], call.q.device)
    if rows is not None:
        problem, out = problem.at(rows), out.index_select(1, rows)
    ours, seen = REFERENCE.observe(problem, ("max_logit",), sink_keys=1)
    shown = seen["max_logit"] > -torch.inf  # (B, Hq, N)
    theirs = out.transpose(1, 2)
    if theirs.shape != ours.shape:
        raise ValueError(f"its output is {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
    finite = ours.isfinite() & theirs.isfinite() & shown[..., None]
    if finite.numel() == 0:
        return torch.full((), -torch.inf, dtype=torch.float64, device=out.device)
    # Eager attention of transformers takes the softmax in float32 whatever the logits are.
    eps = max(torch.finfo(x).eps for x in (problem.q.dtype, out.dtype, torch.float32))
    largest = seen["max_logit"].abs().masked_fill(~finite.any(-1), 0).amax().double()
    width = call.v.abs().nan_to_num(0.0, posinf=0.0).amax().double()
    allowed = width * (eps**0.5 + 4 * eps * largest)
    apart = (theirs.double() - ours).abs().masked_fill(~finite, 0).amax()
    off = torch.where(apart > 0, apart / allowed, 0.0)
    return torch.where(finite.any(), off, -torch.inf)


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
