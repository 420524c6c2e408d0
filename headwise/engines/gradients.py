"""The gradients of a call: what a backward takes and returns, and the constants of its rows.

In every engine's backward ds = p (dP − constant).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.core.row_sums import RowResults, RowTotals


class Gradients(NamedTuple):
    """The gradients of a call's tensors; None where the call has no such tensor.

    A bias that does not require a gradient has none: it would take as much memory as the weights.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    additive: Tensor | None
    bias: Tensor | None
    slopes: Tensor | None
    relative: Tensor | None
    sinks: Tensor | None


class RowGradients(NamedTuple):
    """The gradients of a forward's results; None for those that have none."""

    out: Tensor | None
    lse: Tensor | None
    entropy: Tensor | None

    @classmethod
    def of(cls, grads: Sequence[Tensor | None]) -> RowGradients:
        """Return those of `RowResults`, in their order; the others have no gradients."""
        return cls(*(grads[place] for place in _DIFFERENTIABLE))


_DIFFERENTIABLE = tuple(RowResults._fields.index(name) for name in RowGradients._fields)


def without_gradients(found: Sequence[Tensor | None]) -> list[Tensor]:
    """Return the results that have no gradients: of `RowResults`, and all further ones."""
    rest = (x for place, x in enumerate(found) if place not in _DIFFERENTIABLE)
    return [x for x in rest if x is not None]


class BackwardInputs(NamedTuple):
    """What a backward takes besides the forward's inputs: its results, and their gradients."""

    out: Tensor
    totals: RowTotals
    entropy: Tensor | None
    grad_out: Tensor
    grad_lse: Tensor | None = None
    grad_entropy: Tensor | None = None
    bias_learns: bool = False

    def of_rows(self, rows: slice) -> BackwardInputs:
        """The same for some of the rows."""

        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[:, :, rows]

        totals = RowTotals(*(x[:, :, rows].contiguous() for x in self.totals))
        out = self.out[:, :, rows]
        grads = cut(self.entropy), self.grad_out[:, :, rows], cut(self.grad_lse)
        return BackwardInputs(out, totals, *grads, cut(self.grad_entropy), self.bias_learns)

    def row_constants(self, products: Tensor, share: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what is subtracted from every dP of a row, (B, Hq, N), and the sinks' gradient.

        `products` is Σ grad_out · out of each row, and becomes the constant; `share` the weight on
        its sink. A sink has no value, so its dP is 0; its entropy term is the sum over the visible
        keys.
        """
        if self.grad_lse is not None:
            products -= self.grad_lse
        if self.grad_entropy is not None and self.entropy is not None:
            entropy = self.entropy if share is None else self.entropy + share
            products += self.grad_entropy * entropy
        if share is None:
            return products, None
        row = -products if self.grad_entropy is None else self.grad_entropy - products
        return products, (share * row).sum((0, 2))


def sink_share(sinks: Tensor | None, totals: RowTotals) -> Tensor | None:
    """Return the weight on each row's sink, (B, Hq, N); None without sinks."""
    if sinks is None:
        return None
    wide = sinks.to(totals.lse.dtype)[:, None]
    above = wide - totals.safe_base()
    share = torch.exp(above - totals.log_total)
    # Nothing else has a weight, the last case so far above the logits that it overflows.
    alone = (totals.base == -torch.inf) | (wide == torch.inf) | (above == torch.inf)
    return torch.where(alone, (wide > -torch.inf).to(share.dtype), share)
