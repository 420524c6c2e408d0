"""A watched call that is held until a backward pass tells the gradient of its output.

Then the effect of every edge can be computed. What is held is linear in the length: queries, keys
and values, which autograd keeps until then in any case, and the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.api import effect_map
from headwise.core.observation import sample_rows
from headwise.core.versions import Versions, may_be_overwritten
from headwise.handover import SplitCalls
from headwise.maps.effect_map import EffectMap, grad_out
from headwise.nn.call import Call
from headwise.watching.recorder.seen_call import of_head, owned, tensors_of, versions_of


class Output(NamedTuple):
    """A tensor of the model's graph, and how its gradient becomes that of a call's output."""

    tensor: Tensor
    turned: Callable[[Tensor], Tensor]  # to (B, Hq, N, Dv)


DROPPED = "its weights are dropped at random; call model.eval(), or train without dropout"
"""Why a call's output is not that of its weights."""


class HeldRows(NamedTuple):
    """Where the rows of a call stand in the sequence."""

    start: int = 0  # the position of the first query
    first_key: int = 0  # the position of the first key
    padding: Tensor | None = None  # (B, N) bool
    split: SplitCalls | None = None  # whose processes hold the other parts of the sequence


@dataclass
class HeldCall:
    """One call of the last pass, and its output's gradient once a backward pass has come by.

    Several backward passes through the same forward add up, as they do in `.grad`.
    """

    call: Call | None  # None if its gradient will not be known
    rows: HeldRows = field(default_factory=HeldRows)
    why: str = "no backward pass has come by since its last forward"
    grad: Tensor | None = None  # (B, Hq, N, Dv)
    product: Tensor | None = None  # (Hq,): grad · out, summed over rows
    _kept: Versions | None = None

    @staticmethod
    def of(call: Call, output: Output | str | None, out: Tensor | None, rows: HeldRows) -> HeldCall:
        """Hold a call; `out` (B, Hq, N, Dv) is its output, if it is known.

        `output` says in words why its gradient will not be known, if that is so.
        """
        why = _refusal(call, output)
        if why is not None:
            return HeldCall(None, rows, why)
        assert isinstance(output, Output)
        kept = owned(call._replace(q=call.q.detach(), k=call.k.detach(), v=call.v.detach()))
        if may_be_overwritten(kept.v):
            kept = kept._replace(v=kept.v.clone())
        held = HeldCall(kept, rows, _kept=versions_of(kept))
        out = None if out is None else out.detach()
        output.tensor.register_hook(lambda grad: held.receive(output.turned(grad), out))
        return held

    @torch.no_grad()
    def receive(self, grad: Tensor, out: Tensor | None) -> None:
        """A backward pass has computed the gradient of the output."""
        grad = grad.detach()
        if self.rows.padding is not None:
            grad = grad.masked_fill(self.rows.padding[:, None, :, None], 0)
        self.grad = grad if self.grad is None else self.grad + grad
        if out is not None:
            wide = torch.promote_types(out.dtype, torch.float32)
            product = grad_out(grad, out, wide).sum((0, 2))
            self.product = product if self.product is None else self.product + product

    @property
    def awaits(self) -> bool:
        """True if its forward ran without gradients, and may be run again with them."""
        return self.call is None and self.why == _PLAIN_FORWARD

    @property
    def nbytes(self) -> int:
        """The bytes that it keeps alive."""
        if self.call is None:
            return 0
        tensors = [*tensors_of(tuple(self.call)), *([] if self.grad is None else [self.grad])]
        return sum(x.numel() * x.element_size() for x in tensors)

    def refusal(self) -> str | None:
        """Why its effects are not known; None if they are."""
        if self.grad is None:
            return self.why
        if self._kept is not None and self._kept.modified() is not None:
            return "its queries, keys or values were written over; read the effects earlier"
        return None

    def map(self, rows: Tensor | None = None) -> EffectMap:
        """The effects of its edges, (B, Hq, N, M), or of some rows."""
        call, grad = self.call, self.grad
        assert call is not None
        assert grad is not None
        options = call.given.of_weights()
        if self.rows.split is not None:
            return self.rows.split.effect_map(*call[:3], grad, call.given)
        found = effect_map(*call[:3], grad, **options)
        return found if rows is None else found.at(rows)

    def of_head(self, head: int) -> HeldCall:
        """The same of one query head."""
        call, grad = self.call, self.grad
        assert call is not None
        assert grad is not None
        one = replace(self, call=of_head(call, range(len(call.q)), head))
        one.grad, one.product = grad[:, head : head + 1], None
        return one

    def sampled(self, rows: int | None) -> Tensor | None:
        """The numbers of so many sampled rows; None for all."""
        if self.call is None or self.rows.split is not None:
            return None
        return sample_rows(rows, self.call.q.shape[2], self.call.q.device)

    def switched_off(self) -> Tensor | None:
        """What switching each head off adds, to first order: -Σ grad · out, (Hq,)."""
        if self.refusal() is not None:
            return None
        if self.product is None and self.rows.split is None:
            self.product = self.map().totals().product.sum((0, 2))
        return None if self.product is None else -self.product


_PLAIN_FORWARD = "its forward ran without gradients"


def _refusal(call: Call, output: Output | str | None) -> str | None:
    if output is None:
        return "the output of its heads can't be told apart from what the model computes with it"
    if isinstance(output, str):
        return output
    if call.dropout:
        return DROPPED
    if not output.tensor.requires_grad:
        return _PLAIN_FORWARD
    return None
