"""The result of an engine's one pass: the output, and the sums over pairs behind the statistics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# A call's requests besides out, lse and max_logit. Plain ints, because operators take no flags.
ENTROPY, DISTANCE, MOMENTS, LOG_TOTAL = 1, 2, 4, 8
WIDE = 16  # out in float32 or wider, because results of other keys are still to be merged
COARSE = 64.0  # an lse beyond this is rounded so much that it shows in the weights
EVERYTHING = ENTROPY | DISTANCE | MOMENTS | LOG_TOTAL


class Sums(NamedTuple):
    """out (B, Hq, N, Dv); the rest (B, Hq, N), or empty (0,) if it was not asked for."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    distance: Tensor
    logit_mean: Tensor
    logit_var: Tensor
    visible: Tensor  # how many keys the row sees
    log_total: Tensor  # lse - max_logit before rounding; 0 for a row that sees no key

    def totals(self) -> RowTotals:
        """The totals that turn logits into weights; exact if log_total was asked for."""
        return RowTotals.known(self.lse, self.max_logit, self.log_total)


class RowTotals(NamedTuple):
    """Totals that turn a row's logits s into weights: log p = (s - base) - log_total.

    base = lse and log_total = 0 would do, but lse is rounded: near 1e8, float32 has no fractions.
    The largest logit as the base is exact. Each tensor is (B, Hq, N).
    """

    lse: Tensor
    base: Tensor  # -inf for a row that sees no key
    log_total: Tensor

    @staticmethod
    def known(lse: Tensor, max_logit: Tensor, log_total: Tensor) -> RowTotals:
        """Totals from the fields of `Sums`; log_total is empty if it was not asked for."""
        if log_total.ndim < lse.ndim:
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


def room(q: Tensor, v: Tensor, wants: int) -> Sums:
    """Unwritten `Sums` for q (B, Hq, N, D) and v (B, Hkv, M, Dv)."""
    rows = q.shape[:-1]
    wide = q.dtype if q.dtype == torch.float64 else torch.float32
    nothing = q.new_empty(0, dtype=wide)  # one for all: an allocation takes microseconds

    def statistic(asked: int) -> Tensor:
        return q.new_empty(rows, dtype=wide) if asked else nothing

    return Sums(
        q.new_empty(*rows, v.shape[-1], dtype=wide if wants & WIDE else q.dtype),
        statistic(1),
        statistic(1),
        # not shared, because it has a gradient
        q.new_empty(rows if wants & ENTROPY else 0, dtype=wide),
        statistic(wants & DISTANCE),
        statistic(wants & MOMENTS),
        statistic(wants & MOMENTS),
        statistic(wants & MOMENTS),
        statistic(wants & LOG_TOTAL),
    )
