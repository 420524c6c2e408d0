"""The constants of a row in every engine's backward, where ds = p (dP − constant)."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.core.row_sums import RowTotals


def row_constant(
    products: Tensor,
    share: Tensor | None,
    entropy: Tensor | None,
    grad_lse: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """Return what is subtracted from every dP of a row, (B, Hq, N), written into `products`.

    `products` is Σ grad_out · out of each row, `share` the weight on its sink.
    """
    if grad_lse is not None:
        products -= grad_lse
    if grad_entropy is not None and entropy is not None:
        products += grad_entropy * (entropy if share is None else entropy + share)
    return products


def sink_share(sinks: Tensor, totals: RowTotals) -> Tensor:
    """Return the weight on each row's sink, (B, Hq, N)."""
    wide = sinks.to(totals.lse.dtype)[:, None]
    above = wide - totals.safe_base()
    share = torch.exp(above - totals.log_total)
    # Nothing else has a weight, the last case so far above the logits that it overflows.
    alone = (totals.base == -torch.inf) | (wide == torch.inf) | (above == torch.inf)
    return torch.where(alone, (wide > -torch.inf).to(share.dtype), share)


def sinks_gradient(share: Tensor, constant: Tensor, grad_entropy: Tensor | None) -> Tensor:
    """Return the gradient of the sinks, (Hq,).

    A sink has no value, so its dP is 0; its entropy term is the sum over the visible keys.
    """
    row = -constant if grad_entropy is None else grad_entropy - constant
    return (share * row).sum((0, 2))
