"""The totals of a row that turn its logits into weights."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

COARSE = 64.0  # an lse beyond this is rounded so much that it shows in the weights


class RowTotals(NamedTuple):
    """Totals that turn a row's logits s into weights: log p = (s - base) - log_total.

    base = lse and log_total = 0 would do, but lse is rounded: near 1e8, float32 has no fractions.
    The largest logit as the base is exact. Each tensor is (B, Hq, N).
    """

    lse: Tensor
    base: Tensor  # -inf for a row that sees no key
    log_total: Tensor

    @staticmethod
    def known(lse: Tensor, max_logit: Tensor, log_total: Tensor | None) -> RowTotals:
        """Totals from the results of a pass; without log_total, as exact as lse is."""
        if log_total is None:
            return RowTotals.of_lse(lse)
        return RowTotals(lse, max_logit, log_total)

    @staticmethod
    def of_lse(lse: Tensor) -> RowTotals:
        """Totals from lse alone, as exact as lse is."""
        return RowTotals(lse, lse, torch.zeros_like(lse))

    def coarse(self) -> bool:
        """True if some lse is too large to give exact weights on its own."""
        if self.lse.numel() == 0:
            return False
        largest = self.lse.abs().masked_fill(self.lse == -torch.inf, 0).amax()
        return bool(largest > COARSE)

    def safe_base(self) -> Tensor:
        """The base with +inf for rows that see no key, so that their weights are 0."""
        return self.base.masked_fill(self.base == -torch.inf, torch.inf)

    def weight(self, s: Tensor) -> Tensor:
        """The weights of logits that broadcast with the rows; at most 1, whatever rounding does."""
        return torch.exp((s - self.safe_base()).clamp_max(0) - self.log_total)
